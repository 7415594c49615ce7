"""The seam of the library: form a message, let the neighborhood mix it, use the mix.

    message = algorithm.message(x, g, state, step)      # reads, never writes
    mixed   = the weighted sum over the neighborhood    # simulator or network
    algorithm.update(x, g, mixed, state, step)          # the only writer of x and state

The last dimension of every tensor is parameters, anything before it is nodes: the same two
functions run n simulated nodes, (n, d), and one real node, (d,).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

Message = Tensor | tuple[Tensor, ...]
State = Mapping[str, Tensor]


class Reach(Enum):
    """The nodes that take part in the averaging of one step."""

    NEIGHBORS = "neighbors"  # mixed = W @ message
    EVERYONE = "everyone"  # mixed = the exact mean over all nodes
    NOBODY = "nobody"  # mixed = the node's own message

    def messages_sent(self, num_processes: int, peers: float) -> float:
        """Return how many messages' worth of bytes a process sends: one per peer, 2 (n - 1) / n in
        a ring all-reduce of n processes, none to nobody."""
        if self is Reach.NEIGHBORS:
            return peers
        return 2 * (num_processes - 1) / num_processes if self is Reach.EVERYONE else 0


def layer_norm(x: Tensor) -> Tensor:
    """Return the norm of each row of x, (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


@dataclass(frozen=True)
class Step:
    """The facts that an algorithm may know of the step it takes."""

    index: int
    lr: float
    lr_ratio: float = 1.0  # lr over that of the step before; see `lr_ratio`
    sync_lr_ratio: float = 1.0  # lr over that of the last step that reached everyone
    weight_decay: float = 0.0  # already inside g, unless the method decouples it
    adaptive: bool = True  # whether a layer-wise rate applies to this layer
    skip: bool = False  # g is zero because the gradient was left out
    gradients: int = 1  # how many were not left out, up to and with this step
    norm: Callable[[Tensor], Tensor] = layer_norm  # of a layer, of which x may be a shard


def lr_ratio(lr: float, previous_lr: float | None) -> float:
    """lr / previous lr, defined also around zeros: 0 at a zero, 1 after one and at the start.

    A step with lr = 0 is then plain gossip, and the one after it starts from what gossip moved.
    """
    if lr == 0:
        return 0.0
    return lr / previous_lr if previous_lr else 1.0


_MOST = 1e18  # the product of two, a rate and a weight decay, is still a float32


def check_number(name: str, given: Any, above: bool = False, most: float = _MOST) -> float:
    """A finite number of 0 or more, or of more than 0 (`above`); True is none."""
    value = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= value <= most and not (above and value == 0):
        return float(value)
    allowed = "above 0" if above else "of 0 or more"
    limit = f", at most {most:g}" if number and value > most else ""
    raise ValueError(f"{name} must be a finite number {allowed}{limit}, got {shown(given)}")


def check_count(name: str, given: Any, least: int = 1) -> int:
    """A whole number that is no smaller than `least`; True is none."""
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{name} must be a whole number of {least} or more, got {shown(given)}")
    return given


def shown(given: Any) -> str:
    """Return what was given as text for an error, cut where it is long; Python refuses to write
    huge numbers."""
    try:
        text = repr(given)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) < 200 else f"{text[:40]}..."


class Algorithm(ABC):
    """The recursion that a node computes. Subclasses are frozen dataclasses of hyper-parameters.

    A subclass gives `message` and `update`, and whatever is not as below.

    Attributes:
        buffers: State tensors, zero at the start.
        balanced: Buffers whose sum over the nodes is zero, or the mean model would be wrong. They
            begin anew when the members of a run change.
        averaged_state: A state tensor of positive numbers that is averaged, too. `message` then
            returns (payload, its next value), of which a seventeenth travels in each step (see
            `turns`). It replaces its own part after `update`, which gets the payload's mix alone.
        needs_gradient: False if the message is known before the gradient.
        needs_symmetric: True if the recursion is only sound with symmetric weights.
        decoupled_decay: True if g has no weight decay inside, as in AdamW.
        layerwise: True if message and update must be called on one layer at a time.
        period: The number of steps after which `reach` and `payloads` repeat.
    """

    buffers: ClassVar[tuple[str, ...]] = ()
    balanced: ClassVar[tuple[str, ...]] = ()
    averaged_state: ClassVar[str | None] = None
    needs_gradient: ClassVar[bool] = True
    needs_symmetric: ClassVar[bool] = False
    decoupled_decay: ClassVar[bool] = False
    layerwise: ClassVar[bool] = False
    period: ClassVar[int] = 1
    # What a param group may set for itself: torch.optim's name, and the field here.
    per_group: ClassVar[Mapping[str, str]] = {"momentum": "beta", "nesterov": "nesterov"}

    def reach(self, index: int) -> Reach:
        """Return who takes part in step `index`."""
        return Reach.NEIGHBORS

    def payloads(self, index: int) -> int:
        """Return how many tensors of the size of x the message of step `index` has."""
        return 1

    def alone(self) -> Algorithm:
        """Return what one node runs that has nobody to average with."""
        return self

    def steady(self) -> tuple[Algorithm, ...]:
        """Forms of the method for weights on which it would be unstable."""
        return ()

    def linear(self) -> tuple[Algorithm, float]:
        """The linear recursion that stability is judged by, and what it multiplies gradients by."""
        return self, 1.0

    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters that a param group may set for itself, by torch.optim's names."""
        fields = _fields(type(self))
        return {name: getattr(self, own) for name, own in self.per_group.items() if own in fields}

    def with_hyper(self, group: Mapping[str, Any]) -> Algorithm:
        """The algorithm with the hyper-parameters that a param group has."""
        changes = {}
        for name, own in self.per_group.items():
            if name in group and group[name] != getattr(self, own, group[name]):
                changes[own] = group[name]
        return dataclasses.replace(self, **changes) if changes else self  # type: ignore[type-var]

    def init(self, x: Tensor) -> dict[str, Tensor]:
        """The state of a run that begins at x."""
        return {name: torch.zeros_like(x) for name in self.buffers}

    @abstractmethod
    def message(self, x: Tensor, g: Tensor, state: State, step: Step) -> Message:
        """Return what is averaged: a tensor like x, or a tuple of `payloads` of them."""

    @abstractmethod
    def update(self, x: Tensor, g: Tensor, mixed: Message, state: State, step: Step) -> None:
        """Changes x and state in place, given the average of the messages, which is not kept."""


@cache
def _fields(kind: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(kind))


def check_between(owner: Algorithm, **values: float) -> None:
    """Refuses coefficients outside [0, 1), and switches that are not True or False."""
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        if field.type in ("bool", bool) and not isinstance(value, bool):
            raise ValueError(
                f"{type(owner).__name__}: {field.name} must be True or False, got {value!r}"
            )
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < 1:
            raise ValueError(
                f"{type(owner).__name__}: {name} must be in [0, 1), got {value!r}; 0.9 is usual"
            )


# What an algorithm needs over a whole run ---------------------------------------------------------

_LOOKED_AT = 4096  # steps at which a declared period is compared with what the algorithm does


@cache
def reaches(algorithm: Algorithm) -> frozenset[Reach]:
    """Return everyone whom the algorithm ever reaches."""
    return frozenset(algorithm.reach(k) for k in range(algorithm.period))


def always_everyone(algorithm: Algorithm) -> bool:
    """Return True if every step is an exact average, so that no topology is ever used."""
    return reaches(algorithm) == {Reach.EVERYONE}


@cache
def most_payloads(algorithm: Algorithm, reach: Reach) -> int:
    """Return the most payloads of a message to these; 0 if it never reaches them."""
    steps = [k for k in range(algorithm.period) if algorithm.reach(k) is reach]
    return max(map(algorithm.payloads, steps), default=0)


@cache
def check_period(algorithm: Algorithm) -> None:
    """Refuses an algorithm whose steps are not what its period says."""
    name = type(algorithm).__name__
    period = check_count(f"{name}: period", algorithm.period)
    for what in (algorithm.reach, algorithm.payloads):
        found = [what(k) for k in range(_LOOKED_AT)]
        for k in range(period, _LOOKED_AT):
            if found[k] != found[k % period]:
                raise ValueError(
                    f"{name}: {what.__name__}({k}) is {found[k]}, but with period {period} it "
                    f"should be {found[k % period]} as at step {k % period}; say in `period` after "
                    "how many steps reach and payloads repeat"
                )
