"""Param groups: their own settings, added in the midst of a run, and the stable form of all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from tests.helpers.processes import HANG_SECONDS, Group, Scenarios, every
from tests.helpers.quadratic import (
    CLASSES,
    DECAY,
    LR,
    MOMENTUM,
    SCALE,
    Quadratic,
    assert_equal,
    build,
    flat,
    simulate,
    start,
    targets_of,
    train,
)

N = 4
scenarios = Scenarios(N)


def late_group(process_group: Group, method: str, per_node: int) -> list[Tensor]:
    """Two parameters join after three steps; they start equal although nodes built them apart."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    weights = list(model.weights)
    optimizer = build(
        method,
        nn.ParameterList(weights[:3]),
        process_group,
        topology="bipartite-random-match",
        processes_per_node=per_node,
    )
    trajectory = train(optimizer, model, node, range(3))
    model.zero_grad()
    late = [(f"late.{i}", w) for i, w in enumerate(weights[3:])]
    optimizer.add_param_group({"params": late, "lr": 2 * LR})
    return trajectory + train(optimizer, model, node, range(3, 8))


def simulate_late_group(method: str, per_node: int) -> list[Tensor]:
    """The loss is a sum over parameters: those that join late are a run of their own."""
    n = N // per_node
    whole = flat(Quadratic(seed=0))
    size = sum(Quadratic.SIZES[:3])
    targets = torch.stack([torch.cat([t.reshape(-1) for t in targets_of(i)]) for i in range(N)])
    targets = targets.unflatten(0, (n, per_node)).mean(1)  # the mean gradient of a node
    scale = SCALE.repeat_interleave(torch.tensor(Quadratic.SIZES))
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


@scenarios.run(
    late_group,
    [
        *every(method=("decentlam", "awc-dmsgd", "da-dmsgd", "pmsgd", "slowmo"), per_node=[1]),
        *every(method=("decentlam", "awc-dmsgd", "slowmo"), per_node=[2]),
    ],
)
def test_group_added_mid_run(results: Any, method: str, per_node: int) -> None:
    """What joins is equal on all nodes from then on, though each built it by itself."""
    expected, early = simulate_late_group(method, per_node), sum(Quadratic.SIZES[:3])
    assert_equal(
        [[x[:early] for x in r[:3]] for r in results], [x[:, :early] for x in expected[:3]]
    )
    assert_equal([r[3:] for r in results], expected[3:])


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


@scenarios.run(groups, every(method=("decentlam", "da-dmsgd")))
def test_groups_have_their_own_lr_decay_and_momentum(results: Any, method: str) -> None:
    assert_equal(results, simulate_groups(method, N))


def stable_form(process_group: Group) -> list[tuple[str, str]]:
    """What was asked for and what runs: at first, with one more group, and in a copy."""
    node, model, optimizer = start(
        process_group, "decentlam", topology="one-peer-hypercube", stable="auto"
    )
    train(optimizer, model, node, range(2))
    found = [optimizer]
    optimizer.add_param_group({"params": [("one more", nn.Parameter(torch.ones(2)))]})
    found += [optimizer, copy.deepcopy(optimizer)]
    return [(type(o.method).__name__, type(o.algorithm).__name__) for o in found]


@scenarios.run(stable_form)
def test_a_stable_form_runs_for_the_method_that_was_asked_for(results: Any) -> None:
    assert results == [[("DecentLaM", "SteadyDecentLaM")] * 3] * N


def groups_momentum(process_group: Group) -> str:
    """What runs where only a param group has the momentum that needs a stable form."""
    model = Quadratic()
    optimizer = decentlam.DecentLaM(
        [{"params": list(model.parameters()), "momentum": 0.9}],
        lr=LR,
        momentum=0.0,
        topology="one-peer-hypercube",
        process_group=process_group,
    )
    return repr(optimizer.algorithm)


@scenarios.run(groups_momentum)
def test_a_stable_form_is_chosen_for_the_largest_momentum_of_all_groups(results: list[str]) -> None:
    for found in results:
        assert found.startswith("SteadyDecentLaM(beta=0.9"), found


def group_of_another(process_group: Group) -> list[int]:
    """A param group that comes from another optimizer, with its own count of steps."""
    node, model, optimizer = start(process_group, "dmsgd")
    train(optimizer, model, node, range(3))
    more = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [("more", more)], "step": 7, "previous_lr": 1.0})
    return [group["step"] for group in optimizer.param_groups]


@scenarios.run(group_of_another)
def test_groups_of_one_optimizer_are_at_one_step(results: list[list[int]]) -> None:
    assert results == [[3, 3]] * N


def test_a_param_group_that_is_refused_leaves_nothing_behind() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).cfloat())
    optimizer = decentlam.DecentLaM([first], lr=0.1)
    with pytest.raises(ValueError, match="complex"):
        optimizer.add_param_group({"params": [second]})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]
    first.sum().backward()
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((2,), 0.9))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        (decentlam.PmSGD, {"lars": False}),
        (decentlam.DSGD, {"momentum": 0.9}),
        (decentlam.SlowMo, {"tau": 3}),
        (decentlam.DecentLaM, {"maximize": True}),
        (decentlam.DecentLaM, {"dampening": 0.1}),
    ],
)
def test_what_a_group_cannot_set_for_itself_is_refused(method: Any, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=f"a param group sets {name}, .* may set lr, weight_decay"):
        method([{"params": [nn.Parameter(torch.ones(2))], **given}], lr=0.1)


@pytest.mark.parametrize(("method", "momentum"), [(decentlam.DecentLaM, 0.9), (decentlam.DSGD, 0)])
def test_what_torchs_sgd_writes_into_its_groups_is_taken(method: Any, momentum: float) -> None:
    groups = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=momentum).param_groups
    assert method(groups, lr=0.2).param_groups[0]["lr"] == 0.1
