"""message_dtype: neighbors are told 16 bits, and the recursion stays what it is."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import decentlam
from tests.helpers.processes import Group, Scenarios, message_of, warnings_of
from tests.helpers.quadratic import (
    DECAY,
    LR,
    MOMENTUM,
    SCALE,
    Quadratic,
    assert_equal,
    flat,
    same,
    start,
    targets_of,
    train,
)

N, STEPS = 4, 8
HALF, BRAIN = torch.float16, torch.bfloat16
scenarios = Scenarios(N)


def trajectory(
    process_group: Group, method: str, **options: Any
) -> tuple[list[Tensor], tuple[int, int]]:
    """Return the parameters after each step, and the bytes sent in the last step and in all."""
    node, model, optimizer = start(process_group, method, **options)
    steps = train(optimizer, model, node, range(STEPS))
    return steps, (optimizer.statistics.bytes_sent, optimizer.statistics.total_bytes_sent)


def by_hand(method: str, topology: str, n: int, dtype: torch.dtype) -> list[Tensor]:
    """DmSGD and DecentLaM in which nodes see of each other what goes into so few bits."""
    weights = [decentlam.topology.resolve(topology, n).weights(k) for k in range(STEPS)]
    network = Quadratic()
    x = [flat(network) for _ in range(n)]
    state = [torch.zeros_like(v) for v in x]
    found = []
    for step, w in enumerate(weights):
        messages = []
        for i in range(n):
            g = _gradient(network, x[i], i, step) + DECAY * x[i]
            if method == "dmsgd":
                state[i] = MOMENTUM * state[i] + g
            messages.append(x[i] - LR * (state[i] if method == "dmsgd" else g))
        told = [message.to(dtype).double() for message in messages]
        for i in range(n):
            mixed = messages[i].clone()
            for j in range(n):
                mixed += w[i, j] * (told[j] - told[i])
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


NAMES = ("message_dtype", "method", "topology", "overlap")
CASES = [
    (HALF, "dmsgd", "ring", "none"),
    (HALF, "decentlam", "ring", "backward"),
    (HALF, "dmsgd", "bipartite-random-match", "auto"),
    (HALF, "decentlam", "bipartite-random-match", "backward"),
    (HALF, "decentlam", "two-random-matches", "backward"),
    (BRAIN, "dmsgd", "complete", "none"),
    (BRAIN, "decentlam", "complete", "backward"),
]


@scenarios.run(trajectory, [dict(zip(NAMES, case, strict=True)) for case in CASES])
def test_steps_are_those_computed_by_hand(
    results: Any, method: str, topology: str, message_dtype: torch.dtype
) -> None:
    """Of the ring's, half of the bytes: two to each of two neighbors."""
    assert_equal([steps for steps, _ in results], by_hand(method, topology, N, message_dtype))
    for _, (last, total) in results if topology == "ring" else ():
        assert last == 2 * 2 * sum(Quadratic.SIZES) and total == STEPS * last


@scenarios.run(trajectory, [{"method": "da-dmsgd", "message_dtype": HALF}])
def test_both_payloads_are_sent_in_half_of_the_bytes(results: Any) -> None:
    assert all(last == 2 * 2 * 2 * sum(Quadratic.SIZES) for _, (last, _) in results)


def of_two(process_group: Group) -> list[list[Tensor]]:
    """Steps of nodes of two processes, in all bits and in 16."""
    options = {"method": "dmsgd", "processes_per_node": 2}
    return [trajectory(process_group, message_dtype=t, **options)[0] for t in (None, HALF)]


@scenarios.run(of_two)
def test_nodes_of_two_processes_stay_near_and_agree_inside(results: Any) -> None:
    for expected, found in results:
        moved = (expected[-1] - expected[0]).abs().max()
        assert 0 < (expected[-1] - found[-1]).abs().max() < 0.02 * moved
    for (_, one), (_, other) in zip(results[::2], results[1::2], strict=True):
        assert same(one, other)


def gossip(process_group: Group) -> tuple[Tensor, Tensor, list[float]]:
    """Steps without gradient from models that differ: the average, before and after, and how far
    apart the nodes are after the first step and after the last."""
    node, model, optimizer = start(
        process_group, "decentlam", message_dtype=HALF, lr=0.0, weight_decay=0.0
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(node / 2)
    apart = []
    with optimizer.averaged(model):
        before = flat(model)
    for steps in (range(1), range(1, 30)):
        train(optimizer, model, node, steps)
        apart.append(optimizer.consensus_distance())
    with optimizer.averaged(model):
        return before, flat(model), apart


@scenarios.run(gossip)
def test_gossip_keeps_the_average_and_ends_in_agreement(results: Any) -> None:
    for before, after, apart in results:
        assert (before - after).abs().max() < 1e-13
        assert apart[-1] < 1e-3 * apart[0]


def refused(process_group: Group) -> list[str]:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dmsgd", {"topology": "one-peer-exponential", "message_dtype": HALF}),
        ("pmsgd", {"message_dtype": HALF}),
        ("dmsgd", {"message_dtype": torch.int32}),
    ]
    return [
        message_of(functools.partial(start, process_group, method, **options))
        for method, options in cases
    ]


@scenarios.run(refused)
def test_what_cannot_be_sent_so_is_refused_on_all_nodes(results: Any) -> None:
    for directed, everyone, dtype in results:
        assert "same in both directions" in directed and "try base-2" in directed
        assert "averages over everyone" in everyone
        assert "message_dtype must be None or one of" in dtype and "got torch.int32" in dtype


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


@scenarios.run(large)
def test_what_float16_cannot_hold_stays_finite_and_keeps_the_average(results: Any) -> None:
    """All beyond 65504 are told as that, so that such nodes do not mix."""
    for before, after in results:
        assert (before - after).abs().max() < 1e-8


def equal_data(process_group: Group, own: bool, lr: float) -> int:
    """Return how often a node says that its neighbors have the same data in 16 bits."""
    node, model, optimizer = start(
        process_group, "dmsgd", topology="ring", message_dtype=HALF, lr=lr
    )
    with warnings_of("decentlam") as said:
        train(optimizer, model, node if own else 0, range(3))
    return len([text for text in said if "DistributedSampler" in text])


@scenarios.run(
    equal_data, [{"own": False, "lr": LR}, {"own": True, "lr": LR}, {"own": True, "lr": 1e-6}]
)
def test_nodes_that_train_on_the_same_data_are_noticed(told: list[int], own: bool) -> None:
    """Of tiny steps 16 bits show nothing, so nothing is said."""
    assert told == [0 if own else 1] * N
