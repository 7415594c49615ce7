"""What processes do whose messages are large enough to be sent in pieces."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runs import flat
from runs_shared_memory import delayed_loss
from runs_steps import Group, build
from torch import Tensor, nn

SIZES = (200_001, 7, 80_000, 33_000, 1)  # elements of 8 bytes; pieces have 524,288 bytes and more
BUCKET_BYTES = 2_000_000
STEPS = 5


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
    """With nodes that are late at random; the last of it is looked at after forward."""
    node, model, optimizer = wide(process_group, **options)
    late = delayed_loss(random.Random(node))
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = late(model, node, step)
        seen.append(flat(model))
        loss.backward()
        optimizer.step()
    return [*seen, flat(model)]


def waiting_bytes(process_group: Group, **options: Any) -> dict[str, list[int]]:
    """How much connections may take ahead of the wire: inside the group and to somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        foreign = [socket.create_connection(server.getsockname()), server.accept()[0]]
        _, _, optimizer = wide(process_group, "decentlam", "ring", **options)
        found = {"ours": [_ahead(s) for s in foreign], "all": [_ahead(s) for s in _sockets()]}
        del optimizer
        gc.collect()
        found["after"] = [_ahead(s) for s in _sockets()]
        for s in foreign:
            s.close()
    return found


def _sockets() -> Iterator[socket.socket]:
    for path in Path("/proc/self/fd").iterdir():
        if path.is_socket():
            with socket.socket(fileno=os.dup(int(path.name))) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6):
                    yield s


def _ahead(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
