"""LocalSteps: any torch optimizer on every node, and an average with a neighbor every H steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from decentlam.algorithms import Algorithm, Reach, check_count, check_number, reaches, shown
from decentlam.algorithms.local_average import LocalAverage
from decentlam.algorithms.outer_step import OuterStep
from decentlam.data import Change, Place
from decentlam.errors import ExchangeError
from decentlam.local_steps.state_average import StateAverage
from decentlam.local_steps.timed import in_background, seconds_of, weighted
from decentlam.network.network import Network
from decentlam.optimizer import AnswerNeighbors, DecentralizedOptimizer
from decentlam.options import AveragingOptions
from decentlam.runtime.agreement import check_agreement
from decentlam.runtime.runtime import Runtime, StepStatistics
from decentlam.runtime.sharded import is_sharded
from decentlam.topology import Topology

log = logging.getLogger(__name__)

_TAG = 1 << 13  # of the inner state's messages, behind those of all buckets


def _of_averaging(name: str) -> Any:
    """Return a property that is the one of the optimizer that averages."""
    own = getattr(DecentralizedOptimizer, name)
    return property(attrgetter(f"_averaging.{name}"), doc=own.__doc__)


def _after_meeting(name: str) -> Callable[..., Any]:
    """Return a method that is the one of the optimizer that averages, once no message is under
    way."""

    @functools.wraps(getattr(DecentralizedOptimizer, name))
    def method(self: LocalSteps, *args: Any, **kwargs: Any) -> Any:
        self._meet()
        return getattr(self._averaging, name)(*args, **kwargs)

    return method


class LocalSteps(Optimizer, Joinable):
    """A torch optimizer on each node; every H steps the nodes average with their neighbors.

        every step:       the inner optimizer's step;    x -= lr e
        every H steps:    x+ = W x;    e += correction (x - x+) / (sum of lr since the last mix)

    e removes the drift of a node towards its own data; it is zero on average over the nodes. A step
    sends 1/H of a model to one neighbor. Second moments of Adam variants are averaged too, in 8
    bits per number.

    Args:
        inner: Any torch optimizer, such as torch.optim.AdamW or Muon. Both optimizers share their
            param groups, so you can build a scheduler with either.
        every: H, the number of local steps between two averages. Or a time such as "2s", for
            machines of unequal speed: each node takes as many steps as it can, has that weight in
            the average, and trains while messages travel.
        outer: A method that steps from the last average in the direction of the local steps,
            instead of the corrected average. `algorithms.PmSGD(0.9, nesterov=True)` with
            `outer_lr=0.7` is DiLoCo; `algorithms.DecentLaM(0.5)` is NoLoCo with half its bytes.
        outer_lr: The learning rate of `outer`.
        correction: The share of what mixing moves that goes into e; 0 is plain averaging.
        delay: The number of local steps during which messages travel. The change is added
            afterwards.
        average_state: Names of second moments in the inner optimizer's state. Default: those of
            Adam variants and RMSprop; none with `outer`.
        options: topology, message_dtype, process_group, timeout_seconds, heartbeat_seconds,
            elastic, model, stable ("auto") and shared_memory, as in `OptimizerOptions`.

    When not: on fast networks. `decentlam.AdamW` averages in every step and comes closer to an
    all-reduce.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> opt = decentlam.LocalSteps(inner, every=16)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> opt.step()

    References for the outer steps: Douillard et al., DiLoCo, 2023; Kolehmainen et al., NoLoCo,
    2025.
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step, and all keep count

    def __init__(
        self,
        inner: Optimizer,
        every: int | str = 16,
        *,
        outer: Algorithm | None = None,
        outer_lr: float = 1.0,
        correction: float = 0.2,
        delay: int = 0,
        average_state: Sequence[str] | None = None,
        **options: Unpack[AveragingOptions],
    ) -> None:
        _check_inner(inner)
        if unknown := sorted(options.keys() - AveragingOptions.__annotations__.keys()):
            raise TypeError(f"LocalSteps has no argument {', '.join(unknown)}")
        elastic = options.get("elastic", False)
        seconds = seconds_of(every)
        if seconds is None:
            check_count("every", every)
        check_count("delay", delay, least=0)
        if seconds is not None and (delay or elastic or outer is not None):
            raise ValueError(
                f"every={every!r} goes without delay, elastic and outer: messages travel until "
                "they arrive, and nodes take different numbers of steps. Leave these out, or give "
                "a number of steps"
            )
        if isinstance(every, int) and delay >= every:
            raise ValueError(
                f"delay={delay} must be less than every={every}: a message arrives before the next "
                "one leaves"
            )
        names = _checked_names(average_state, outer)
        self.inner, self.every, self.delay, self._seconds = inner, every, delay, seconds
        self._elastic = elastic
        self._taken = 0  # local steps since the run began
        self._sent_at = time.monotonic()
        self._arrival: Future[None] | None = None
        self._outer_lr = None if outer is None else check_number("outer_lr", outer_lr, above=True)
        self._since = 0  # local steps, since the last messages left
        self._found = False  # the names of the inner state
        self._pending = False  # messages are under way
        self._own_steps, self._weights = 0, list[float]()  # of them, in a run by time
        self._extra_bytes = 0  # of the inner state in them
        self._rates = [0.0 for _ in inner.param_groups]  # sums since the last messages left
        super().__init__(inner.param_groups, inner.defaults)
        Joinable.__init__(self)
        self._follow_inner()
        self._averaging = _Averaging(
            self,
            _algorithm(
                f"{every} steps of {type(inner).__name__}" if seconds is None else f"{every}",
                outer,
                correction,
                delay > 0 or seconds is not None,
            ),
            **{"stable": "auto", **options, "overlap": "none"},
        )
        timeout = timedelta(seconds=self._averaging._options.timeout_seconds)
        self._state_average = StateAverage(inner, names, timeout, self._averaging._tag + _TAG)
        if not elastic:  # newcomers' learning rates are those of the run
            check_agreement(self.network, {"delay": delay, **_hyper(inner), "state": names})

    def _follow_inner(self) -> None:
        """Have the inner optimizer's groups and state, which it replaces when it loads."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step; every H steps, average with the neighbors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runtime.check_training("call step()")
        params = [p for group in self.inner.param_groups for p in group["params"]]
        if all(p.grad is None for p in params):
            raise RuntimeError(
                "step() without any gradient: no parameter of the inner optimizer got one since "
                "zero_grad(). Call backward() first."
            )
        rates = [check_number("lr", group["lr"]) for group in self.inner.param_groups]
        finite = self._unscale(params)
        if finite:
            self.inner.step()
        self._follow_inner()
        if not self._found:
            Join.notify_join_context(self)
            self._find_state(finite)
        self._correct(rates)
        self._since += 1
        self._taken += 1
        if self._seconds is not None:
            self._average_in_time(self._seconds)
        elif self._pending and self._since == self.delay:
            self._receive()
        if self._since == self.every:
            self._send()
            if self.delay == 0:
                self._receive()
        return loss

    def _find_state(self, stepped: bool) -> None:
        """Find, on all processes together, the names of the state to average."""
        network = None if self._elastic else self.network
        self._found = self._state_average.find(network, stepped)

    def _average_in_time(self, seconds: float) -> None:
        """Use messages that have arrived, and send the next ones when it is time."""
        if self._pending and self._arrival is not None and self._arrival.done():
            self._receive()
        if not self._pending and time.monotonic() - self._sent_at >= seconds:
            self._send()

    @torch.no_grad()
    def _unscale(self, params: Sequence[Tensor]) -> bool:
        """Undo a GradScaler's scale; return False if it found a gradient that is not finite."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and bool(found_inf):
            return False
        if scale is not None:
            torch._foreach_div_([p.grad for p in params if p.grad is not None], float(scale))
        return True

    @torch.no_grad()
    def _correct(self, rates: Sequence[float]) -> None:
        """Take lr e off every parameter, as one local step does."""
        state = self._averaging.state
        for k, (lr, group) in enumerate(zip(rates, self.inner.param_groups, strict=True)):
            self._rates[k] += lr
            if self._outer_lr is None and lr > 0:
                params = [p for p in group["params"] if "e" in state.get(p, {})]
                if params:
                    torch._foreach_add_(params, [state[p]["e"] for p in params], alpha=-lr)

    def _send(self, absent: bool = False) -> None:
        """Send this node's model to its neighbors."""
        if not absent:
            Join.notify_join_context(self)
        for group, total in zip(self._averaging.param_groups, self._rates, strict=True):
            group["lr"] = total if self._outer_lr is None else self._outer_lr
        runtime = self.runtime
        for bucket in runtime.buckets:
            if "sent" in bucket.state:  # the node moves on while messages travel
                bucket.state["sent"].copy_(bucket.shard_x)
        runtime.begin(absent)
        counted = None if self._seconds is None else self._since
        with self._state_errors():
            self._extra_bytes = self._state_average.send(
                self.network, self.topology, runtime.index, counted
            )
        self._own_steps, self._sent_at = self._since, time.monotonic()
        self._pending, self._since, self._rates = True, 0, [0.0 for _ in self._rates]
        if self._seconds is not None:
            self._arrival = in_background(self._wait)

    def _wait(self) -> None:
        """Wait for all messages, and let nodes count as often as they took steps."""
        theirs = self._state_average.wait()
        for bucket in self.runtime.buckets:
            if bucket.pending is not None:
                terms = bucket.pending.wait()
                bucket.pending.terms = weighted(terms, self._own_steps, theirs)
                self._weights = [weight for weight, _ in bucket.pending.terms[1 : 1 + len(theirs)]]

    def _receive(self, absent: bool = False) -> None:
        """Wait for the neighbors' messages, and use them."""
        runtime, self._pending, weights = self.runtime, False, None
        if self._arrival is not None:
            arrival, self._arrival = self._arrival, None
            arrival.result()
            weights = self._weights
        if absent:
            runtime.step(absent=True)
        else:
            self._averaging.step()
        if runtime is self.runtime:
            with self._state_errors():
                self._state_average.use(weights)
        else:
            self._state_average.forget()
        self.statistics.bytes_sent += self._extra_bytes
        self.statistics.total_bytes_sent += self._extra_bytes

    @contextlib.contextmanager
    def _state_errors(self) -> Iterator[None]:
        """Leave the inner state as it is if a member of an elastic run is lost: the model's own
        exchange finds out, and the members change."""
        try:
            yield
        except ExchangeError:
            if not self._elastic:
                raise
            self._state_average.forget()

    def _settle(self) -> None:
        """Use messages that are under way, before anybody looks at the model."""
        if self._pending:
            self._receive()

    def _meet(self) -> None:
        """Settle on all nodes together: in a run by time some have averaged more often."""
        if self._seconds is not None:
            for _ in range(max(self.network.gather(self._sent)) - self._sent):
                self._settle()
                self._send(absent=True)
        self._settle()
        for group, inner in zip(self._averaging.param_groups, self.inner.param_groups, strict=True):
            group["lr"] = inner["lr"]  # what all nodes are asked about when they meet

    @property
    def _sent(self) -> int:
        """The number of averages whose messages have left."""
        return self.runtime.index + self._pending

    def _drop(self) -> None:
        """Let messages that are under way arrive, unused: the model was replaced."""
        if self._pending:
            if self._arrival is not None:
                self._arrival.result()
            self._pending, self._arrival = False, None
            self.runtime.recall_messages()
            self._state_average.drop()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the inner optimizer, on every process, between averages."""
        if not hasattr(self, "_averaging"):  # called by torch's own constructor
            super().add_param_group(param_group)
            return
        self._settle()
        self.inner.add_param_group(param_group)
        group = self.inner.param_groups[-1]
        try:
            self._averaging.add_param_group(_averaging_group(group))
        except BaseException:
            del self.inner.param_groups[-1]
            raise
        self._rates.append(0.0)
        self._follow_inner()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this node: the inner optimizer's, and what averaging remembers."""
        self._settle()
        own = BetweenAverages(self).state_dict()
        return {**own.pop("inner"), "local_steps": {**own, **self._averaging.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of this node."""
        if "local_steps" not in state_dict:
            raise ValueError(
                "this is not the state of a LocalSteps optimizer; load it into its inner one with "
                "optimizer.inner.load_state_dict, and the averages begin anew"
            )
        own = state_dict["local_steps"]
        inner = {k: v for k, v in state_dict.items() if k != "local_steps"}
        between = BetweenAverages(self)
        before = between.state_dict()
        between.load_state_dict({**own, "inner": inner})
        try:
            self._drop()
            self._averaging.load_state_dict({k: own[k] for k in ("state", "param_groups")})
        except BaseException:
            between.load_state_dict(before)
            raise

    def between_averages(self) -> BetweenAverages:
        """Return what a checkpoint has besides the state of averaging; ends a delay."""
        self._meet()
        return BetweenAverages(self)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("LocalSteps cannot be pickled or copied; use state_dict()")

    @property
    def averaging(self) -> DecentralizedOptimizer:
        """The optimizer that averages; its steps are the averages."""
        return self._averaging

    runtime: Runtime = _of_averaging("runtime")
    algorithm: Algorithm = _of_averaging("algorithm")
    topology: Topology = _of_averaging("topology")
    network: Network = _of_averaging("network")
    members: tuple[int, ...] = _of_averaging("members")
    statistics: StepStatistics = _of_averaging("statistics")  # of the last average
    join_device: torch.device = _of_averaging("join_device")
    join_process_group: Any = _of_averaging("join_process_group")

    @property
    def place(self) -> Place:
        """The place of this process at its next local step; `decentlam.Deal` gives its samples."""
        place = self._averaging.place
        return Place(self.steps, place.node, tuple(self._in_steps(c) for c in place.history))

    def _in_steps(self, change: Change) -> Change:
        """Return a change of members that is counted in averages, counted in local steps."""
        every = self.every if isinstance(self.every, int) else 1
        skipped = tuple((k * every + i, n) for k, n in change.skipped for i in range(every))
        return Change(change.step * every, change.size, change.lost, change.since * every, skipped)

    @property
    def steps(self) -> int:
        """The number of local steps since the run began."""
        if isinstance(self.every, str):
            return self._taken
        return self._sent * self.every + self._since

    averaged: Callable[..., AbstractContextManager[None]] = _after_meeting("averaged")
    eval: Callable[..., None] = _after_meeting("eval")
    merge: Callable[..., None] = _after_meeting("merge")
    consensus_distance: Callable[[], float] = _after_meeting("consensus_distance")

    def train(self) -> None:
        """Give the node its own parameters back, to the bit; in training, change nothing."""
        self._averaging.train()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for gradient accumulation; local steps send nothing in backward."""
        return contextlib.nullcontext()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self._seconds is not None:
            raise ValueError(
                f"Join has nodes wait for each other, which every={self.every!r} is to avoid; "
                "leave Join out: nodes that are done wait for the others in merge() or averaged()"
            )
        self._averaging.join_hook(**kwargs)  # refuses what cannot join
        return AnswerNeighbors(self._answer)

    def _answer(self) -> None:
        if not self._found:
            self._find_state(stepped=False)
            return
        self._settle()
        self._send(absent=True)
        self._receive(absent=True)


@dataclass(frozen=True, eq=False)
class BetweenAverages:
    """The state between two averages: the inner optimizer's, and counts."""

    owner: LocalSteps

    def state_dict(self) -> dict[str, Any]:
        owner = self.owner
        inner = owner.inner.state_dict()
        counts = {"since": owner._since, "taken": owner._taken, "rates": list(owner._rates)}
        return {"inner": inner, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        owner, inner = self.owner, self.owner.inner
        before = inner.state_dict()
        inner.load_state_dict(state["inner"])
        lacking = sorted({n for group in inner.param_groups for n in inner.defaults.keys() - group})
        if lacking:  # torch would find out in the next step
            inner.load_state_dict(before)
            raise ValueError(
                f"the state is that of another inner optimizer: {type(inner).__name__} has "
                f"{', '.join(lacking)}, which it lacks. Build the same inner optimizer"
            )
        owner._follow_inner()
        owner._since, owner._taken = state["since"], state["taken"]
        owner._rates = list(state["rates"])


class _Averaging(DecentralizedOptimizer):
    """The optimizer whose steps are averages; newcomers get the inner optimizer's state with it."""

    def __init__(self, owner: LocalSteps, algorithm: Algorithm, **options: Any) -> None:
        self._owner = weakref.proxy(owner)
        groups = [_averaging_group(group) for group in owner.inner.param_groups]
        super().__init__(groups, algorithm, lr=1.0, **options)

    def _announce(self) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("LocalSteps: %s", self.runtime.description(self._method, "average"))

    def _state_for_newcomers(self) -> dict[str, Any]:
        return BetweenAverages(self._owner).state_dict()

    def _take_state(self, state: dict[str, Any]) -> None:
        BetweenAverages(self._owner).load_state_dict(state)


def _algorithm(
    every: str, outer: Algorithm | None, correction: float, delayed: bool
) -> LocalAverage | OuterStep:
    if outer is None:
        return LocalAverage(every, correction, delayed)
    if not isinstance(outer, Algorithm):
        raise TypeError(
            "outer must be an Algorithm, such as decentlam.algorithms.PmSGD(0.9, nesterov=True), "
            f"got {shown(outer)}"
        )
    return OuterStep(outer, every, delayed)


def _averaging_group(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("params", "param_names") if name in group}


def _hyper(inner: Optimizer) -> dict[str, object]:
    """Return what the inner optimizers of all nodes must have alike."""
    return {
        f"{name} of group {k}": value
        for k, group in enumerate(inner.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def _check_inner(inner: object) -> None:
    if not isinstance(inner, Optimizer):
        raise TypeError(
            "inner must be a torch optimizer, such as torch.optim.AdamW(model.parameters(), "
            f"lr=1e-3), got {shown(inner)}"
        )
    name = type(inner).__name__
    if isinstance(inner, DecentralizedOptimizer | LocalSteps):
        raise ValueError(
            f"inner is {name}, which averages with other nodes already; give it to nobody, or take "
            "torch.optim.SGD or AdamW inside"
        )
    if any(is_sharded(p) for group in inner.param_groups for p in group["params"]):
        raise ValueError(
            "LocalSteps is for models that are not sharded; give DTensors to an optimizer that "
            'averages in every step, such as decentlam.AdamW(..., mesh=mesh["replicate"])'
        )
    for k, group in enumerate(inner.param_groups):
        check_number(f"lr of group {k} of {name}", group.get("lr"))


def _checked_names(names: Any, outer: Algorithm | None) -> Sequence[str] | None:
    """Return the names of state to average, None for those of Adam's kin, () for none."""
    if names is None:
        return None if outer is None else ()
    if names and outer is not None and reaches(outer) != {Reach.NEIGHBORS}:
        raise ValueError(
            f"average_state is for averages with neighbors; {outer!r} averages over everyone. "
            "Leave it out"
        )
    return tuple(names)
