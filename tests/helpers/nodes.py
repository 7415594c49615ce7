"""Runs in which a gradient is bad or a node leaves, by gloo's branch and by NCCL's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import decentlam
from tests.helpers.processes import Group
from tests.helpers.quadratic import flat, quadratic_loss, simulate, start


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


def simulate_without_last(method: str, n: int, leaves_at: int, steps: int) -> list[Tensor]:
    """Return steps from `leaves_at` on of the first n - 1 nodes, when the last one leaves then."""
    state: dict[str, Any] = {}

    def keep(nodes: decentlam.Nodes, step: int) -> None:
        if step == leaves_at:
            state.update(nodes.state_dict())

    simulate(method, n, leaves_at + 1, before_step=keep)

    def go_on(nodes: decentlam.Nodes, step: int) -> None:
        if step == leaves_at:
            whole = {name: value[: n - 1] for name, value in state["state"].items()}
            nodes.load_state_dict({**state, "x": state["x"][: n - 1], "state": whole})

    return simulate(method, n - 1, steps, before_step=go_on)[leaves_at:]
