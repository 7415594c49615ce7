"""What the cost of an iteration depends on, and the cost itself, as frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from decentlam.options import usual_bucket_bytes

OVERLAPS = ("none", "backward", "forward", "iteration")
ALL_REDUCES = ("ring", "halving")


def check_seconds(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {value!r}")


@dataclass(frozen=True)
class Link:
    """A node's connection, full duplex: so fast in and out at once."""

    latency_seconds: float = 0.0  # one way
    bytes_per_second: float = math.inf
    certain: bool = True  # False: measured with messages whose time was mostly latency

    def __post_init__(self) -> None:
        check_seconds(latency_seconds=self.latency_seconds)
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be above 0, got {self.bytes_per_second!r}")


@dataclass(frozen=True)
class Delays:
    """How slow nodes are, beyond the common time of an iteration.

    "one": at every step one random node is delayed by `seconds`; "exponential": every node is, by
    an independent exponential time of that mean.
    """

    seconds: float = 0.0
    kind: str = "one"

    def __post_init__(self) -> None:
        check_seconds(delay_seconds=self.seconds)
        if self.kind not in ("one", "exponential"):
            raise ValueError(f"unknown delays {self.kind!r}; choose from one, exponential")

    def draw(self, generator: np.random.Generator, num_nodes: int) -> np.ndarray:
        """The delays of one step, (n,)."""
        if self.kind == "exponential":
            return generator.exponential(self.seconds, num_nodes)
        delays = np.zeros(num_nodes)
        delays[generator.integers(num_nodes)] = self.seconds
        return delays

    def mean_of_slowest(self, num_nodes: int) -> float:
        """E[max over the nodes]: mean * (1 + 1/2 + ... + 1/n) if exponential."""
        if self.kind == "one":
            return self.seconds
        return self.seconds * float((1.0 / np.arange(1, num_nodes + 1)).sum())


@dataclass(frozen=True)
class Compute:
    """What a node does besides communicating, in seconds per iteration."""

    forward_seconds: float
    backward_seconds: float
    update_seconds_per_byte: float = 0.0
    shares_cpu: bool = False  # the cores that compute also copy messages, so that hides nothing
    delays: Delays = Delays()

    def __post_init__(self) -> None:
        check_seconds(
            forward_seconds=self.forward_seconds,
            backward_seconds=self.backward_seconds,
            update_seconds_per_byte=self.update_seconds_per_byte,
        )

    @classmethod
    def split(cls, seconds: float, forward_fraction: float = 1 / 3, **rest: object) -> Compute:
        """Forward and backward of a known sum; backward is usually twice the work."""
        if not 0 <= forward_fraction <= 1:
            raise ValueError(f"forward_fraction must be in [0, 1], got {forward_fraction!r}")
        forward = seconds * forward_fraction
        return cls(forward, seconds - forward, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Job:
    """What is sent: a model of so many bytes, in equal buckets of at most `bucket_bytes`.

    The first may be smaller: DDP's has 1 MiB, so that its wire is busy early. Where the size of
    each is known, `bucket_sizes` has them.
    """

    model_bytes: int
    bucket_bytes: int = 0  # 0: as the optimizer chooses
    first_bucket_bytes: int | None = None
    bucket_sizes: tuple[int, ...] | None = None
    processes_per_node: int = 1  # they share the node's link; an all-reduce visits them all
    all_reduce: str = "ring"  # 2 (N - 1) rounds; "halving" (and doubling): 2 log2 N, as many bytes

    def __post_init__(self) -> None:
        if self.bucket_bytes == 0:
            object.__setattr__(self, "bucket_bytes", usual_bucket_bytes(self.model_bytes))
        for name in ("model_bytes", "bucket_bytes", "processes_per_node"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        if self.all_reduce not in ALL_REDUCES:
            raise ValueError(
                f"unknown all_reduce {self.all_reduce!r}; choose from {', '.join(ALL_REDUCES)}"
            )

    def as_ddp(self) -> Job:
        """The same in the buckets that torch's DistributedDataParallel makes by default."""
        return replace(self, bucket_bytes=25 * 2**20, first_bucket_bytes=2**20)

    @property
    def bucket_shares(self) -> list[float]:
        """The share of the model that each bucket holds, in the order of backward."""
        if self.bucket_sizes is not None:
            return [size / sum(self.bucket_sizes) for size in self.bucket_sizes]
        first = min(self.first_bucket_bytes or 0, self.model_bytes)
        rest = self.model_bytes - first
        count = -(-rest // self.bucket_bytes)
        shares = [first / self.model_bytes] if first else []
        return shares + [rest / max(count, 1) / self.model_bytes] * count


@dataclass(frozen=True)
class Iteration:
    """The expected seconds of one iteration, by what they are spent on."""

    compute: float
    exposed: float  # communication that nothing hides
    update: float
    straggler: float  # waiting for slow nodes, and being slow
    bytes_sent: float  # per node, over its link

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.update + self.straggler
