"""The hard parts of the runtime on four real processes: one group runs every scenario below."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import runs
import runs_hard as hard
import torch
from torch import Tensor

import decentlam

pytestmark = pytest.mark.timeout(300)

N = 4
SCENARIOS: dict[str, tuple[Any, dict[str, Any]]] = {}


def scenario(name: str, function: Any, **arguments: Any) -> str:
    SCENARIOS[name] = (function, arguments)
    return name


@cache
def everyone() -> list[dict[str, Any]]:
    listed = [(name, *what) for name, what in SCENARIOS.items()]
    return runs.run_processes(runs.run_scenarios, N, (listed, True), seconds=250)


def outcomes(name: str) -> list[Any]:
    return runs.outcomes(everyone(), name)


def assert_equal(trajectories: list[list[Tensor]], expected: list[Tensor]) -> None:
    for step, x in enumerate(expected):
        real = torch.stack([trajectory[step] for trajectory in trajectories])
        assert (real - x).abs().max() < 1e-12, f"step {step}"


# The first optimizer of a process is where its messages could be taken for the script's own.
scenario("chatter", hard.branches, method="decentlam", overlap=True, chatter=True)


def test_messages_of_the_script_are_not_mixed_up_with_ours() -> None:
    expected = hard.simulate("decentlam", N, 8, model=hard.Branches, loss=hard.branches_loss)
    assert_equal(outcomes("chatter"), expected)


# Something changes between backward and step() --------------------------------------------------

CHANGES = {
    "clip": "max_grad_norm=",
    "lr": "overlap=False",
    "momentum": "overlap=False",
    "weight decay": "overlap=False",
    "zero_grad": "overlap=False",
    "new gradient": "overlap=False",
    "parameter": "between step() and backward",
    "second backward": "no_sync",
}
for change in CHANGES:
    scenario(f"stale {change}", hard.stale, what=change)
scenario("stale PmSGD", hard.stale, what="clip", method="pmsgd")


@pytest.mark.parametrize("change", CHANGES)
def test_stale_message_is_refused_with_the_cure(change: str) -> None:
    for error in outcomes(f"stale {change}"):
        assert error.startswith("StaleMessageError"), error
        assert CHANGES[change] in error


def test_stale_gradient_of_an_all_reduce_is_refused() -> None:
    assert all(error.startswith("StaleMessageError") for error in outcomes("stale PmSGD"))


def test_changed_lr_is_named_with_both_values() -> None:
    for error in outcomes("stale lr"):
        assert "'lr': 0.05" in error and "'lr': 0.01" in error


def test_second_backward_is_named_by_parameter() -> None:
    assert all("weights." in error for error in outcomes("stale second backward"))


scenario("awc changes", hard.awc_may_change_gradient_and_lr)
scenario("awc parameter", hard.awc_parameter_changed_after_step)


def test_awc_may_clip_and_change_lr_after_backward() -> None:
    expected = hard.simulate(
        "awc-dmsgd", N, 6, change=hard.clipped(2.0), lr=lambda step: hard.LR / (1 + step)
    )
    assert_equal(outcomes("awc changes"), expected)


def test_awc_refuses_parameters_changed_while_its_message_travels() -> None:
    assert all(error.startswith("StaleMessageError") for error in outcomes("awc parameter"))


# Clipping, scaling, non-finite gradients --------------------------------------------------------

for how in ("built in", "by hand"):
    scenario(f"clip {how}", hard.clip, how=how)


@pytest.mark.parametrize("how", ["built in", "by hand"])
def test_clipping_equals_simulator_with_clipped_gradients(how: str) -> None:
    assert_equal(
        outcomes(f"clip {how}"), hard.simulate("decentlam", N, 6, change=hard.clipped(2.0))
    )


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"nonfinite": "skip"}])
def test_what_needs_the_whole_gradient_is_refused_with_overlap(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overlap=False"):
        decentlam.DecentLaM(runs.Quadratic().parameters(), lr=0.1, overlap=True, **option)


SCALED = ("decentlam", "awc-dmsgd", "pmsgd", "slowmo")
for method in SCALED:
    scenario(f"scaler {method}", hard.scaler, method=method)
scenario("scaler unscaled", hard.scaler, method="decentlam", unscale=True)
scenario("scaler overlap", hard.scaler_with_overlap)


def overflowed(node: int, step: int) -> bool:
    return node == 1 and step == 2


@pytest.mark.parametrize("method", SCALED)
def test_node_whose_gradient_overflows_answers_with_gradient_zero(method: str) -> None:
    results = outcomes(f"scaler {method}")
    expected = hard.simulate(method, N, 6, absent=overflowed)
    assert_equal([trajectory for trajectory, _, _ in results], expected)
    for node, (_, skipped, scale) in enumerate(results):
        assert skipped == [overflowed(node, step) for step in range(6)]
        assert scale == (2.0**9 if node == 1 else 2.0**10)


def test_scaler_may_unscale_first() -> None:
    results = outcomes("scaler unscaled")
    expected = hard.simulate("decentlam", N, 6, absent=overflowed, change=hard.clipped(2.0))
    assert_equal([trajectory for trajectory, _, _ in results], expected)


def test_scaler_with_overlap_is_refused_with_the_cure() -> None:
    for error in outcomes("scaler overlap"):
        assert error.startswith("StaleMessageError: GradScaler with overlap=True")
        assert "overlap=False" in error and "bfloat16" in error


for overlap in (True, False):
    scenario(f"autocast {overlap}", hard.autocast, overlap=overlap)
scenario("dtypes", hard.mixed_dtypes)


def test_bfloat16_autocast_trains_float32_parameters() -> None:
    for ours, theirs in zip(outcomes("autocast True"), outcomes("autocast False"), strict=True):
        x, losses, dtypes = ours
        assert torch.equal(x, theirs[0])
        assert losses[-1] < 0.5 * losses[0]
        assert set(dtypes) == {"torch.float32"}


def test_parameters_of_several_dtypes_train_together() -> None:
    for dtypes, first, last in outcomes("dtypes"):
        assert dtypes == ["torch.float32", "torch.float64", "torch.bfloat16", "torch.float32"]
        assert last < 0.05 * first


RAISING = [
    ("decentlam", True, torch.nan),
    ("decentlam", False, torch.inf),
    ("awc-dmsgd", True, torch.nan),
    ("awc-dmsgd", False, -torch.inf),
    ("da-dmsgd", True, torch.inf),
    ("pmsgd", True, torch.nan),
    ("slowmo", True, torch.nan),
]
for method, overlap, value in RAISING:
    scenario(
        f"nonfinite {method} {overlap}",
        hard.nonfinite_raises,
        method=method,
        overlap=overlap,
        value=value,
    )


@pytest.mark.parametrize(("method", "overlap", "value"), RAISING)
def test_nonfinite_gradient_stops_at_its_node(method: str, overlap: bool, value: float) -> None:
    for node, (error, finite) in enumerate(outcomes(f"nonfinite {method} {overlap}")):
        assert finite
        if node == 2:
            assert error.startswith("NonFiniteError: node 2, step 3: weights.1 became"), error
        else:
            assert error.startswith("ExchangeError"), error
            # Who does not talk to node 2 goes on a little; AWC's messages are a step ahead.
            assert any(f"step {step}, " in error for step in (3, 4, 5))


SKIPPING = ("decentlam", "awc-dmsgd", "dmsgd", "pmsgd", "d2-dmsgd")
for method in SKIPPING:
    scenario(f"skip {method}", hard.nonfinite_skips, method=method)


@pytest.mark.parametrize("method", SKIPPING)
def test_nonfinite_gradient_can_be_left_out(method: str) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 1 and step in (2, 4)

    results = outcomes(f"skip {method}")
    expected = hard.simulate(method, N, 6, absent=absent)
    assert_equal([trajectory for trajectory, _ in results], expected)
    for node, (_, skipped) in enumerate(results):
        assert skipped == [absent(node, step) for step in range(6)]


for method in ("awc-dmsgd", "dmsgd"):
    scenario(f"overflow {method}", hard.parameters_overflow, method=method)


@pytest.mark.parametrize("method", ["awc-dmsgd", "dmsgd"])
def test_parameters_that_overflow_are_not_sent(method: str) -> None:
    for error in outcomes(f"overflow {method}"):
        assert error.startswith(("NonFiniteError", "ExchangeError")), error
    assert any(error.startswith("NonFiniteError") for error in outcomes(f"overflow {method}"))


# Accumulation, uneven batches -------------------------------------------------------------------

for overlap in (True, False):
    scenario(f"accumulate {overlap}", hard.accumulate, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulated_gradients_equal_one_large_batch(overlap: bool) -> None:
    expected = hard.simulate("decentlam", N, 5, loss=hard.accumulated_loss)
    assert_equal(outcomes(f"accumulate {overlap}"), expected)


JOINING = [
    ("decentlam", True),
    ("decentlam", False),
    ("awc-dmsgd", True),
    ("awc-dmsgd", False),
    ("pmsgd", True),
    ("pmsgd", False),
    ("slowmo", True),
]
for method, overlap in JOINING:
    scenario(f"join {method} {overlap}", hard.join, method=method, overlap=overlap)
scenario("join two", hard.join_two)
scenario("join throws", hard.join_throws)


@pytest.mark.parametrize(("method", "overlap"), JOINING)
def test_nodes_without_data_answer_with_gradient_zero(method: str, overlap: bool) -> None:
    expected = hard.simulate(method, N, 13, absent=hard.join_absent)
    trajectories = outcomes(f"join {method} {overlap}")
    assert [len(trajectory) for trajectory in trajectories] == [13] * N
    assert_equal(trajectories, expected)


def test_two_optimizers_join_together() -> None:
    def absent(node: int, step: int) -> bool:
        return step >= hard.BATCHES[node]

    results = outcomes("join two")
    steps = max(hard.BATCHES)
    assert_equal(
        [first for first, _ in results], hard.simulate("decentlam", N, steps, absent=absent)[-1:]
    )
    second = hard.simulate("pmsgd", N, steps, absent=absent, model=lambda: runs.Quadratic(seed=1))
    assert_equal([second for _, second in results], second[-1:])


def test_join_can_stop_everybody_instead() -> None:
    assert all(error.startswith("RuntimeError") for error in outcomes("join throws"))


# Models that do not use everything --------------------------------------------------------------

BRANCHING = [
    ("decentlam", True, False),
    ("decentlam", False, False),
    ("pmsgd", True, False),
    ("pmsgd", True, True),
    ("awc-dmsgd", True, True),
    ("da-dmsgd", True, False),
    ("slowmo", True, True),
]
for method, overlap, chatter in BRANCHING:
    scenario(
        f"branches {method} {overlap} {chatter}",
        hard.branches,
        method=method,
        overlap=overlap,
        chatter=chatter,
    )


@pytest.mark.parametrize(("method", "overlap", "chatter"), BRANCHING)
def test_branches_that_nodes_take_in_different_order(
    method: str, overlap: bool, chatter: bool
) -> None:
    """Tied, frozen, unused parameters too; with chatter the script sends messages of its own."""
    expected = hard.simulate(method, N, 8, model=hard.Branches, loss=hard.branches_loss)
    assert_equal(outcomes(f"branches {method} {overlap} {chatter}"), expected)


for first in ("front", "back"):
    scenario(f"disjoint {first}", hard.disjoint, first=first)
for reentrant in (True, False):
    scenario(f"checkpointed {reentrant}", hard.checkpointed, reentrant=reentrant)
LARGE = ("decentlam", "da-dmsgd", "awc-dmsgd", "d2-dmsgd", "slowmo", "pmsgd")
for method in LARGE:
    scenario(f"large {method}", hard.large, method=method)
scenario("no backward", hard.no_backward_at_all)
scenario("channels last", hard.channels_last)
scenario("aot", hard.compiled, backend="aot_eager")


@pytest.mark.parametrize("first", ["front", "back"])
def test_losses_over_different_parameters_need_no_no_sync(first: str) -> None:
    assert_equal(outcomes(f"disjoint {first}"), hard.simulate("decentlam", N, 5))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_in_backward(reentrant: bool) -> None:
    expected = hard.simulate("decentlam", N, 4, model=hard.mlp, loss=hard.mlp_loss)
    assert_equal(outcomes(f"checkpointed {reentrant}"), expected)


@pytest.mark.parametrize("method", LARGE)
def test_parameters_larger_than_one_piece(method: str) -> None:
    expected = hard.simulate(method, N, 4, model=hard.Large, loss=hard.large_loss)
    assert_equal(outcomes(f"large {method}"), expected)


def test_step_without_backward_is_a_zero_gradient() -> None:
    expected = hard.simulate(
        "dmsgd", N, 6, absent=lambda node, step: node == 1 and step % 2 == 1, weight_decay=0.0
    )
    assert_equal(outcomes("no backward"), expected)


def test_channels_last_convolutions() -> None:
    results = outcomes("channels last")
    expected = hard.simulate("decentlam", N, 4, model=hard.conv_model, loss=hard.conv_loss)
    assert_equal([trajectory for trajectory, _ in results], expected)
    assert all(kept for _, kept in results)


def test_compiled_model() -> None:
    expected = hard.simulate("decentlam", N, 5, model=hard.mlp, loss=hard.mlp_loss)
    assert_equal(outcomes("aot"), expected)


@pytest.mark.slow
def test_model_compiled_with_inductor() -> None:
    listed = [("inductor", hard.compiled, {"backend": "inductor"})]
    results = decentlam.launch(runs.run_scenarios, 2, (listed, True), timeout_seconds=280)
    expected = hard.simulate("decentlam", 2, 5, model=hard.mlp, loss=hard.mlp_loss)
    assert_equal(runs.outcomes(results, "inductor"), expected)


# Several optimizers -----------------------------------------------------------------------------

GANS = [
    (("decentlam", "decentlam"), True),
    (("pmsgd", "pmsgd"), True),
    (("awc-dmsgd", "dmsgd"), True),
    (("decentlam", "pmsgd"), False),
]
for methods, overlap in GANS:
    scenario(f"gan {methods} {overlap}", hard.gan, methods=methods, overlap=overlap)
for methods in (("decentlam", "dmsgd"), ("pmsgd", "pmsgd")):
    scenario(f"halves {methods}", hard.halves, methods=methods)
for alive in (True, False):
    scenario(f"replaced {alive}", hard.replaced, kept_alive=alive)
DROPPED = [("awc-dmsgd", "step"), ("awc-dmsgd", "backward"), ("decentlam", "backward")]
for method, after in DROPPED:
    scenario(f"dropped {method} {after}", hard.dropped, method=method, after=after)
scenario("subgroup", hard.subgroup)


@pytest.mark.parametrize(("methods", "overlap"), GANS)
def test_two_optimizers_in_turn(methods: tuple[str, str], overlap: bool) -> None:
    assert_equal(outcomes(f"gan {methods} {overlap}"), hard.simulate_gan(methods, N))


@pytest.mark.parametrize("methods", [("decentlam", "dmsgd"), ("pmsgd", "pmsgd")])
def test_two_optimizers_share_a_backward(methods: tuple[str, str]) -> None:
    """The quadratic is a sum over parameters: each half runs as if it were alone."""
    both = [hard.simulate(method, N, 5) for method in methods]
    front = sum(torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES[:2])
    expected = [torch.cat([a[:, :front], b[:, front:]], dim=1) for a, b in zip(*both, strict=True)]
    assert_equal(outcomes(f"halves {methods}"), expected)


@pytest.mark.parametrize("alive", [True, False])
def test_new_optimizer_takes_the_model_over(alive: bool) -> None:
    assert_equal(outcomes(f"replaced {alive}"), hard.simulate("decentlam", N, 5))


@pytest.mark.parametrize(("method", "after"), DROPPED)
def test_group_survives_an_optimizer_dropped_with_messages_under_way(
    method: str, after: str
) -> None:
    assert_equal(outcomes(f"dropped {method} {after}"), hard.simulate("dmsgd", N, 3))


def test_two_networks_side_by_side() -> None:
    results = outcomes("subgroup")
    expected = hard.simulate("decentlam", 2, 5)
    assert_equal(results[::2], expected)
    assert_equal(results[1::2], expected)


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
    "overlap": "overlap = False",
    "processes_per_node": "processes_per_node = 2",
}
for what in DISAGREEMENTS:
    scenario(f"disagree {what}", hard.disagree, what=what)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_disagreement_is_the_same_clear_error_everywhere(what: str) -> None:
    errors = outcomes(f"disagree {what}")
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: the nodes do not agree on the run: process 2 has")
    assert DISAGREEMENTS[what] in errors[0]
    assert "process 1 has" not in errors[0] and "process 3 has" not in errors[0]


# Evaluation and statistics ----------------------------------------------------------------------

EVALUATED = ("decentlam", "awc-dmsgd", "slowmo")
for method in EVALUATED:
    scenario(f"evaluate {method}", hard.evaluate, method=method, overlap=True)
    scenario(f"evaluate {method} later", hard.evaluate, method=method, overlap=False)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("method", EVALUATED)
def test_averaged_is_the_mean_inside_and_the_own_model_outside(method: str) -> None:
    results = outcomes(f"evaluate {method}")
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
    for r in outcomes("evaluate decentlam"):
        changed = [
            not torch.equal(a, b) for a, b in zip(r["before"], r["without model"], strict=True)
        ]
        assert changed == [True] * 4 + [False] * 3 + [True] * 2  # 3 buffers of the batch norm


@pytest.mark.parametrize("method", EVALUATED)
def test_merge_and_consensus_distance(method: str) -> None:
    results = outcomes(f"evaluate {method}")
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
    later = outcomes(f"evaluate {method} later")
    for ours, theirs in zip(outcomes(f"evaluate {method}"), later, strict=True):
        assert torch.equal(ours["merged"], theirs["merged"])
        assert torch.equal(ours["step after merge"], theirs["step after merge"])


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
    scenario(
        f"statistics {method} {overlap}",
        hard.statistics,
        method=method,
        topology=topology,
        overlap=overlap,
    )


@pytest.mark.parametrize(("method", "topology", "overlap", "sent"), SENT)
def test_statistics(method: str, topology: str, overlap: bool, sent: list[int]) -> None:
    for r in outcomes(f"statistics {method} {overlap}"):
        assert r["sent"] == sent and r["total"] == sum(sent)
        assert r["step"] == 3 and not r["skipped"]
        assert 0 <= r["wait"] <= r["exchange"] and r["wait"] <= r["total wait"]
        assert 0 <= r["overlap"] <= 1


def test_waiting_for_a_slow_neighbor_is_counted() -> None:
    results = outcomes("statistics decentlam False")
    assert results[0]["total wait"] > 0.2  # node 3 is its neighbor on the ring, 4 times 0.1 s late


# State, groups, networks that change mid-run ----------------------------------------------------

RESUMED = ("decentlam", "awc-dmsgd", "slowmo", "d2-dmsgd", "qg-dmsgd", "da-dmsgd", "pmsgd")
for method in RESUMED:
    scenario(f"resume {method}", hard.resume, method=method)
scenario("copied", hard.copied)
LATE = ("decentlam", "awc-dmsgd", "da-dmsgd", "pmsgd", "slowmo")
for method in LATE:
    scenario(f"late {method}", hard.late_group, method=method)


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    for whole, resumed in outcomes(f"resume {method}"):
        assert same(whole, resumed)


def test_deep_copy_runs_beside_the_original() -> None:
    for ours, theirs in outcomes("copied"):
        assert same(ours, theirs)


@pytest.mark.parametrize("method", LATE)
def test_group_added_mid_run(method: str) -> None:
    """What joins is equal on all nodes from then on, though each built it by itself."""
    results, expected = outcomes(f"late {method}"), hard.simulate_late_group(method, N)
    early = sum(torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES[:3])
    assert_equal(
        [[x[:early] for x in r[:3]] for r in results], [x[:, :early] for x in expected[:3]]
    )
    assert_equal([r[3:] for r in results], expected[3:])


for method in ("decentlam", "da-dmsgd"):
    scenario(f"groups {method}", hard.groups, method=method)


@pytest.mark.parametrize("method", ["decentlam", "da-dmsgd"])
def test_groups_have_their_own_lr_decay_and_momentum(method: str) -> None:
    assert_equal(outcomes(f"groups {method}"), hard.simulate_groups(method, N))


CHANGING = [("dmsgd", True), ("dmsgd", False), ("awc-dmsgd", True)]
for method, overlap in CHANGING:
    scenario(f"topology {method} {overlap}", hard.new_topology, method=method, overlap=overlap)
scenario("network", hard.new_network)
scenario("refused networks", hard.refused_networks)


@pytest.mark.parametrize(("method", "overlap"), CHANGING)
def test_topology_replaced_between_steps(method: str, overlap: bool) -> None:
    expected = hard.simulate(method, N, 8, before_step=hard.use_topology)
    assert_equal(outcomes(f"topology {method} {overlap}"), expected)


def test_survivors_go_on_in_a_smaller_network() -> None:
    results, four = outcomes("network"), hard.simulate("dmsgd", N, 3)
    assert_equal([r[:3] for r in results], four)
    assert_equal([r[3:] for r in results[:3]], hard.simulate_without_last("dmsgd", N, 3, 6))


def test_network_that_does_not_fit_is_refused() -> None:
    for errors in outcomes("refused networks"):
        assert "ValueError: DecentLaM needs symmetric weights" in errors["directed"]
        assert "ValueError: ring(5) is made for 5 nodes" in errors["wrong size"]
        assert "between backward and step()" in errors["between"]


# Neighbors that die or stop ---------------------------------------------------------------------

DEATHS = [
    ("decentlam", True, "before backward"),
    ("decentlam", True, "in backward"),
    ("decentlam", "forward", "before backward"),
    ("decentlam", "forward", "in backward"),
    ("dmsgd", False, "before step"),
    ("awc-dmsgd", True, "before backward"),
    ("pmsgd", True, "in backward"),
]


@pytest.mark.parametrize(("method", "overlap", "when"), DEATHS)
def test_death_of_a_node_is_an_error_that_names_it(
    method: str, overlap: bool | str, when: str
) -> None:
    """Within seconds, although the timeout is a minute: the connection is closed."""
    results = runs.run_processes(hard.with_victim, N, (method, overlap, when, 0.0, 60.0), 50)
    assert results[hard.VICTIM] == 7
    for node in (0, 1, 3):
        error, seconds = results[node]
        assert error.startswith(f"ExchangeError: node {node}, step "), error
        assert "bucket " in error and "died or stopped" in error
        assert seconds < 25
        if method != "pmsgd" and node != 0:  # its neighbors on the ring; all-reduce knows no peer
            assert "with node 2 failed" in error or f"with node {4 - node} failed" in error
    if method != "pmsgd":
        assert any("with node 2 failed" in results[node][0] for node in (1, 3))


@pytest.mark.parametrize("method", ["decentlam", "pmsgd"])
def test_node_that_stops_is_an_error_after_the_timeout(method: str) -> None:
    arguments = (method, True, "before backward", 5.0, 2.0)
    results = runs.run_processes(hard.with_victim, N, arguments, 50)
    for node, (error, seconds) in enumerate(results):
        assert error.startswith("ExchangeError"), error
        assert seconds < 25
        if node != hard.VICTIM:
            assert seconds > 1.5
    assert any("slower than 2 s" in error for error, _ in results)
