"""Nodes that mean different runs are told so; averaging, merging and statistics of a step."""

from __future__ import annotations

import tempfile

import pytest
import runs
import runs_evaluation
import torch
from runs import Scenarios, same

N = 4
scenarios = Scenarios(N)


# Construction -----------------------------------------------------------------------------------

DISAGREEMENTS = {
    "shape": "(4,)",
    "dtype": "torch.float32",
    "frozen shape": "(300,)",
    "frozen": "",
    "name": "extra",
    "one more": "",
    "lr": "0.7",
    "momentum": "0.123",
    "topology": "star",
    "seed": "bipartite-random-match",
    "algorithm": "DADmSGD",
    "bucket_bytes": "1000000",
    "overlap": "overlap = 'none'",
    "processes_per_node": "processes_per_node = 2",
}
for what in DISAGREEMENTS:
    scenarios.add(f"disagree {what}", runs_evaluation.disagree, what=what)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_the_same_clear_error_everywhere(what: str) -> None:
    errors = scenarios.outcomes(f"disagree {what}")
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: the nodes do not agree on the run: process 2 has")
    assert DISAGREEMENTS[what] in errors[0]
    assert "process 1 has" not in errors[0] and "process 3 has" not in errors[0]


# Evaluation and statistics ----------------------------------------------------------------------

EVALUATED = ("decentlam", "awc-dmsgd", "slowmo")
for method in EVALUATED:
    scenarios.add(f"evaluate {method}", runs_evaluation.evaluate, method=method, overlap=True)
    scenarios.add(
        f"evaluate {method} later", runs_evaluation.evaluate, method=method, overlap=False
    )


scenarios.add("different calls", runs_evaluation.different_calls, directory="never written")


def test_who_makes_another_call_than_the_others_is_told_so() -> None:
    """What one process sends in one call must not become a number in another's."""
    for errors, distance in scenarios.outcomes("different calls"):
        for error in errors:
            assert error.startswith("RuntimeError: all processes must make this call together")
            assert "processes [0] " in error and "[1, 2, 3] " in error, error
        assert "[1, 2, 3] measure the consensus distance" in errors[0]
        assert "numbers); [1, 2, 3] average the model (" in errors[1]
        assert distance == 0.0  # and goes on: they start equal


@pytest.mark.parametrize("method", EVALUATED)
def test_averaged_is_the_mean_inside_and_the_own_model_outside(method: str) -> None:
    results = scenarios.outcomes(f"evaluate {method}")
    for values in zip(
        *(r["before"] for r in results), *(r["inside"] for r in results), strict=True
    ):
        before, inside = torch.stack(values[:N]), values[N:]
        assert all(torch.equal(x, inside[0]) for x in inside)
        if before.is_floating_point():  # else a counter, which every node keeps
            assert (inside[0] - before.mean(0)).abs().max() < 1e-14
    for r in results:
        assert same(r["before"], r["after"]) and same(r["before"], r["after exception"])
        assert "between backward and step" in r["too late"]
    # Statistics of the data (0 to 3 apart) must differ, or the test would show nothing.
    assert not same(results[0]["before"], results[1]["before"])


def test_averaged_without_a_model_leaves_buffers_alone() -> None:
    for r in scenarios.outcomes("evaluate decentlam"):
        changed = [
            not torch.equal(a, b) for a, b in zip(r["before"], r["without model"], strict=True)
        ]
        del changed[1]  # a bias before the batch norm: but for rounding it has no gradient
        assert changed == [True] * 3 + [False] * 3 + [True] * 2  # 3 buffers of the batch norm


@pytest.mark.parametrize("method", EVALUATED)
def test_merge_and_consensus_distance(method: str) -> None:
    results = scenarios.outcomes(f"evaluate {method}")
    x = torch.stack([r["before merge"] for r in results])
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()
    assert distance > 1e-3
    for r in results:
        assert r["distance"] == pytest.approx(distance, rel=1e-12)
        assert (r["merged"] - x.mean(0)).abs().max() < 1e-14
        assert torch.equal(r["merged"], results[0]["merged"])
        assert r["merged distance"] < 1e-14
        assert same(r["merged buffers"][:2], results[0]["merged buffers"][:2])


@pytest.mark.parametrize("method", EVALUATED)
def test_step_after_merge_starts_from_the_merged_model(method: str) -> None:
    """Not from a message that left before, as AWC's does: without overlap there is none."""
    later = scenarios.outcomes(f"evaluate {method} later")
    for ours, theirs in zip(scenarios.outcomes(f"evaluate {method}"), later, strict=True):
        assert torch.equal(ours["merged"], theirs["merged"])
        assert torch.equal(ours["step after merge"], theirs["step after merge"])


# eval() and train() -----------------------------------------------------------------------------

MODES = [("decentlam", "none"), ("decentlam", "forward"), ("awc-dmsgd", "backward")]
for method, overlap in MODES:
    scenarios.add(
        f"eval {method} {overlap}",
        runs_evaluation.eval_and_train,
        method=method,
        overlap=overlap,
        directory=f"{tempfile.mkdtemp()}/checkpoint",
    )


@pytest.mark.parametrize(("method", "overlap"), MODES)
def test_between_eval_and_train_every_node_is_the_mean(method: str, overlap: str) -> None:
    results = scenarios.outcomes(f"eval {method} {overlap}")
    for values in zip(*(r["before"] for r in results), results[0]["inside"], strict=True):
        own, mean = torch.stack(values[:N]), values[N]
        if own.is_floating_point():
            assert (mean - own.mean(0)).abs().max() < 1e-14
    for r in results:
        assert same(r["inside"], results[0]["inside"]) and same(r["inside"], r["after saving"])
        assert same(r["before"], r["after"])
        for what, error in r["refused"].items():
            assert "Call optimizer.train() on every process first" in error, what
    assert not same(results[0]["before"], results[1]["before"])


@pytest.mark.parametrize(("method", "overlap"), MODES)
def test_a_checkpoint_between_eval_and_train_is_of_each_nodes_own(
    method: str, overlap: str
) -> None:
    for r in scenarios.outcomes(f"eval {method} {overlap}"):
        assert same(r["before"], r["loaded"]) and same(r["end"], r["resumed"])


# Statistics -------------------------------------------------------------------------------------

SIZE = 8 * sum(torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES)  # bytes
SENT = [
    ("decentlam", "ring", True, [2 * SIZE] * 4),
    ("decentlam", "ring", False, [2 * SIZE] * 4),
    ("dmsgd", "one-peer-exponential", True, [SIZE] * 4),
    ("da-dmsgd", "one-peer-exponential", True, [2 * SIZE] * 4),
    ("awc-dmsgd", "one-peer-symmetric-exponential", True, [SIZE] * 4),
    ("pmsgd", "ring", True, [SIZE * 3 // 2] * 4),
    ("slowmo", "ring", True, [2 * SIZE, 2 * SIZE, SIZE * 3 // 2, 2 * SIZE]),
]
for method, topology, overlap, _ in SENT:
    scenarios.add(
        f"statistics {method} {overlap}",
        runs_evaluation.statistics,
        method=method,
        topology=topology,
        overlap=overlap,
    )


scenarios.add("slow neighbor", runs_evaluation.slow_neighbor)


@pytest.mark.parametrize(("method", "topology", "overlap", "sent"), SENT)
def test_statistics(method: str, topology: str, overlap: bool, sent: list[int]) -> None:
    for r in scenarios.outcomes(f"statistics {method} {overlap}"):
        assert r["sent"] == sent and r["total"] == sum(sent)
        assert r["step"] == 3 and not r["skipped"]
        assert 0 <= r["wait"] <= r["exchange"] and r["wait"] <= r["total wait"]
        assert 0 <= r["overlap"] <= 1


def test_waiting_for_a_slow_neighbor_is_counted() -> None:
    assert all(total >= wait > 0.2 for wait, total in scenarios.outcomes("slow neighbor"))
