"""Nodes that mean different runs, evaluation of the average, statistics of a step."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runs import Quadratic, flat
from runs_steps import Group, build, message_of, quadratic_loss, start, train
from torch import Tensor, nn

import decentlam
from decentlam.checkpoint import save_checkpoint


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


def different_calls(process_group: Group, directory: str) -> tuple[list[str], float]:
    """Process 0 makes another call than the others, again and again; then all make the same."""
    node = dist.get_rank(process_group)
    model = Normed(seed=node)
    optimizer = build("decentlam", model, process_group)

    def average(model: nn.Module | None = None) -> None:
        with optimizer.averaged(model):
            pass

    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (average, optimizer.consensus_distance),
        (lambda: average(model), average),  # with the buffers of the model, and without
        (optimizer.consensus_distance, optimizer.merge),
        (average, lambda: save_checkpoint(directory, model=model, optimizer=optimizer)),
    ]
    errors = [message_of(pair[min(node, 1)]) for pair in pairs]
    return errors, optimizer.consensus_distance()


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


def slow_neighbor(process_group: Group) -> tuple[float, float]:
    """What node 0 has waited in one step, and in all. Node 3 takes its time for each, until that
    was longer than what else node 0 may have to wait for on a busy machine."""
    node, model, optimizer = start(process_group, "decentlam", overlap=False)
    waited = torch.zeros(2, dtype=torch.float64)
    while waited[0] <= 0.2:
        optimizer.zero_grad()
        quadratic_loss(model, node, 0).backward()
        time.sleep(0.5 if node == 3 else 0.0)
        optimizer.step()
        s = optimizer.statistics
        waited = torch.tensor([s.wait_seconds, s.total_wait_seconds], dtype=torch.float64)
        dist.broadcast(waited, 0)
    return waited[0].item(), waited[1].item()


def eval_and_train(
    process_group: Group, method: str, overlap: str, directory: str
) -> dict[str, Any]:
    """The mean between the two calls, twice over; what is refused there; what is saved there."""
    node = dist.get_rank(process_group)
    model = Normed(seed=0)
    optimizer = build(method, model, process_group, overlap=overlap)

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(9 * node + step)).double()
        return (model(x) - x.sum(1, keepdim=True) - node).square().mean()

    def everything() -> list[Tensor]:
        return [t.detach().clone() for t in model.state_dict().values()]

    train(optimizer, model, node, range(2), loss)
    optimizer.train()  # changes nothing
    before = everything()
    optimizer.eval(model)
    optimizer.eval(model)
    inside = everything()
    model.eval()  # or the backward that is refused would leave its traces in the batch norm
    refused = {
        "step": message_of(optimizer.step),
        "backward": message_of(lambda: loss(model, node, 2).backward()),
        "merge": message_of(lambda: optimizer.merge(model)),
        "averaged": message_of(lambda: optimizer.averaged(model).__enter__()),
        "load": message_of(lambda: optimizer.load_state_dict(optimizer.state_dict())),
        "copy": message_of(lambda: copy.deepcopy(optimizer)),
    }
    optimizer.zero_grad()
    decentlam.save_checkpoint(directory, model=model, optimizer=optimizer)
    after_saving = everything()
    model.train()._apply(torch.clone)  # as a trainer that moves the model to its device does
    optimizer.train()
    optimizer.train()
    after = everything()
    train(optimizer, model, node, range(2, 4), loss)
    end = everything()
    decentlam.load_checkpoint(directory, model=model, optimizer=optimizer)
    loaded = everything()
    train(optimizer, model, node, range(2, 4), loss)
    return {
        "before": before,
        "inside": inside,
        "refused": refused,
        "after saving": after_saving,
        "after": after,
        "end": end,
        "loaded": loaded,
        "resumed": everything(),
    }
