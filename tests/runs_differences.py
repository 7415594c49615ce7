"""What processes do that send fewer bits, and the same recursions by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch
from runs import SCALE, Quadratic, flat, targets_of
from runs_batched import batched
from runs_steps import (
    DECAY,
    LR,
    MOMENTUM,
    Group,
    build,
    message_of,
    quadratic_loss,
    start,
    train,
)
from torch import Tensor, nn

import decentlam

STEPS = 8  # one-peer-symmetric-exponential uses each of its edges every second step
GOSSIP_STEPS = 30  # a ring of 4 keeps a third of the disagreement at each
HALF, INT8 = torch.float16, torch.int8
BLOCK = 256


def trajectory(
    process_group: Group, method: str, **options: Any
) -> tuple[list[Tensor], tuple[int, int, list[int]], str]:
    """The parameters after each step; bytes of the last step, of all, and elements of each bucket;
    and the exchange."""
    node, model, optimizer = start(process_group, method, **options)
    steps = train(optimizer, model, node, range(STEPS))
    sizes = [len(bucket.x) for bucket in optimizer.runtime.buckets]
    sent = optimizer.statistics.bytes_sent, optimizer.statistics.total_bytes_sent, sizes
    return steps, sent, type(optimizer.runtime.exchange).__name__


def in_batches(process_group: Group, **options: Any) -> tuple[list[Tensor], set[str]]:
    """The same through the branch for NCCL, and what was posted there."""
    with batched() as posts:
        steps, _, _ = trajectory(process_group, **options)
        return steps, {what for _, what, _ in posts}


def by_hand(method: str, topology: str, n: int, dtype: torch.dtype) -> list[Tensor]:
    """DmSGD and DecentLaM in which nodes see of each other what goes into so few bits."""
    weights = [decentlam.topology.resolve(topology, n).weights(k) for k in range(STEPS)]
    network = Quadratic()
    sizes = [p.numel() for p in network.parameters()]
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
            if dtype is not INT8:
                known[i, j] = messages[i].to(dtype).double()
            elif (i, j) in known:
                change = messages[i] - known[i, j]
                known[i, j] = known[i, j] + torch.cat([eighths(c) for c in change.split(sizes)])
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


def eighths(change: Tensor) -> Tensor:
    """Each block in whole multiples of a 127th of its largest element, one element at a time."""
    found = []
    for block in change.float().split(BLOCK):
        scale = max(block.abs().max() / 127, torch.tensor(1e-30))
        found += [torch.round(element / scale) * scale for element in block]
    return torch.stack(found).double()


def _gradient(network: nn.Module, x: Tensor, node: int, step: int) -> Tensor:
    nn.utils.vector_to_parameters(x.clone(), network.parameters())
    network.zero_grad()
    ((1 + 0.1 * step) * network(targets_of(node), SCALE)).backward()
    return torch.cat([p.grad.reshape(-1) for p in network.parameters()])


def gossip(process_group: Group, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[float]]:
    """Steps without gradient from models that differ: the average, before and after, and how far
    apart the nodes are after the first step and after the last."""
    node, model, optimizer = start(
        process_group, "decentlam", topology="ring", message_dtype=dtype, lr=0.0, weight_decay=0.0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(node / 2)
    apart = []
    with optimizer.averaged(model):
        before = flat(model)
    for steps in (range(1), range(1, GOSSIP_STEPS)):
        train(optimizer, model, node, steps)
        apart.append(optimizer.consensus_distance())
    with optimizer.averaged(model):
        return before, flat(model), apart


def refused(process_group: Group) -> list[str]:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dmsgd", {"topology": "one-peer-exponential", "message_dtype": HALF}),
        ("dmsgd", {"topology": "bipartite-random-match", "message_dtype": INT8}),
        ("pmsgd", {"message_dtype": HALF}),
        ("dmsgd", {"message_dtype": torch.int32}),
    ]
    return [
        message_of(functools.partial(start, process_group, method, **options))
        for method, options in cases
    ]


def more_parameters(process_group: Group) -> list[Tensor]:
    """What is known is of the old buckets: with a new one, all start anew."""
    node, model, optimizer = start(process_group, "dmsgd", topology="ring", message_dtype=INT8)
    train(optimizer, model, node, range(3))
    more = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    optimizer.add_param_group({"params": [("more", more)], "lr": 0.0})
    with torch.no_grad():
        more.fill_(node)
    for step in range(3, 3 + GOSSIP_STEPS):
        optimizer.zero_grad()
        (quadratic_loss(model, node, step) + 0 * more.sum()).backward()
        optimizer.step()
    return [more.detach().clone()]


def resumed(process_group: Group, method: str, path: str, **options: Any) -> tuple[Tensor, Tensor]:
    """The end of a run that saved a checkpoint half-way, and of one that began from there."""
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(5))
    decentlam.save_checkpoint(path, model=model, optimizer=optimizer)
    train(optimizer, model, node, range(5, STEPS))
    other = Quadratic(seed=99)
    again = build(method, other, process_group, **options)
    train(again, other, node, range(3))  # what was known before the checkpoint must not matter
    decentlam.load_checkpoint(path, model=other, optimizer=again)
    train(again, other, node, range(5, STEPS))
    return flat(model), flat(other)


def equal_data(process_group: Group, own: bool, lr: float) -> int:
    """How often nodes whose first messages are all the same in 16 bits say so; with data of their
    own, or with those of one."""
    node, model, optimizer = start(
        process_group, "dmsgd", topology="ring", message_dtype=HALF, lr=lr
    )
    train(optimizer, model, node if own else 0, range(3))
    return optimizer.runtime._equal._equal


def large(process_group: Group) -> tuple[Tensor, Tensor]:
    """Models of which float16 has no more than the sign, before and after steps of gossip."""
    node, model, optimizer = start(
        process_group, "dmsgd", topology="ring", message_dtype=HALF, lr=0.0, weight_decay=0.0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1e6 + node)
    before = flat(model)
    train(optimizer, model, node, range(3))
    return before, flat(model)


def automatic(process_group: Group) -> tuple[bool, str]:
    _, _, optimizer = start(process_group, "dmsgd", topology="auto", message_dtype=HALF)
    return optimizer.topology.symmetric, type(optimizer.runtime.exchange).__name__
