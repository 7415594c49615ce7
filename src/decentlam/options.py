"""What the user may choose about how a method runs; checked once, at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decentlam.exchange.differences import DTYPES
from decentlam.pace import CHOICES, Mode
from decentlam.topology import Topology


def usual_bucket_bytes(model_bytes: int, one_machine: bool = False) -> int:
    """A sixteenth of the model: the wire is busy early and late messages are short. From 512 KiB,
    where calls begin to cost, to 4 MiB, which fills the wire for long enough. On one machine there
    is no wire, and fewer calls are better."""
    if one_machine:
        return max(model_bytes // 4, 1 << 22)
    return min(max(model_bytes // 16, 1 << 19), 1 << 22)


@dataclass(frozen=True)
class Options:
    """The same on every process. See `DecentralizedOptimizer`."""

    topology: str | Topology = "symmetric-exponential"
    overlap: Mode = "auto"
    bucket_bytes: int | None = None
    max_grad_norm: float | None = None
    nonfinite: str = "raise"
    processes_per_node: int = 1
    timeout_seconds: float = 600.0
    stable: str = "refuse"
    shared_memory: bool = True
    message_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        size = self.bucket_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"bucket_bytes must be a whole number above 0 or None, got {size!r}")
        if self.nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(
                f"unknown nonfinite {self.nonfinite!r}; choose from raise, skip, ignore"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0 or None, got {self.max_grad_norm!r}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, got {self.timeout_seconds!r}")
        if not isinstance(self.overlap, bool) and self.overlap not in CHOICES[2:]:
            raise ValueError(
                f"unknown overlap {self.overlap!r}; choose from {', '.join(map(repr, CHOICES))}"
            )
        if not isinstance(self.shared_memory, bool):
            raise TypeError(f"shared_memory must be True or False, got {self.shared_memory!r}")
        if self.message_dtype not in (None, *DTYPES):
            allowed = ", ".join(map(str, DTYPES))
            raise ValueError(f"message_dtype must be None or {allowed}, got {self.message_dtype!r}")
        if self.message_dtype is not None and self.topology == "auto":
            raise ValueError("message_dtype needs a topology with a name; topology='auto' has none")
        if self.message_dtype is not None and self.nonfinite == "ignore":
            raise ValueError(
                "message_dtype needs nonfinite='raise' or 'skip': neighbors remember what they "
                "were told, and a NaN would stay for ever"
            )
        if self.overlap and self.overlap != "auto":
            self._check_overlap()

    @property
    def whole_gradient(self) -> bool:
        """Whether the gradient of all layers is needed before anything is sent."""
        return self.max_grad_norm is not None or self.nonfinite == "skip"

    def _check_overlap(self) -> None:
        whole = "needs the whole gradient before anything is sent; pass overlap=False with it"
        if self.max_grad_norm is not None:
            raise ValueError(f"max_grad_norm {whole}")
        if self.nonfinite == "skip":
            raise ValueError(f"nonfinite='skip' {whole}")
