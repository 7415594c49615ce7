"""What the user may choose about how a method runs; checked once, at construction."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from decentlam.algorithms import check_count, check_number
from decentlam.exchange.rounded import ROUNDED
from decentlam.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LONGEST_SECONDS = 1e8  # three years; clocks overflow somewhere beyond

T = TypeVar("T")
Overlap = Literal["none", "backward", "auto"]
_ELASTIC_HEARTBEATS = 1.5
NonFinite = Literal["raise", "skip", "ignore"]
Stable = Literal["auto", "refuse", "ignore"]


def overlap_named(overlap: str | bool) -> Overlap:
    """The name of an overlap; True is "backward" and False is "none"."""
    if isinstance(overlap, bool):
        return "backward" if overlap else "none"
    if overlap not in get_args(Overlap):
        choices = ", ".join(map(repr, get_args(Overlap)))
        raise ValueError(f"unknown overlap {overlap!r}; choose from {choices}, True or False")
    return cast(Overlap, overlap)


class AveragingOptions(TypedDict, total=False):
    """The keywords that `LocalSteps` takes, too."""

    topology: str | Topology
    message_dtype: torch.dtype | None
    process_group: dist.ProcessGroup | None
    timeout_seconds: float
    heartbeat_seconds: float
    elastic: bool
    model: nn.Module | None
    stable: Stable
    shared_memory: bool


class CommonOptions(AveragingOptions, total=False):
    """`OptimizerOptions` without weight_decay, which AdamW has as an argument of its own."""

    overlap: Overlap | bool
    bucket_bytes: int | None
    max_grad_norm: float | None
    nonfinite: NonFinite
    processes_per_node: int
    mesh: DeviceMesh | None


class OptimizerOptions(CommonOptions, total=False):
    """The keywords that every optimizer takes besides those of its method.

    Attributes:
        weight_decay: Added to the gradient, times x, as in torch.optim.SGD. Default 0.
        topology: Which nodes average at each step: a name or a `decentlam.Topology`. Default
            "bipartite-random-match": one random peer per step. D2DmSGD and GTDmSGD need fixed
            weights; their default is "symmetric-exponential".
        overlap: When messages leave: during "backward", after it ("none"), or "auto" (default),
            which tries both and keeps the faster. True is "backward", False is "none".
        bucket_bytes: The size of messages. Default: a sixteenth of the model, within limits.
        max_grad_norm: Clip the norm of the node's whole gradient to this.
        nonfinite: What to do if a gradient is NaN or infinite: "raise" an error (default), "skip"
            the gradient, or "ignore" it.
        processes_per_node: How many consecutive processes are one node. Default 1.
        process_group: The processes that take part. Default: all.
        mesh: The same as a DeviceMesh of one dimension. For a model sharded by `fully_shard`, the
            mesh dimension over the nodes; see docs/sharded.md.
        timeout_seconds: How long to wait for a neighbor before an `ExchangeError`. Default 600.
        heartbeat_seconds: A process without a heartbeat for this long counts as lost, and all
            others raise an error that names it. Default 10.
        elastic: Continue when processes die, and let new ones join; see docs/survive.md. Default
            False.
        model: With elastic=True, the module whose buffers (batch norm statistics) newcomers get.
        stable: What to do if `decentlam.growth` says that the method would diverge on the topology:
            "refuse" (default of most), "auto" (run a stable form; default of DecentLaM and AdamW),
            or "ignore".
        shared_memory: Exchange messages between processes of one machine in shared memory.
            Default True.
        message_dtype: torch.float16 or torch.bfloat16 halves the bytes sent. Default: the
            parameters' dtype.
    """

    weight_decay: float


def show_options(**other_defaults: Any) -> Callable[[type[T]], type[T]]:
    """Return a decorator that gives an optimizer defaults of its own, and shows the keywords of
    `OptimizerOptions` in its signature, for help()."""

    def decorate(optimizer: type[T]) -> type[T]:
        optimizer._own_defaults = other_defaults  # type: ignore[attr-defined]
        shown = inspect.signature(optimizer)
        own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
        defaults = {field.name: field.default for field in dataclasses.fields(Options)}
        defaults |= dict.fromkeys(("process_group", "mesh", "model"))
        defaults |= {"weight_decay": 0.0, **other_defaults}
        rest = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in OptimizerOptions.__annotations__.items()
            if name not in shown.parameters
        ]
        signature = shown.replace(parameters=[*own, *rest])
        optimizer.__signature__ = signature  # type: ignore[attr-defined]
        return optimizer

    return decorate


@dataclass(frozen=True)
class Options:
    """The same on every process. `OptimizerOptions` says what each one means."""

    topology: str | Topology = "bipartite-random-match"
    overlap: Overlap | bool = "auto"
    bucket_bytes: int | None = None
    max_grad_norm: float | None = None
    nonfinite: NonFinite = "raise"
    processes_per_node: int = 1
    timeout_seconds: float = 600.0
    heartbeat_seconds: float = 10.0
    elastic: bool = False
    stable: Stable = "refuse"
    shared_memory: bool = True
    message_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            check_count("bucket_bytes", self.bucket_bytes)
        check_count("processes_per_node", self.processes_per_node)
        if self.nonfinite not in get_args(NonFinite):
            raise ValueError(
                f"unknown nonfinite {self.nonfinite!r}; choose from "
                f"{', '.join(get_args(NonFinite))}"
            )
        norm = self.max_grad_norm
        if norm is not None and not (isinstance(norm, float) and norm == math.inf):
            check_number("max_grad_norm (None: no clipping)", norm, above=True)
        check_number("timeout_seconds", self.timeout_seconds, above=True, most=_LONGEST_SECONDS)
        beat = check_number("heartbeat_seconds", self.heartbeat_seconds, most=3600.0)
        if beat < 0.1:
            raise ValueError(f"heartbeat_seconds must be from 0.1 to 3600, got {beat!r}")
        object.__setattr__(self, "overlap", overlap_named(self.overlap))
        for name in ("shared_memory", "elastic"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if self.message_dtype not in (None, *ROUNDED):
            raise ValueError(
                f"message_dtype must be None or one of {', '.join(map(str, ROUNDED))}, got "
                f"{self.message_dtype!r}"
            )
        if self.overlap == "backward" and self.whole_gradient:
            option = "nonfinite='skip'" if self.max_grad_norm is None else "max_grad_norm"
            raise ValueError(
                f"{option} needs the whole gradient before anything is sent; pass overlap='none' "
                "with it"
            )
        if self.elastic and self.processes_per_node != 1:
            raise ValueError("elastic=True works with processes_per_node=1")
        if self.elastic and not isinstance(self.topology, str):
            raise ValueError(
                "elastic=True needs a topology by name, such as 'ring': it is built anew for those "
                f"who are left; got {self.topology!r}"
            )

    @property
    def wait_seconds(self) -> float:
        """The seconds a message is waited for. An elastic run then forms its group anew, and waits
        there for whoever is alive: gloo may miss that a connection was closed."""
        if self.elastic:
            return min(self.timeout_seconds, _ELASTIC_HEARTBEATS * self.heartbeat_seconds)
        return self.timeout_seconds

    @property
    def whole_gradient(self) -> bool:
        """True if the gradient of all layers is needed before anything is sent."""
        return self.max_grad_norm is not None or self.nonfinite == "skip"
