"""A run in which a gradient is bad, by gloo's branch and by NCCL's."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.processes import Group
from tests.helpers.quadratic import flat, quadratic_loss, start


def bad_gradient(
    process_group: Group | None, per_node: int, how: str
) -> tuple[list[Tensor], list[bool]]:
    """The gradient of process 3 alone is bad at step 2: trajectory, skipped or not by step."""
    skip = {"nonfinite": "skip"} if how == "nan" else {}
    options = {"overlap": False, "processes_per_node": per_node, **skip}
    rank, model, optimizer = start(process_group, "decentlam", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaler")
    rows, skipped = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(quadratic_loss(model, rank, step)).backward()
        if rank == 3 and step == 2:
            model.weights[2].grad[0, 0, 0] = torch.inf if how == "scaler" else torch.nan
        scaler.step(optimizer)
        scaler.update()
        rows.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return rows, skipped
