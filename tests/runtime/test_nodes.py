"""Nodes of several processes: what is done to the mean gradient of each node's processes.

Bucket sizes are odd in part, so that the parts of a bucket are padded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import decentlam
from tests.helpers.models import Branches, branches_loss, trained
from tests.helpers.nodes import bad_gradient
from tests.helpers.processes import Group, Scenarios, every, message_of, spoiled
from tests.helpers.quadratic import (
    LR,
    Quadratic,
    assert_equal,
    build,
    clipped,
    flat,
    node_loss,
    quadratic_loss,
    same,
    simulate,
    start,
    train,
)

scenarios = Scenarios(4)


def branches(process_group: Group, method: str, overlap: bool) -> list[Tensor]:
    """Processes of one node take different branches, and talk between backward and step()."""
    rank = dist.get_rank(process_group)
    model = Branches(seed=rank)
    optimizer = build(method, model, process_group, overlap=overlap, processes_per_node=2)
    rows = []
    for step in range(8):
        optimizer.zero_grad()
        branches_loss(model, rank, step).backward()
        dist.all_reduce(torch.ones(1), group=process_group)
        optimizer.step()
        rows.append(trained(model))
    return rows


@scenarios.run(
    branches, [{"method": "decentlam", "overlap": True}, {"method": "slowmo", "overlap": False}]
)
def test_processes_of_a_node_may_take_different_branches(results: Any, method: str) -> None:
    expected = simulate(method, 2, 8, model=Branches, loss=node_loss(2, branches_loss))
    assert_equal(results, expected)


def accumulate(process_group: Group, overlap: bool) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = build("decentlam", model, process_group, overlap=overlap, processes_per_node=2)
    rows = []
    for step in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            quadratic_loss(model, rank, step).backward()
        quadratic_loss(model, rank, step + 1).backward()
        optimizer.step()
        rows.append(flat(model))
    return rows


def two_batches(model: nn.Module, rank: int, step: int) -> Tensor:
    return quadratic_loss(model, rank, step) + quadratic_loss(model, rank, step + 1)


@scenarios.run(accumulate, every(overlap=(True, False)))
def test_gradients_accumulate_in_every_process(results: Any) -> None:
    assert_equal(results, simulate("decentlam", 2, 5, loss=node_loss(2, two_batches)))


def bad_gradient_raises(process_group: Group, method: str, overlap: bool) -> str:
    """The gradient of process 3 alone turns bad at step 2."""
    rank = dist.get_rank(process_group)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        bad = torch.nan if rank == 3 and step == 2 else 0.0
        return quadratic_loss(model, rank, step) + bad * model.weights[1].sum()

    def attempt(process_group: Group, seconds: float) -> tuple[str, bool]:
        options = {"processes_per_node": 2, "timeout_seconds": seconds}
        model = Quadratic(seed=rank)
        optimizer = build(method, model, process_group, overlap=overlap, **options)
        steps = lambda: train(optimizer, model, rank, range(5), loss)  # noqa: E731
        return message_of(steps), True

    return spoiled(process_group, attempt, step=2)[0]


@scenarios.run(
    bad_gradient_raises,
    [{"method": "decentlam", "overlap": False}, {"method": "awc-dmsgd", "overlap": True}],
)
def test_bad_gradient_of_one_process_stops_its_node(errors: list[str]) -> None:
    for rank, error in enumerate(errors):
        assert error.startswith(("NonFiniteError: node 1, step 2: weights.1", "ExchangeError"))
        if rank < 2:
            assert error.startswith("ExchangeError")
    assert any(error.startswith("NonFiniteError") for error in errors[2:])


@scenarios.run(bad_gradient, every(how=("nan", "scaler"), per_node=[2]))
def test_node_skips_if_one_of_its_processes_must(results: list[Any]) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 1 and step == 2

    expected = simulate("decentlam", 2, 5, loss=node_loss(2), absent=absent)
    assert_equal([rows for rows, _ in results], expected)
    for rank, (_, skipped) in enumerate(results):
        assert skipped == [absent(rank // 2, step) for step in range(5)]


def resume(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor]]:
    rank = dist.get_rank(process_group)

    def begin() -> tuple[Quadratic, Any]:
        model = Quadratic(seed=rank)
        return model, build(method, model, process_group, processes_per_node=2)

    model, optimizer = begin()
    whole = train(optimizer, model, rank, range(3))
    saved = [
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v, optimizer.state_dict()
        ),
    ]
    whole += train(optimizer, model, rank, range(3, 6))
    model, optimizer = begin()
    train(optimizer, model, rank, range(2))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return whole[3:], train(optimizer, model, rank, range(3, 6))


@scenarios.run(resume, every(method=("decentlam", "slowmo")))
def test_resumed_run_is_the_same_to_the_bit(results: list[Any]) -> None:
    for whole, resumed in results:
        assert same(whole, resumed)


def evaluate(process_group: Group) -> dict[str, Any]:
    rank = dist.get_rank(process_group)
    model = Quadratic(seed=rank)
    optimizer = build("decentlam", model, process_group, processes_per_node=2, topology="ring")
    train(optimizer, model, rank, range(3))
    own = flat(model)
    with optimizer.averaged(model):
        inside = flat(model)
    result = {
        "own": own,
        "inside": inside,
        "after": flat(model),
        "distance": optimizer.consensus_distance(),
        "sent": optimizer.statistics.bytes_sent,
        "join": message_of(lambda: Join([optimizer])),
    }
    optimizer.merge(model)
    return {**result, "merged": flat(model)}


@scenarios.run(evaluate)
def test_evaluation_counts_nodes(results: list[dict[str, Any]]) -> None:
    x = torch.stack([r["own"] for r in results[::2]])
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()
    for r in results:
        assert (r["inside"] - x.mean(0)).abs().max() < 1e-14
        assert torch.equal(r["after"], r["own"])
        assert torch.equal(r["inside"], r["merged"])
        assert torch.equal(r["inside"], results[0]["inside"])
        assert r["distance"] == pytest.approx(distance, rel=1e-12)
        assert r["sent"] == 8 * sum(-(-size // 2) for size in Quadratic.SIZES)  # padded parts
        assert "ValueError: Join works with one process per node" in r["join"]


def layerwise_parts(process_group: Group) -> str:
    class Layerwise(decentlam.algorithms.DmSGD):
        layerwise = True  # type: ignore[assignment]

    parameters = Quadratic().parameters()
    return message_of(
        lambda: decentlam.DecentralizedOptimizer(
            parameters, Layerwise(), LR, processes_per_node=2, process_group=process_group
        )
    )


@scenarios.run(layerwise_parts)
def test_whole_layers_are_not_given_to_nodes_of_several_processes(errors: list[str]) -> None:
    for error in errors:
        assert error.startswith("ValueError") and "processes_per_node=1" in error, error


def clip(process_group: Group, method: str) -> list[Tensor]:
    options = {"overlap": False, "max_grad_norm": 2.0, "processes_per_node": 2}
    rank, model, optimizer = start(process_group, method, **options)
    return train(optimizer, model, rank, range(6))


@scenarios.run(clip, every(method=("decentlam", "pmsgd")))
def test_the_mean_gradient_of_the_node_is_clipped(results: Any, method: str) -> None:
    """PmSGD averages exactly over all, so that every process is a node."""
    nodes = 4 if method == "pmsgd" else 2
    expected = simulate(method, nodes, 6, loss=node_loss(4 // nodes), change=clipped(2.0))
    assert_equal(results, expected)


def one_node(process_group: Group, method: str) -> list[Tensor]:
    rank, model, optimizer = start(process_group, method, processes_per_node=4)
    return train(optimizer, model, rank, range(6))


@scenarios.run(one_node, every(method=("decentlam", "slowmo")))
def test_one_node_of_all_processes_is_momentum_sgd(results: Any) -> None:
    assert_equal(results, simulate("pmsgd", 1, 6, loss=node_loss(4)))
