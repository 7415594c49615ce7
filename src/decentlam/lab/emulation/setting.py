"""What is timed: a model, its compute, how often, and which contenders."""

from __future__ import annotations

from dataclasses import dataclass

from decentlam.lab.emulation.contenders import choose
from decentlam.lab.emulation.models import LAYERS, MODELS


@dataclass(frozen=True)
class Setting:
    """What is trained and how often; every node runs the same."""

    model: str = "transformer-9.5M"
    parameters: int | None = None  # of a sleeping model, instead of the named one's
    compute: str = "real"  # or "sleep:300", in milliseconds per iteration
    forward_share: float = 1 / 3  # of a sleep; the rest is in backward
    buckets: int | None = None  # about so many messages per peer; as many layers sleep at least
    rounds: int = 3
    iterations: int = 8
    straggler_ms: float = 0.0  # one node per step, drawn at random, is late by so much
    only: tuple[str, ...] = ()  # contenders; none are all
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; choose from {', '.join(MODELS)}")
        asleep = self.asleep  # or an error if compute cannot be read
        if self.parameters is not None and not asleep:
            raise ValueError("a number of parameters needs sleeping compute, such as sleep:300")
        if min(self.rounds, self.iterations) < 1:
            raise ValueError("rounds and iterations must be 1 or more")
        if self.buckets is not None and self.buckets < 1:
            raise ValueError(f"there is 1 bucket or more, got {self.buckets}")
        if self.straggler_ms < 0:
            raise ValueError(f"a straggler is late by 0 ms or more, got {self.straggler_ms:g}")
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"forward's share is between 0 and 1, got {self.forward_share:g}")
        if self.forward_share != Setting.forward_share and not asleep:
            raise ValueError("only sleeping compute, such as sleep:300, has a forward share to set")
        choose(self.only)

    @property
    def asleep(self) -> bool:
        return self.sleep_seconds is not None

    @property
    def sleep_seconds(self) -> float | None:
        if self.compute == "real":
            return None
        kind, _, milliseconds = self.compute.partition(":")
        try:
            seconds = float(milliseconds) / 1e3
        except ValueError:
            seconds = -1.0
        if kind != "sleep" or not 0 <= seconds < 3600:
            raise ValueError(f"compute is real or sleep:MILLISECONDS, got {self.compute!r}")
        return seconds

    @property
    def layers(self) -> int:
        """Of a sleeping model."""
        return max(LAYERS, self.buckets or 0)

    @property
    def bucket_bytes(self) -> int | None:
        """The size of a message; None: as large as each contender makes it."""
        return None if self.buckets is None else 4 * -(-self.size // self.buckets)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.parameters or MODELS[self.model].parameters
