"""Scenarios for nodes of several processes; each process has its own data, `rank` says which."""

from __future__ import annotations

from typing import Any

import runs_models
import runs_steps
import torch
import torch.distributed as dist
from runs import STEPS, Quadratic, flat, lr_at
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join


def node_loss(per_node: int, loss: runs_steps.Loss = runs_steps.quadratic_loss) -> runs_steps.Loss:
    """The loss whose gradient is the mean over the processes of a node."""

    def mean(model: nn.Module, node: int, step: int) -> Tensor:
        ranks = range(node * per_node, (node + 1) * per_node)
        return sum(loss(model, rank, step) for rank in ranks) / per_node

    return mean


def trajectory(process_group: dist.ProcessGroup, method: str, **options: Any) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = runs_steps.build(method, model, process_group, **options)
    rows = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = lr_at(step)
        rows += runs_steps.train(optimizer, model, rank, range(step, step + 1))
    return rows


def branches(
    process_group: dist.ProcessGroup, method: str, overlap: bool, per_node: int
) -> list[Tensor]:
    """Processes of one node take different branches, and talk between backward and step()."""
    rank = dist.get_rank(process_group)
    model = runs_models.Branches(seed=rank)
    optimizer = runs_steps.build(
        method, model, process_group, overlap=overlap, processes_per_node=per_node
    )
    rows = []
    for step in range(8):
        optimizer.zero_grad()
        runs_models.branches_loss(model, rank, step).backward()
        dist.all_reduce(torch.ones(1), group=process_group)
        optimizer.step()
        rows.append(runs_models.trained(model))
    return rows


def accumulate(process_group: dist.ProcessGroup, overlap: bool, per_node: int) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = runs_steps.build(
        "decentlam", model, process_group, overlap=overlap, processes_per_node=per_node
    )
    rows = []
    for step in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            runs_steps.quadratic_loss(model, rank, step).backward()
        runs_steps.quadratic_loss(model, rank, step + 1).backward()
        optimizer.step()
        rows.append(flat(model))
    return rows


def two_batches(model: nn.Module, rank: int, step: int) -> Tensor:
    return runs_steps.quadratic_loss(model, rank, step) + runs_steps.quadratic_loss(
        model, rank, step + 1
    )


def bad_gradient(
    process_group: dist.ProcessGroup, per_node: int, how: str
) -> tuple[list[Tensor], list[bool]]:
    """The gradient of process 3 alone is bad at step 2: trajectory, skipped or not by step."""
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    skip = {"nonfinite": "skip"} if how == "nan" else {}
    optimizer = runs_steps.build(
        "decentlam", model, process_group, overlap=False, processes_per_node=per_node, **skip
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=how == "scaler")
    rows, skipped = [], []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(runs_steps.quadratic_loss(model, rank, step)).backward()
        if rank == 3 and step == 2:
            model.weights[2].grad[0, 0, 0] = torch.inf if how == "scaler" else torch.nan
        scaler.step(optimizer)
        scaler.update()
        rows.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return rows, skipped


def bad_gradient_raises(
    process_group: dist.ProcessGroup, method: str, overlap: bool, per_node: int
) -> str:
    """The gradient of process 3 alone turns bad at step 2."""
    rank = dist.get_rank(process_group)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        bad = torch.nan if rank == 3 and step == 2 else 0.0
        return runs_steps.quadratic_loss(model, rank, step) + bad * model.weights[1].sum()

    def attempt(process_group: runs_steps.Group, seconds: float) -> tuple[str, bool]:
        options = {"processes_per_node": per_node, "timeout_seconds": seconds}
        model = Quadratic(seed=rank)
        optimizer = runs_steps.build(method, model, process_group, overlap=overlap, **options)
        steps = lambda: runs_steps.train(optimizer, model, rank, range(5), loss)  # noqa: E731
        return runs_steps.message_of(steps), True

    return runs_steps.spoiled(process_group, attempt, step=2)[0]


def stale(process_group: dist.ProcessGroup, method: str, per_node: int) -> str:
    """The sum over the node has begun in backward: clipping afterwards is too late."""
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = runs_steps.build(
        method, model, process_group, processes_per_node=per_node, overlap=True
    )
    runs_steps.train(optimizer, model, rank, range(2))
    optimizer.zero_grad()
    runs_steps.quadratic_loss(model, rank, 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return runs_steps.message_of(optimizer.step)


def resume(
    process_group: dist.ProcessGroup, method: str, per_node: int
) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank(process_group)

    def begin() -> tuple[Quadratic, Any]:
        model = Quadratic(seed=rank)
        return model, runs_steps.build(method, model, process_group, processes_per_node=per_node)

    model, optimizer = begin()
    whole = runs_steps.train(optimizer, model, rank, range(3))
    saved = [
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v, optimizer.state_dict()
        ),
    ]
    whole += runs_steps.train(optimizer, model, rank, range(3, 6))
    model, optimizer = begin()
    runs_steps.train(optimizer, model, rank, range(2))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return whole[3:], runs_steps.train(optimizer, model, rank, range(3, 6))


def evaluate(process_group: dist.ProcessGroup, per_node: int) -> dict[str, Any]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = runs_steps.build(
        "decentlam", model, process_group, processes_per_node=per_node, topology="ring"
    )
    runs_steps.train(optimizer, model, rank, range(3))
    own = flat(model)
    with optimizer.averaged(model):
        inside = flat(model)
    result = {
        "own": own,
        "inside": inside,
        "after": flat(model),
        "distance": optimizer.consensus_distance(),
        "sent": optimizer.statistics.bytes_sent,
        "join": runs_steps.message_of(lambda: Join([optimizer])),
    }
    optimizer.merge(model)
    return {**result, "merged": flat(model)}


def late_group(process_group: dist.ProcessGroup, method: str, per_node: int) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    weights = list(model.weights)
    optimizer = runs_steps.build(
        method, nn.ParameterList(weights[:3]), process_group, processes_per_node=per_node
    )
    rows = runs_steps.train(optimizer, model, rank, range(3))
    model.zero_grad()
    late = [(f"late.{i}", w) for i, w in enumerate(weights[3:])]
    optimizer.add_param_group({"params": late})
    return rows + runs_steps.train(optimizer, model, rank, range(3, 6))


def simulate_late_group(method: str, nodes: int, per_node: int) -> list[Tensor]:
    """Late parameters have no gradient, hence no momentum, before they join."""
    early = sum(torch.Size(shape).numel() for shape in Quadratic.SHAPES[:3])
    start = flat(Quadratic(seed=0))[early:]

    def wait(simulated: Any, step: int) -> None:
        if step == 3:
            simulated.x[:, early:] = start
            for state in simulated._states:
                for value in state.values():
                    value[:, early:] = 0

    return runs_steps.simulate(method, nodes, 6, loss=node_loss(per_node), before_step=wait)


def replicas_equal(rows: list[list[Tensor]], per_node: int) -> bool:
    """Whether the processes of each node hold the same model to the bit, at every step."""
    first = [rows[i - i % per_node] for i in range(len(rows))]
    return all(
        torch.equal(a, b)
        for own, leader in zip(rows, first, strict=True)
        for a, b in zip(own, leader, strict=True)
    )
