"""What processes do that send 16-bit differences, and the same recursions by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch
from runs import SCALE, Quadratic, flat, targets_of
from runs_steps import DECAY, LR, MOMENTUM, Group, message_of, quadratic_loss, start, train
from torch import Tensor, nn

import decentlam

STEPS = 12
HALF = torch.bfloat16


def trajectory(process_group: Group, method: str, **options: Any) -> tuple[list[Tensor], int, str]:
    node, model, optimizer = start(process_group, method, **{"message_dtype": HALF, **options})
    steps = train(optimizer, model, node, range(STEPS))
    return steps, optimizer.statistics.bytes_sent, type(optimizer.exchange).__name__


def by_hand(method: str, topology: str, n: int) -> list[Tensor]:
    """DmSGD and DecentLaM in which every node tells its neighbors rounded differences."""
    weights = [decentlam.topology.resolve(topology, n).weights(k) for k in range(STEPS)]
    network = Quadratic()
    x = [flat(network) for _ in range(n)]
    state = [torch.zeros_like(v) for v in x]
    known: dict[tuple[int, int], Tensor] = {}  # (who, to whom)
    found = []
    for step, w in enumerate(weights):
        messages = []
        for i in range(n):
            g = _gradient(network, x[i], i, step) + DECAY * x[i]
            if method == "dmsgd":
                state[i] = MOMENTUM * state[i] + g
            messages.append(x[i] - LR * (state[i] if method == "dmsgd" else g))
        edges = [(i, j) for i in range(n) for j in range(n) if i != j and w[i, j] != 0]
        for i, j in edges:
            if (i, j) in known:
                change = (messages[i] - known[i, j]).to(HALF)
                known[i, j] = known[i, j] + change.to(torch.float64)
            else:
                known[i, j] = messages[i]
        for i in range(n):
            mixed = messages[i].clone()
            for j in range(n):
                if (i, j) in edges:
                    mixed += w[i, j] * (known[j, i] - known[i, j])
            if method == "decentlam":
                state[i] = MOMENTUM * state[i] + x[i] - mixed
                x[i] = x[i] - state[i]
            else:
                x[i] = mixed
        found.append(torch.stack(x))
    return found


def _gradient(network: nn.Module, x: Tensor, node: int, step: int) -> Tensor:
    nn.utils.vector_to_parameters(x.clone(), network.parameters())
    network.zero_grad()
    ((1 + 0.1 * step) * network(targets_of(node), SCALE)).backward()
    return torch.cat([p.grad.reshape(-1) for p in network.parameters()])


def gossip(process_group: Group) -> tuple[Tensor, Tensor, list[float]]:
    """Steps without gradient from models that differ: the average, before and after, and how far
    apart the nodes are."""
    node, model, optimizer = start(
        process_group, "decentlam", topology="ring", message_dtype=HALF, lr=0.0, weight_decay=0.0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(node / 3)
    apart = []
    with optimizer.averaged(model):
        before = flat(model)
    for step in range(60):
        train(optimizer, model, node, range(step, step + 1))
        apart.append(optimizer.consensus_distance())
    with optimizer.averaged(model):
        return before, flat(model), apart


def refused(process_group: Group) -> list[str]:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dmsgd", {"topology": "one-peer-exponential"}),
        ("dmsgd", {"topology": "bipartite-random-match"}),
        ("pmsgd", {}),
        ("dmsgd", {"message_dtype": torch.float16}),
    ]
    return [
        message_of(
            functools.partial(start, process_group, method, **{"message_dtype": HALF, **options})
        )
        for method, options in cases
    ]


def more_parameters(process_group: Group) -> list[Tensor]:
    """What is known is of the old buckets: with a new one, all start anew."""
    node, model, optimizer = start(process_group, "dmsgd", topology="ring", message_dtype=HALF)
    train(optimizer, model, node, range(3))
    more = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer.add_param_group({"params": [("more", more)], "lr": 0.0})
    with torch.no_grad():
        more.fill_(node)
    for step in range(3, 60):
        optimizer.zero_grad()
        (quadratic_loss(model, node, step) + 0 * more.sum()).backward()
        optimizer.step()
    return [more.detach().clone()]
