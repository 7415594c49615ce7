"""Several optimizers in one process: at once, one after the other, side by side."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from runs import Quadratic, flat
from runs_models import mlp, mlp_loss
from runs_steps import DECAY, LR, MOMENTUM, Group, Loss, build, quadratic_loss, start, train
from torch import Tensor, nn

import decentlam


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
