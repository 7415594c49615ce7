"""What scripts do to gradients between backward and step(): change, clip, scale, spoil them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from runs import flat
from runs_steps import LR, Group, build, message_of, quadratic_loss, spoiled, start, train
from torch import Tensor, nn

# Something changes between backward and step() --------------------------------------------------


def stale(process_group: Group, what: str, method: str = "decentlam") -> str:
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    optimizer.zero_grad()
    quadratic_loss(model, node, 2).backward()
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif what == "lr":
        optimizer.param_groups[0]["lr"] = 0.01
    elif what == "momentum":
        optimizer.param_groups[0]["momentum"] = 0.5
    elif what == "weight decay":
        optimizer.param_groups[0]["weight_decay"] = 0.5
    elif what == "zero_grad":
        optimizer.zero_grad()
    elif what == "new gradient":
        model.weights[1].grad = torch.zeros_like(model.weights[1])
    elif what == "parameter":
        with torch.no_grad():
            model.weights[1].add_(1)
    elif what == "second backward":
        return message_of(quadratic_loss(model, node, 2).backward)
    return message_of(optimizer.step)


def awc_may_change_gradient_and_lr(process_group: Group) -> list[Tensor]:
    """Its message is x: clipping and lr changes between backward and step() are not too late,
    unless its update is to be made in backward."""
    node, model, optimizer = start(process_group, "awc-dmsgd", overlap="auto")
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.param_groups[0]["lr"] = LR / (1 + step)
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def awc_stale(process_group: Group, what: str, steps: int) -> str:
    """With overlap="backward" its update is made in backward: later changes are too late."""
    node, model, optimizer = start(process_group, "awc-dmsgd", shared_memory=False)
    train(optimizer, model, node, range(steps))
    optimizer.zero_grad()
    quadratic_loss(model, node, steps).backward()
    if what == "gradient":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        optimizer.param_groups[0]["lr"] = LR / 2
    return message_of(optimizer.step)


def awc_between_backward_and_step(process_group: Group) -> bool:
    """What backward has made of the next step is not to be seen before step()."""
    node, model, optimizer = start(process_group, "awc-dmsgd", shared_memory=False)
    train(optimizer, model, node, range(4))
    unchanged = []
    quadratic_loss(model, node, 3).backward()
    refused = [message_of(optimizer.state_dict), message_of(lambda: copy.deepcopy(optimizer))]
    assert all("between backward and step()" in error for error in refused), refused
    optimizer.step()
    for step in range(4, 8):
        before = flat(model)
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        for round in optimizer.runtime.rounds:  # until the worker has made them
            assert round._advance is not None and round._advance.made is not None
            round._advance.made()
        unchanged.append(torch.equal(before, flat(model)))
        optimizer.step()
        unchanged.append(not torch.equal(before, flat(model)))
    return all(unchanged)


def awc_parameter_changed_after_step(process_group: Group) -> str:
    node, model, optimizer = start(process_group, "awc-dmsgd")
    train(optimizer, model, node, range(2))
    with torch.no_grad():
        model.weights[0].add_(1.0)
    return message_of(lambda: train(optimizer, model, node, range(2, 3)))


# Clipping, scaling, non-finite gradients --------------------------------------------------------


def clip(process_group: Group, how: str) -> list[Tensor]:
    built_in = {"max_grad_norm": 2.0} if how == "built in" else {}
    node, model, optimizer = start(process_group, "decentlam", overlap=False, **built_in)
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        if how == "by hand":
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def scaler(
    process_group: Group, method: str, unscale: bool = False, overlap: bool = False
) -> tuple[list[Tensor], list[bool], float]:
    """Node 1's gradient overflows at step 2: trajectory, skipped or not by step, last scale."""
    node, model, optimizer = start(process_group, method, overlap=overlap)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trajectory, skipped = [], []
    for step in range(6):
        optimizer.zero_grad()
        grad_scaler.scale(quadratic_loss(model, node, step)).backward()
        if node == 1 and step == 2:
            model.weights[0].grad[0, 0] = torch.inf
        if unscale:
            grad_scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        trajectory.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return trajectory, skipped, grad_scaler.get_scale()


def scaler_with_overlap(process_group: Group) -> str:
    return message_of(lambda: scaler(process_group, "decentlam", overlap=True))


def scaler_in_some(process_group: Group) -> str:
    """Nodes of two processes, of which only the first has a GradScaler."""
    node, model, optimizer = start(process_group, "decentlam", overlap=False, processes_per_node=2)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=node % 2 == 0)
    grad_scaler.scale(quadratic_loss(model, node, 0)).backward()
    return message_of(lambda: grad_scaler.step(optimizer))


def autocast(process_group: Group, overlap: bool) -> tuple[Tensor, list[float], list[str]]:
    """bfloat16 compute on float32 parameters: last parameters, losses, dtypes of the parameters."""
    node = dist.get_rank(process_group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = build("decentlam", model, process_group, overlap=overlap)
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(32, 8, generator=generator)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return flat(model), losses, [str(p.dtype) for p in model.parameters()]


def mixed_dtypes(process_group: Group) -> tuple[list[str], float, float]:
    """float32, float64 and bfloat16 parameters in one group: dtypes, loss before and after."""
    node = dist.get_rank(process_group)
    torch.manual_seed(node)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 3).to(dtype)) for dtype in dtypes])
    optimizer = build("decentlam", model, process_group, overlap=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum((p.double() - 1).square().sum() for p in model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [str(p.dtype) for p in model], losses[0], losses[-1]


def nonfinite_raises(
    process_group: Group, method: str, overlap: bool, value: float
) -> tuple[str, bool]:
    """Node 2's gradient turns bad at step 3: the error of this node, whether its x is finite."""

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        bad = value if node == 2 and step == 3 else 0.0
        return quadratic_loss(model, node, step) + bad * model.weights[1][2]

    def attempt(process_group: Group, seconds: float) -> tuple[str, bool]:
        options = {"overlap": overlap, "timeout_seconds": seconds}
        node, model, optimizer = start(process_group, method, **options)
        error = message_of(lambda: train(optimizer, model, node, range(6), loss))
        return error, bool(flat(model).isfinite().all())

    return spoiled(process_group, attempt, step=3)


def nonfinite_skips(process_group: Group, method: str) -> tuple[list[Tensor], list[bool]]:
    node, model, optimizer = start(process_group, method, overlap=False, nonfinite="skip")
    trajectory, skipped = [], []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        if node == 1 and step in (2, 4):
            model.weights[3].grad[1, 1] = torch.nan if step == 2 else torch.inf
        optimizer.step()
        trajectory.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return trajectory, skipped


def parameters_overflow(process_group: Group, method: str) -> str:
    """Finite gradients at first, but a learning rate that no float can hold for long."""

    def attempt(process_group: Group, seconds: float) -> tuple[str, bool]:
        node, model, optimizer = start(process_group, method, lr=1e18, timeout_seconds=seconds)
        return message_of(lambda: train(optimizer, model, node, range(30))), True

    return spoiled(process_group, attempt, step=0)[0]
