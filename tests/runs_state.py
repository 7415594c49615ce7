"""State that is saved and copied, groups and networks that change in the midst of a run."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from runs import CLASSES, HANG_SECONDS, SCALE, Quadratic, flat, targets_of
from runs_steps import (
    DECAY,
    LR,
    MOMENTUM,
    Group,
    build,
    message_of,
    quadratic_loss,
    simulate,
    start,
    train,
)
from torch import Tensor, nn

import decentlam
from decentlam.exchange.dense import DenseMix
from decentlam.exchange.network import connect


def resume(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Six steps in one go, and three, saved, loaded into a new model and optimizer, and three."""
    options = {"topology": "one-peer-symmetric-exponential"}
    node, model, optimizer = start(process_group, method, **options)
    whole = train(optimizer, model, node, range(6))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(2))  # what is on its way then must not disturb
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
        timeout_seconds=HANG_SECONDS,
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
        nodes._mix = DenseMix(decentlam.TOPOLOGIES[TOPOLOGIES[step]](4))


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
