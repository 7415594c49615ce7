"""Where a run computes, and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Numerics:
    """float32, float64, or float32 with the forward pass in bfloat16 where that is safe."""

    precision: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, self.dtype)

    def inputs(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.device, self.dtype, non_blocking=True)

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)


def device_here(backend: str | None) -> torch.device:
    """The GPU of this process, unless there is none or its messages travel by gloo."""
    usable = torch.cuda.is_available() and (backend is None or "nccl" in backend)
    return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")
