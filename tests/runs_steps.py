"""What scenarios of real steps share: the optimizer, the loss, the simulator's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runs import CLASSES, HANG, HANG_SECONDS, SCALE, Quadratic, flat, targets_of
from torch import Tensor, nn

import decentlam

LR, DECAY, MOMENTUM = 0.05, 0.01, 0.6
Group = dist.ProcessGroup
Loss = Callable[[nn.Module, int, int], Tensor]  # (model, node, step)
Absent = Callable[[int, int], bool]  # (node, step): whether the node has no gradient then


def build(
    method: str, model: nn.Module, process_group: Group | None, **options: Any
) -> decentlam.DecentralizedOptimizer:
    hyper = {} if method == "dsgd" else {"momentum": MOMENTUM}
    if method == "slowmo":
        hyper["tau"] = 3
    arguments = {
        "lr": LR,
        "weight_decay": DECAY,
        "topology": "ring",
        "overlap": True,
        "bucket_bytes": 100,
        "shared_memory": False,  # as between hosts
        "stable": "ignore",  # as in the simulator
        "timeout_seconds": HANG_SECONDS,
        "process_group": process_group,
        **hyper,
        **options,
    }
    return CLASSES[method](model.named_parameters(), **arguments)


def quadratic_loss(model: nn.Module, node: int, step: int) -> Tensor:
    return (1 + 0.1 * step) * model(targets_of(node), SCALE)


def train(
    optimizer: Any, model: nn.Module, node: int, steps: range, loss: Loss = quadratic_loss
) -> list[Tensor]:
    trajectory = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def simulate(
    method: str,
    n: int,
    steps: int,
    *,
    model: Callable[[], nn.Module] = Quadratic,
    loss: Loss = quadratic_loss,
    topology: Any = "ring",
    absent: Absent = lambda node, step: False,
    change: Callable[[Tensor], Tensor] = lambda g: g,
    before_step: Callable[[decentlam.Nodes, int], None] = lambda nodes, step: None,
    lr: Callable[[int], float] = lambda step: LR,
    weight_decay: float = DECAY,
    momentum: float = MOMENTUM,
) -> list[Tensor]:
    """What n nodes do, each with its own loss; `change` is applied to one node's gradient.

    A node that is absent at a step has gradient zero and no weight decay then.
    """
    network = model()
    trained = [p for p in network.parameters() if p.requires_grad]
    frozen_free = torch.cat([p.detach().reshape(-1) for p in trained])
    hyper: dict[str, Any] = {"tau": 3} if method == "slowmo" else {}
    nodes = decentlam.Nodes(
        method,
        topology,
        frozen_free.expand(n, -1),
        None if method == "dsgd" else momentum,
        weight_decay=weight_decay,
        **hyper,
    )
    trajectory = []
    for step in range(steps):
        before_step(nodes, step)
        rows = []
        for node, row in enumerate(nodes.x):
            if absent(node, step):
                rows.append(-weight_decay * row)
                continue
            nn.utils.vector_to_parameters(row.clone(), trained)
            network.zero_grad()
            loss(network, node, step).backward()
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
            rows.append(change(torch.cat([g.reshape(-1) for g in grads])))
        nodes.step(torch.stack(rows), lr(step))
        trajectory.append(nodes.x.clone())
    return trajectory


def clipped(max_norm: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * min(1.0, max_norm / (g.norm().item() + 1e-6))


def message_of(action: Callable[[], Any]) -> str:
    """The type and text of the error that the action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def spoiled(
    process_group: Group, attempt: Callable[[Group, float], tuple[str, bool]], step: int
) -> tuple[str, bool]:
    """attempt(group, timeout_seconds): the error of a run that one process spoils at this step,
    and what else it found. On a busy machine a neighbor that is well may be slower than a short
    timeout; then all try again with a longer one."""
    errors: list[Any] = [None] * dist.get_world_size()
    for seconds in (1.0, 10.0, 50.0):
        found = attempt(process_group, seconds)
        dist.all_gather_object(errors, found[0])
        early = any(f"step {k}, " in error for error in errors for k in range(step))
        if not early and any(error.startswith("NonFiniteError") for error in errors):
            break
        process_group = dist.new_group(timeout=HANG)
    return found


def start(
    process_group: Group, method: str, **options: Any
) -> tuple[int, Quadratic, decentlam.DecentralizedOptimizer]:
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    return node, model, build(method, model, process_group, **options)
