"""Scenarios for the hard parts of the runtime; each runs in every process of a group."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runs import CLASSES, SCALE, Quadratic, flat, targets_of
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import decentlam
from decentlam.exchange.dense import DenseExchange
from decentlam.exchange.network import connect

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
        "timeout_seconds": 30.0,
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


def start(
    process_group: Group, method: str, **options: Any
) -> tuple[int, Quadratic, decentlam.DecentralizedOptimizer]:
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    return node, model, build(method, model, process_group, **options)


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
    """Its message is x: clipping and lr changes between backward and step() are not too late."""
    node, model, optimizer = start(process_group, "awc-dmsgd")
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.param_groups[0]["lr"] = LR / (1 + step)
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


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
    node, model, optimizer = start(process_group, method, overlap=overlap, timeout_seconds=2.0)

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        bad = value if node == 2 and step == 3 else 0.0
        return quadratic_loss(model, node, step) + bad * model.weights[1][2]

    error = message_of(lambda: train(optimizer, model, node, range(6), loss))
    return error, bool(flat(model).isfinite().all())


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
    """Finite gradients, but a learning rate that no float can hold."""
    node, model, optimizer = start(process_group, method, lr=1e200, timeout_seconds=2.0)
    return message_of(lambda: train(optimizer, model, node, range(6)))


# Accumulation, uneven batches -------------------------------------------------------------------


def accumulate(process_group: Group, overlap: bool) -> list[Tensor]:
    """Three backwards per step; parameter 0 is only used in the first of them."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            quadratic_loss(model, node, step).backward()
            (0.5 * quadratic_loss(model, node, step + 1)).backward()
        part = sum(0.5 * w.square().sum() for w in list(model.weights)[1:])
        part.backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def accumulated_loss(model: nn.Module, node: int, step: int) -> Tensor:
    whole = quadratic_loss(model, node, step) + 0.5 * quadratic_loss(model, node, step + 1)
    return whole + sum(0.5 * w.square().sum() for w in list(model.weights)[1:])


BATCHES = (3, 6, 2, 5)  # of nodes 0 to 3


def join(process_group: Group, method: str, overlap: bool) -> list[Tensor]:
    """Two epochs of uneven batches, with a step of all in between; (steps, d) of this node."""
    node, model, optimizer = start(process_group, method, overlap=overlap)
    trajectory: list[Tensor] = []
    original = type(optimizer)._step

    def step_and_note(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        trajectory.append(flat(model))

    optimizer._step = step_and_note.__get__(optimizer)  # sees the steps without data too
    with Join([optimizer]):
        train(optimizer, model, node, range(BATCHES[node]))
    model.zero_grad()
    train(optimizer, model, node, range(6, 7))
    with Join([optimizer]):
        train(optimizer, model, node, range(7, 7 + BATCHES[(node + 1) % 4]))
    return trajectory


def join_absent(node: int, step: int) -> bool:
    if step < 6:
        return step >= BATCHES[node]
    return step > 6 and step - 7 >= BATCHES[(node + 1) % 4]


def join_two(process_group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Two optimizers in one context, as a GAN has."""
    node = dist.get_rank(process_group)
    a, b = Quadratic(seed=0), Quadratic(seed=1)
    first = build("decentlam", a, process_group)
    second = build("pmsgd", b, process_group)
    with Join([first, second]):
        for step in range(BATCHES[node]):
            train(first, a, node, range(step, step + 1))
            train(second, b, node, range(step, step + 1))
    return [flat(a)], [flat(b)]


def join_throws(process_group: Group) -> str:
    node, model, optimizer = start(process_group, "decentlam")

    def run() -> None:
        with Join([optimizer], throw_on_early_termination=True):
            train(optimizer, model, node, range(BATCHES[node]))

    return message_of(run)


# Models that do not use everything, in whatever order -------------------------------------------


class Branches(nn.Module):
    """Two branches over tied weights, taken in a different order or not at all by each node."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3, bias=False)
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.never = nn.Parameter(torch.randn(5))
        self.double()


def branches_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    if node == 2 and step == 3:
        return model.left(x).square().mean()  # nothing before it is used
    x = torch.tanh(model.tied(model.inner(x)))
    if (node + step) % 3 == 0:
        y = model.left(torch.tanh(model.right(x)[:, :3]))
    elif (node + step) % 3 == 1:
        y = model.right(torch.tanh(model.left(x)[:, :3]))
    else:
        y = model.left(x)
    return (y * model.frozen.abs() - 1).square().mean()


def branches(
    process_group: Group, method: str, overlap: bool, chatter: bool = False
) -> list[Tensor]:
    """With `chatter` the script communicates by itself between backward and step()."""
    node, n = dist.get_rank(process_group), dist.get_world_size(process_group)
    model = Branches(seed=node)
    optimizer = build(method, model, process_group, overlap=overlap)
    trajectory = []
    for step in range(8):
        optimizer.zero_grad()
        loss = branches_loss(model, node, step)
        loss.backward()
        if chatter:
            _talk(process_group, node, n)
        optimizer.step()
        trajectory.append(trained(model))
    return trajectory


def _talk(process_group: Group, node: int, n: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total, group=process_group)
    assert total.item() == n
    ranks = dist.get_process_group_ranks(process_group)
    received = torch.zeros(1)
    work = dist.irecv(received, ranks[(node - 1) % n], group=process_group)
    dist.send(torch.full((1,), float(node)), ranks[(node + 1) % n], group=process_group)
    work.wait()
    assert received.item() == (node - 1) % n


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def disjoint(process_group: Group, first: str) -> list[Tensor]:
    """Two losses over different parameters, as actor and critic have, in two backwards."""
    node, model, optimizer = start(process_group, "decentlam", bucket_bytes=200)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        terms = [
            (1 + 0.1 * step) * 0.5 * s * (w - t).square().sum()
            for w, t, s in zip(model.weights, targets_of(node), SCALE, strict=True)
        ]
        halves = [terms[:2], terms[2:]]
        for half in halves if first == "front" else halves[::-1]:
            sum(half).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


class Checkpointed(nn.Module):
    """Forgets what is between its halves and computes it again in backward."""

    def __init__(self, seed: int = 0, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = mlp(seed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for half in (self.layers[:2], self.layers[2:]):
            x = checkpoint(half, x, use_reentrant=self.reentrant)
        return x


def checkpointed(process_group: Group, reentrant: bool) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = Checkpointed(node, reentrant)
    optimizer = build("decentlam", model, process_group)
    return train(optimizer, model, node, range(4), mlp_loss)


class Large(nn.Module):
    """More elements than the runtime handles in one piece, and not a multiple of that."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(100_003, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(40_001, dtype=torch.float64))


def large_loss(model: nn.Module, node: int, step: int) -> Tensor:
    return sum((p - node - 0.1 * step).square().sum() for p in model.parameters())


def large(process_group: Group, method: str, per_node: int = 1) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Large(seed=rank)
    optimizer = build(method, model, process_group, bucket_bytes=10**7, processes_per_node=per_node)
    return train(optimizer, model, rank, range(4), large_loss)


def no_backward_at_all(process_group: Group) -> list[Tensor]:
    """Node 1 has nothing to learn from at odd steps and calls step() without backward."""
    node, model, optimizer = start(process_group, "dmsgd", weight_decay=0.0)
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        if not (node == 1 and step % 2):
            quadratic_loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def channels_last(process_group: Group) -> tuple[list[Tensor], bool]:
    """Convolutions, one of them frozen, in channels-last memory."""
    node = dist.get_rank(process_group)
    model = conv_model(seed=node)
    optimizer = build("decentlam", model, process_group)
    trajectory = []
    for step in range(4):
        optimizer.zero_grad()
        conv_loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(trained(model))
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    kept = all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convs)
    return trajectory, kept


def conv_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3))
    model[2].weight.requires_grad_(False)
    return model.double().to(memory_format=torch.channels_last)


def conv_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
    return model(x.to(memory_format=torch.channels_last)).square().mean()


def compiled(process_group: Group, backend: str) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = mlp(seed=node)
    optimizer = build("decentlam", model, process_group)
    fast = torch.compile(model, backend=backend)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        mlp_loss(fast, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def mlp_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :2]).square().mean()


# Several optimizers -----------------------------------------------------------------------------


def generator_loss(models: nn.ModuleDict, node: int, step: int) -> Tensor:
    return mlp_loss(models["generator"], node, step) + discriminator_loss(models, node, step)


def discriminator_loss(models: nn.ModuleDict, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(500 + 100 * node + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return models["discriminator"](torch.cat([models["generator"](x), x[:, :2]], 1)).square().mean()


def gan(process_group: Group, methods: tuple[str, str], overlap: bool) -> list[Tensor]:
    """Two optimizers in turn; the generator's backward reaches the discriminator too."""
    node = dist.get_rank(process_group)
    models = nn.ModuleDict({"generator": mlp(node), "discriminator": mlp(node + 10)})
    first = build(methods[0], models["generator"], process_group, overlap=overlap)
    second = build(methods[1], models["discriminator"], process_group, overlap=overlap)
    trajectory = []
    for step in range(5):
        second.zero_grad()
        with first.no_sync():
            discriminator_loss(models, node, step).backward()
        second.step()
        first.zero_grad()
        with second.no_sync():
            generator_loss(models, node, step).backward()
        first.step()
        trajectory.append(flat(models))
    return trajectory


def simulate_gan(methods: tuple[str, str], n: int) -> list[Tensor]:
    models = nn.ModuleDict({"generator": mlp(0), "discriminator": mlp(10)})
    first, second = (
        decentlam.Nodes(m, "ring", flat(part).expand(n, -1), MOMENTUM, weight_decay=DECAY)
        for m, part in zip(methods, models.values(), strict=True)
    )
    trajectory = []

    def gradients(nodes: decentlam.Nodes, part: str, loss: Loss, step: int) -> Tensor:
        rows = []
        for node in range(n):
            nn.utils.vector_to_parameters(first.x[node].clone(), models["generator"].parameters())
            nn.utils.vector_to_parameters(
                second.x[node].clone(), models["discriminator"].parameters()
            )
            models.zero_grad()
            loss(models, node, step).backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in models[part].parameters()]))
        return torch.stack(rows)

    for step in range(5):
        second.step(gradients(second, "discriminator", discriminator_loss, step), LR)
        first.step(gradients(first, "generator", generator_loss, step), LR)
        trajectory.append(torch.cat([first.x, second.x], dim=1))
    return trajectory


def halves(process_group: Group, methods: tuple[str, str]) -> list[Tensor]:
    """Two optimizers share one backward."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    weights = list(model.weights)
    front = build(methods[0], nn.ParameterList(weights[:2]), process_group)
    back = build(methods[1], nn.ParameterList(weights[2:]), process_group)
    trajectory = []
    for step in range(5):
        front.zero_grad()
        back.zero_grad()
        quadratic_loss(model, node, step).backward()
        front.step()
        back.step()
        trajectory.append(flat(model))
    return trajectory


def replaced(process_group: Group, kept_alive: bool) -> list[Tensor]:
    """A second optimizer takes over the model; the first must not interfere any more."""
    node, model, optimizer = start(process_group, "dmsgd")
    train(optimizer, model, node, range(3))
    nn.utils.vector_to_parameters(flat(Quadratic(seed=0)), model.parameters())
    second = build("decentlam", model, process_group)
    if not kept_alive:
        del optimizer
    return train(second, model, node, range(5))


def dropped(process_group: Group, method: str, after: str) -> list[Tensor]:
    """An optimizer is given up with messages under way; the next one uses the same group."""
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    if after == "backward":
        optimizer.zero_grad()
        quadratic_loss(model, node, 2).backward()
    del model, optimizer
    gc.collect()
    dist.all_reduce(torch.ones(1), group=process_group)
    node, model, optimizer = start(process_group, "dmsgd")
    return train(optimizer, model, node, range(3))


def subgroup(process_group: Group) -> list[Tensor]:
    """Even and odd processes are two networks of their own."""
    rank = dist.get_rank(process_group)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    node = dist.get_rank(mine)
    model = Quadratic(seed=0)
    optimizer = build("decentlam", model, mine)
    return train(optimizer, model, node, range(5))


# Construction, evaluation, statistics -----------------------------------------------------------


def disagree(process_group: Group, what: str) -> str:
    """Process 2 means another run."""
    odd = dist.get_rank(process_group) == 2
    model = Quadratic(seed=0)
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.weights.append(frozen)
    method, options = "dmsgd", {}
    if odd and what == "shape":
        model.weights[1] = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    elif odd and what == "dtype":
        model.weights[1] = nn.Parameter(torch.zeros(5))
    elif odd and what == "frozen shape":
        model.weights[5] = nn.Parameter(torch.zeros(300), requires_grad=False)
    elif odd and what == "frozen":
        model.weights[0].requires_grad_(False)
    elif odd and what == "name":
        model = nn.ModuleDict({"extra": model})
    elif odd and what == "one more":
        model.weights.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    elif odd and what == "lr":
        options["lr"] = 0.7
    elif odd and what == "momentum":
        options["momentum"] = 0.123
    elif odd and what == "topology":
        options["topology"] = "star"
    elif odd and what == "seed":
        options["topology"] = decentlam.topology.bipartite_random_match(4, seed=1)
    elif odd and what == "algorithm":
        method = "da-dmsgd"
    elif odd and what == "bucket_bytes":
        options["bucket_bytes"] = 10**6
    elif odd and what == "overlap":
        options["overlap"] = False
    elif odd and what == "processes_per_node":
        options["processes_per_node"] = 2
    if not odd and what == "seed":
        options["topology"] = decentlam.topology.bipartite_random_match(4, seed=0)
    return message_of(lambda: build(method, model, process_group, **options))


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def evaluate(process_group: Group, method: str, overlap: bool) -> dict[str, Any]:
    node = dist.get_rank(process_group)
    model = Normed(seed=node)
    optimizer = build(method, model, process_group, overlap=overlap)

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * node + step)
        x = (1 + node) * torch.randn(8, 3, generator=generator, dtype=torch.float64) + node
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    def everything() -> list[Tensor]:
        return [t.detach().clone() for t in model.state_dict().values()]

    train(optimizer, model, node, range(3), loss)
    before = everything()
    with optimizer.averaged(model):
        inside = everything()
    after = everything()
    with contextlib.suppress(ZeroDivisionError), optimizer.averaged(model):
        raise ZeroDivisionError
    after_exception = everything()
    with optimizer.averaged():  # parameters only
        without_model = everything()
    optimizer.zero_grad()
    loss(model, node, 3).backward()
    too_late = message_of(lambda: optimizer.averaged(model).__enter__())
    optimizer.step()
    before_merge = flat(model)
    distance = optimizer.consensus_distance()
    optimizer.merge(model)
    merged = flat(model)
    merged_distance = optimizer.consensus_distance()
    buffers = [b.clone() for b in model.buffers()]
    train(optimizer, model, node, range(4, 5), loss)
    return {
        "before": before,
        "inside": inside,
        "after": after,
        "after exception": after_exception,
        "without model": without_model,
        "too late": too_late,
        "before merge": before_merge,
        "distance": distance,
        "merged": merged,
        "merged distance": merged_distance,
        "merged buffers": buffers,
        "step after merge": flat(model),
    }


def statistics(process_group: Group, method: str, topology: str, overlap: bool) -> dict[str, Any]:
    node, model, optimizer = start(process_group, method, topology=topology, overlap=overlap)
    sent = []
    for step in range(4):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        if node == 3:
            time.sleep(0.1)  # the others wait for it
        optimizer.step()
        sent.append(optimizer.statistics.bytes_sent)
    s = optimizer.statistics
    return {
        "sent": sent,
        "total": s.total_bytes_sent,
        "step": s.step,
        "wait": s.wait_seconds,
        "total wait": s.total_wait_seconds,
        "exchange": s.exchange_seconds,
        "overlap": s.overlap,
        "skipped": s.skipped,
    }


# State, groups, networks that change mid-run ----------------------------------------------------


def resume(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Six steps in one go, and three, saved, loaded into a new model and optimizer, and three."""
    options = {"topology": "one-peer-symmetric-exponential"}
    node, model, optimizer = start(process_group, method, **options)
    whole = train(optimizer, model, node, range(6))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(2))  # what is in flight then must not disturb
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return whole[3:], train(optimizer, model, node, range(3, 6))


def copied(process_group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """The original and its deep copy go on side by side, in the default group."""
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(3))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    ours, theirs = [], []
    for step in range(3, 6):
        ours += train(optimizer, model, node, range(step, step + 1))
        theirs += train(twin_optimizer, twin, node, range(step, step + 1))
    return ours, theirs


def late_group(process_group: Group, method: str) -> list[Tensor]:
    """Two parameters join after three steps; they start equal although nodes built them apart."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    weights = list(model.weights)
    optimizer = build(
        method,
        nn.ParameterList(weights[:3]),
        process_group,
        topology="bipartite-random-match",
        stable="ignore",  # as in the simulator
    )
    trajectory = train(optimizer, model, node, range(3))
    model.zero_grad()
    late = [(f"late.{i}", w) for i, w in enumerate(weights[3:])]
    optimizer.add_param_group({"params": late, "lr": 2 * LR})
    return trajectory + train(optimizer, model, node, range(3, 8))


def simulate_late_group(method: str, n: int) -> list[Tensor]:
    """The loss is a sum over parameters: those that join late are a run of their own."""
    whole = flat(Quadratic(seed=0))
    size = sum(torch.Size(shape).numel() for shape in Quadratic.SHAPES[:3])
    targets = torch.stack([torch.cat([t.reshape(-1) for t in targets_of(i)]) for i in range(n)])
    sizes = torch.tensor([torch.Size(shape).numel() for shape in Quadratic.SHAPES])
    scale = SCALE.repeat_interleave(sizes)
    hyper: dict[str, Any] = {"tau": 3} if method == "slowmo" else {}
    parts = []
    for span, lr, first in ((slice(0, size), LR, 0), (slice(size, None), 2 * LR, 3)):
        nodes = decentlam.Nodes(
            method,
            "bipartite-random-match",
            whole[span].expand(n, -1),
            MOMENTUM,
            weight_decay=DECAY,
            **hyper,
        )
        nodes.index = first
        rows = [nodes.x.clone() for _ in range(first)]
        for step in range(first, 8):
            g = (1 + 0.1 * step) * scale[span] * (nodes.x - targets[:, span])
            nodes.step(g, lr)
            rows.append(nodes.x.clone())
        parts.append(rows)
    return [torch.cat(pair, dim=1) for pair in zip(*parts, strict=True)]


def groups(process_group: Group, method: str) -> list[Tensor]:
    """Two groups with their own lr, weight decay and momentum."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    weights = list(model.weights)
    constructor = CLASSES[method]
    optimizer = constructor(
        [
            {"params": weights[:2]},
            {"params": weights[2:], "lr": 2 * LR, "weight_decay": 0.1, "momentum": 0.2},
        ],
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        topology="ring",
        bucket_bytes=100,
        timeout_seconds=30.0,
        process_group=process_group,
    )
    return train(optimizer, model, node, range(6))


def simulate_groups(method: str, n: int) -> list[Tensor]:
    """The loss is a sum over parameters: each group is a run of its own."""
    front = sum(torch.Size(shape).numel() for shape in Quadratic.SHAPES[:2])
    first = simulate(method, n, 6)
    second = simulate(method, n, 6, lr=lambda step: 2 * LR, weight_decay=0.1, momentum=0.2)
    return [
        torch.cat([a[:, :front], b[:, front:]], dim=1) for a, b in zip(first, second, strict=True)
    ]


TOPOLOGIES = {0: "ring", 2: "star", 4: "one-peer-exponential", 6: "complete"}


def new_topology(process_group: Group, method: str, overlap: bool) -> list[Tensor]:
    node, model, optimizer = start(process_group, method, overlap=overlap)
    trajectory = []
    for step in range(8):
        if step in TOPOLOGIES:
            topology = decentlam.TOPOLOGIES[TOPOLOGIES[step]](4)
            optimizer.use_network(optimizer.network, topology)
        trajectory += train(optimizer, model, node, range(step, step + 1))
    return trajectory


def use_topology(nodes: decentlam.Nodes, step: int) -> None:
    if step in TOPOLOGIES:
        nodes.exchange = DenseExchange(decentlam.TOPOLOGIES[TOPOLOGIES[step]](4))


def new_network(process_group: Group) -> list[Tensor]:
    """Node 3 leaves after three steps, and the others go on without it."""
    node, model, optimizer = start(process_group, "dmsgd")
    trajectory = train(optimizer, model, node, range(3))
    survivors = dist.new_group([0, 1, 2])
    if node == 3:
        return trajectory
    optimizer.use_network(connect(survivors), decentlam.topology.ring(3))
    return trajectory + train(optimizer, model, node, range(3, 6))


def simulate_without_last(method: str, n: int, leaves_at: int, steps: int) -> list[Tensor]:
    """Steps from `leaves_at` on of the first n - 1 nodes, when the last one leaves then."""
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


def refused_networks(process_group: Group) -> dict[str, str]:
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(1))
    network = optimizer.network
    directed, wrong = decentlam.topology.one_peer_exponential(4), decentlam.topology.ring(5)
    errors = {
        "directed": message_of(lambda: optimizer.use_network(network, directed)),
        "wrong size": message_of(lambda: optimizer.use_network(network, wrong)),
    }
    optimizer.zero_grad()
    quadratic_loss(model, node, 1).backward()
    ring = decentlam.topology.ring(4)
    errors["between"] = message_of(lambda: optimizer.use_network(network, ring))
    optimizer.step()
    return errors


# Neighbors that die or stop ---------------------------------------------------------------------

VICTIM = 2


def with_victim(
    method: str,
    overlap: bool,
    when: str,
    asleep: float,
    timeout_seconds: float,
    per_node: int = 1,
) -> tuple[str, float]:
    """Process 2 dies (or sleeps) at step 3: the error of this one and how long it took to come."""
    assert dist.group.WORLD is not None
    node, model, optimizer = start(
        dist.group.WORLD,
        method,
        overlap=overlap,
        timeout_seconds=timeout_seconds,
        processes_per_node=per_node,
    )

    def accident(*arguments: Any) -> None:
        if asleep:
            time.sleep(asleep)
        else:
            os._exit(7)

    train(optimizer, model, node, range(3))
    begun = time.monotonic()

    def go_on() -> None:
        for step in range(3, 20):
            optimizer.zero_grad()
            loss = quadratic_loss(model, node, step)
            struck = node == VICTIM and step == 3
            if struck and when == "before backward":
                accident()
            if struck and when == "in backward":
                model.weights[2].register_post_accumulate_grad_hook(accident)
            loss.backward()
            if struck and when == "before step":
                accident()
            optimizer.step()

    return message_of(go_on), time.monotonic() - begun
