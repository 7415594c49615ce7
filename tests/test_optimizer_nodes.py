"""Nodes of several processes: the simulator's step on the mean gradient of each node's processes.

The scenarios with 4 processes make 2 nodes of 2 (or one of 4), those with 8 make 4 of 2. Bucket
sizes are odd in part, so that the parts of a bucket are padded.
"""

from __future__ import annotations

from typing import Any

import pytest
import runs
import runs_deaths
import runs_models
import runs_nodes as nodes
import runs_steps
import torch
from torch import Tensor

SCENARIOS = {processes: runs.Scenarios(processes) for processes in (4, 8)}


def scenario(name: str, function: Any, **arguments: Any) -> None:
    """The name begins with the number of processes."""
    SCENARIOS[int(name.split()[0])].add(name, function, **arguments)


def outcomes(name: str) -> list[Any]:
    return SCENARIOS[int(name.split()[0])].outcomes(name)


def assert_equal(rows: list[list[Tensor]], expected: list[Tensor], per_node: int) -> None:
    assert nodes.replicas_equal(rows, per_node)
    for step, x in enumerate(expected):
        real = torch.stack([row[step] for row in rows[::per_node]])
        assert (real - x).abs().max() < 1e-12, f"step {step}"


# Parity -----------------------------------------------------------------------------------------

METHODS = {
    "decentlam": "ring",
    "dmsgd": "one-peer-exponential",
    "da-dmsgd": "ring",
    "awc-dmsgd": "ring",
    "slowmo": "bipartite-random-match",
    "qg-dmsgd": "one-peer-exponential",
    "d2-dmsgd": "ring",
    "pmsgd": "ring",
}
# Methods that differ in kind; the others are slow where they only repeat what one of these shows.
KINDS = ("decentlam", "awc-dmsgd", "slowmo", "pmsgd")
PARITY = [
    *((4, 2, method, topology, True) for method, topology in METHODS.items()),
    *((4, 2, method, topology, False) for method, topology in METHODS.items()),
    *((4, 2, method, "ring", "forward") for method in KINDS),
    (4, 4, "decentlam", "ring", True),  # one node of four processes
    (4, 4, "slowmo", "ring", False),
    *((8, 2, m, t, i % 2 == 0) for i, (m, t) in enumerate(METHODS.items())),
]


def is_slow(processes: int, method: str, overlap: bool | str) -> bool:
    return method not in KINDS and not (processes == 4 and overlap is True)


def parity_name(processes: int, per_node: int, method: str, overlap: bool) -> str:
    return f"{processes} in nodes of {per_node}: {method} {overlap}"


for processes, per_node, method, topology, overlap in PARITY:
    scenario(
        parity_name(processes, per_node, method, overlap),
        nodes.trajectory,
        slow=is_slow(processes, method, overlap),
        method=method,
        topology=topology,
        overlap=overlap,
        processes_per_node=per_node,
    )


@pytest.mark.parametrize(
    ("processes", "per_node", "method", "topology", "overlap"),
    [runs.slow_if(is_slow(case[0], case[2], case[4]), *case) for case in PARITY],
)
def test_nodes_equal_simulator_with_mean_gradients(
    processes: int, per_node: int, method: str, topology: str, overlap: bool
) -> None:
    expected = runs_steps.simulate(
        "dmsgd" if processes == per_node else method,  # one node runs momentum SGD
        processes // per_node,
        runs.STEPS,
        loss=nodes.node_loss(per_node),
        topology=topology,
        lr=runs.lr_at,
    )
    rows = outcomes(parity_name(processes, per_node, method, overlap))
    assert_equal(rows, expected, per_node)


# Clipping, accumulation, branches, bad gradients ------------------------------------------------

for processes in (4, 8):
    scenario(
        f"{processes} clip",
        nodes.trajectory,
        method="decentlam",
        overlap=False,
        max_grad_norm=2.0,
        processes_per_node=2,
    )
scenario(
    "4 clip pmsgd",
    nodes.trajectory,
    method="pmsgd",
    overlap=False,
    max_grad_norm=2.0,
    processes_per_node=2,
)


@pytest.mark.parametrize("processes", [4, 8])
def test_the_mean_gradient_of_the_node_is_clipped(processes: int) -> None:
    expected = runs_steps.simulate(
        "decentlam",
        processes // 2,
        runs.STEPS,
        loss=nodes.node_loss(2),
        change=runs_steps.clipped(2.0),
        lr=runs.lr_at,
    )
    assert_equal(outcomes(f"{processes} clip"), expected, 2)


def test_pmsgd_takes_every_process_for_a_node() -> None:
    """It averages exactly over all, so nodes make no difference, except to what is clipped."""
    expected = runs_steps.simulate(
        "pmsgd", 4, runs.STEPS, change=runs_steps.clipped(2.0), lr=runs.lr_at
    )
    assert_equal(outcomes("4 clip pmsgd"), expected, 1)


for overlap in (True, False):
    scenario(f"4 accumulate {overlap}", nodes.accumulate, overlap=overlap, per_node=2)
    for method in ("decentlam", "slowmo"):
        name = f"4 branches {method} {overlap}"
        scenario(name, nodes.branches, method=method, overlap=overlap, per_node=2)


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_accumulate_in_every_process(overlap: bool) -> None:
    loss = nodes.node_loss(2, nodes.two_batches)
    expected = runs_steps.simulate("decentlam", 2, 5, loss=loss)
    assert_equal(outcomes(f"4 accumulate {overlap}"), expected, 2)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method", ["decentlam", "slowmo"])
def test_processes_of_a_node_may_take_different_branches(method: str, overlap: bool) -> None:
    loss = nodes.node_loss(2, runs_models.branches_loss)
    expected = runs_steps.simulate(method, 2, 8, model=runs_models.Branches, loss=loss)
    assert_equal(outcomes(f"4 branches {method} {overlap}"), expected, 2)


for how in ("nan", "scaler"):
    scenario(f"4 bad {how}", nodes.bad_gradient, per_node=2, how=how)
RAISING = [("decentlam", True), ("decentlam", False), ("awc-dmsgd", True)]
for method, overlap in RAISING:
    scenario(
        f"4 raises {method} {overlap}",
        nodes.bad_gradient_raises,
        method=method,
        overlap=overlap,
        per_node=2,
    )
for method in ("decentlam", "awc-dmsgd"):
    scenario(f"4 stale {method}", nodes.stale, method=method, per_node=2)


@pytest.mark.parametrize("how", ["nan", "scaler"])
def test_node_skips_if_one_of_its_processes_must(how: str) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 1 and step == 2

    results = outcomes(f"4 bad {how}")
    expected = runs_steps.simulate("decentlam", 2, 5, loss=nodes.node_loss(2), absent=absent)
    assert_equal([rows for rows, _ in results], expected, 2)
    for rank, (_, skipped) in enumerate(results):
        assert skipped == [absent(rank // 2, step) for step in range(5)]


@pytest.mark.parametrize(("method", "overlap"), RAISING)
def test_bad_gradient_of_one_process_stops_its_node(method: str, overlap: bool) -> None:
    errors = outcomes(f"4 raises {method} {overlap}")
    for rank, error in enumerate(errors):
        assert error.startswith(("NonFiniteError: node 1, step 2: weights.1", "ExchangeError"))
        if rank < 2:
            assert error.startswith("ExchangeError")
    assert any(error.startswith("NonFiniteError") for error in errors[2:])


@pytest.mark.parametrize("method", ["decentlam", "awc-dmsgd"])
def test_gradient_changed_after_its_sum_began_is_refused(method: str) -> None:
    for error in outcomes(f"4 stale {method}"):
        assert error.startswith("StaleMessageError") and "max_grad_norm" in error


# State, evaluation ------------------------------------------------------------------------------

for method in ("decentlam", "awc-dmsgd"):
    scenario(f"4 large {method}", runs_models.large, method=method, per_node=2)


@pytest.mark.parametrize("method", ["decentlam", "awc-dmsgd"])
def test_parameters_larger_than_one_piece(method: str) -> None:
    loss = nodes.node_loss(2, runs_models.large_loss)
    expected = runs_steps.simulate(method, 2, 4, model=runs_models.Large, loss=loss)
    assert_equal(outcomes(f"4 large {method}"), expected, 2)


RESUMED = ("decentlam", "awc-dmsgd", "slowmo")
for method in RESUMED:
    scenario(f"4 resume {method}", nodes.resume, method=method, per_node=2)
    scenario(f"4 late {method}", nodes.late_group, method=method, per_node=2)
for processes in (4, 8):
    scenario(f"{processes} evaluate", nodes.evaluate, per_node=2)


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    for whole, resumed in outcomes(f"4 resume {method}"):
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("method", RESUMED)
def test_group_added_mid_run(method: str) -> None:
    rows = outcomes(f"4 late {method}")
    expected = nodes.simulate_late_group(method, 2, 2)
    assert_equal([row[3:] for row in rows], expected[3:], 2)


@pytest.mark.parametrize("processes", [4, 8])
def test_evaluation_counts_nodes(processes: int) -> None:
    results = outcomes(f"{processes} evaluate")
    x = torch.stack([r["own"] for r in results[::2]])
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()
    half = 8 * sum(-(-torch.Size(s).numel() // 2) for s in runs.Quadratic.SHAPES)  # padded parts
    for r in results:
        assert (r["inside"] - x.mean(0)).abs().max() < 1e-14
        assert torch.equal(r["after"], r["own"])
        assert torch.equal(r["inside"], r["merged"])
        assert torch.equal(r["inside"], results[0]["inside"])
        assert r["distance"] == pytest.approx(distance, rel=1e-12)
        assert r["sent"] == half * (1 if processes == 4 else 2)
        assert "ValueError: Join works with one process per node" in r["join"]


@pytest.mark.parametrize("overlap", [True, False])
def test_death_of_a_process_is_an_error_in_its_node_and_beyond(overlap: bool) -> None:
    arguments = ("decentlam", overlap, "before backward", "dies", runs_deaths.NEVER, 2)
    results = runs.run_processes(runs_deaths.with_victim, 4, arguments)
    assert results[runs_deaths.VICTIM] == 7
    assert "node 1, step 3, " in results[3][0] and "another process of its node" in results[3][0]
    for rank in (0, 1, 3):
        assert results[rank][0].startswith(f"ExchangeError: node {rank // 2}, step "), results
