"""What processes do whose messages are large enough to be sent in pieces."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch
from runs import HANG_SECONDS
from runs_forward import take_steps
from runs_shared_memory import late_steps
from runs_steps import Group, build
from torch import Tensor, nn

SIZES = (200_001, 7, 80_000, 33_000, 1)  # elements of 8 bytes; pieces have 65,536 elements
BUCKET_BYTES = 2_000_000
STEPS = 5
THREADS = {"decentlam worker", "decentlam sender"}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.layers = nn.ParameterList(
            torch.randn(size, generator=draw, dtype=torch.float64) for size in SIZES
        )

    def forward(self, targets: list[Tensor], scale: Tensor) -> Tensor:
        return sum((p - targets[0].mean()).square().sum() for p in self.layers) / 2


def wide(
    process_group: Group, method: str, topology: str, **options: Any
) -> tuple[int, nn.Module, Any]:
    model = Wide()
    optimizer = build(
        method, model, process_group, topology=topology, bucket_bytes=BUCKET_BYTES, **options
    )
    return process_group.rank(), model, optimizer


def trajectory(process_group: Group, **options: Any) -> list[Tensor]:
    node, model, optimizer = wide(process_group, **options)
    return late_steps(optimizer, model, node, STEPS)


def dropped(process_group: Group) -> tuple[bool, int]:
    """Whether an exchange outlives its optimizer, and how many threads of its are at work."""
    node, model, optimizer = wide(
        process_group, "decentlam", "ring", overlap="forward", shared_memory=False
    )
    take_steps(optimizer, model, node)
    optimizer.finish()
    assert {t.name for t in threading.enumerate()} >= THREADS
    exchange = weakref.ref(optimizer.runtime.exchange)
    del optimizer, model
    gc.collect()
    for thread in threading.enumerate():
        if thread.name in THREADS:
            thread.join(HANG_SECONDS)
    return exchange() is not None, sum(t.name in THREADS for t in threading.enumerate())
