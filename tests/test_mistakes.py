"""Mistakes that would pass without a word are noticed, and what looks like one still works."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass

import pytest
import runs
import runs_mistakes as mistakes
import torch
from runs import Scenarios
from torch import nn

import decentlam
from decentlam.algorithms import Algorithm, Reach, Step, kernels, needs
from decentlam.exchange.network import Network, _backend
from decentlam.options import OptimizerOptions, Options
from decentlam.runtime.mistakes import EqualMessages
from decentlam.runtime.shard import Plan

N = 4
OVERLAPS = ("none", "backward", "forward")
MOVED = [
    *(("decentlam", overlap) for overlap in OVERLAPS),
    ("awc-dmsgd", "backward"),
]

scenarios = Scenarios(N)
for overlap in OVERLAPS:
    scenarios.add(f"ddp {overlap}", mistakes.in_ddp, overlap=overlap)
    scenarios.add(f"frozen {overlap}", mistakes.frozen, overlap=overlap)
for method in ("decentlam", "pmsgd", "slowmo"):
    scenarios.add(f"same {method}", mistakes.same_data, method=method, own=False)
    scenarios.add(f"own {method}", mistakes.same_data, method=method, own=True)
for method, overlap in MOVED:
    scenarios.add(f"moved {method} {overlap}", mistakes.moved, method=method, overlap=overlap)
scenarios.add("replaced", mistakes.replaced_in_flight)
scenarios.add("swapped aside", mistakes.swapped_aside)
for method in ("decentlam", "pmsgd", "slowmo"):
    scenarios.add(f"copied {method}", mistakes.copied_alone, method=method)
scenarios.add("layerwise", mistakes.layerwise_parts)
scenarios.add("restored", mistakes.restored)
scenarios.add("compiled", mistakes.compiled_in_place)
scenarios.add("auto", mistakes.modes_of_auto)
scenarios.add("averaged after a move", mistakes.averaged_after_a_move)
scenarios.add("state from x", mistakes.state_from_x)
directory = tempfile.TemporaryDirectory()
scenarios.add(
    "state after a checkpoint", mistakes.state_after_a_checkpoint, directory=directory.name
)
scenarios.add("stable form", mistakes.stable_form)
scenarios.add("replaced gradient", mistakes.replaced_gradient)
for overlap in ("none", "backward"):
    scenarios.add(f"interrupted {overlap}", mistakes.interrupted, overlap=overlap)
scenarios.add("not finite", mistakes.not_finite)
scenarios.add("not finite and on", mistakes.not_finite_and_on)
scenarios.add("not finite alone", mistakes.not_finite_alone)
scenarios.add("frozen with gaps", mistakes.frozen_with_gaps)
for first in range(3):
    scenarios.add(f"written in step {first}", mistakes.written_through_data, first=first)
for overlap in ("none", "backward", "auto"):
    for replaces in (False, True):
        scenarios.add(
            f"gradient data {overlap} {replaces}",
            mistakes.gradient_data,
            overlap=overlap,
            replaces=replaces,
        )
scenarios.add("parameter data", mistakes.parameter_data)
scenarios.add("averaged half", mistakes.averaged_half)
scenarios.add("groups' momentum", mistakes.groups_momentum)
scenarios.add("unpickled exact", mistakes.unpickled_exact)
scenarios.add("empty parameter", mistakes.empty_parameter)
scenarios.add("ddp inside", mistakes.ddp_inside)
scenarios.add("group of another", mistakes.group_of_another)
scenarios.add("subgroup", mistakes.unpickled_subgroup)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_ddp_left_around_the_model_is_noticed(overlap: str) -> None:
    for error in scenarios.outcomes(f"ddp {overlap}"):
        assert error.startswith("RuntimeError") and "without the wrapper" in error, error


def test_ddp_around_a_part_is_noticed_too() -> None:
    for error in scenarios.outcomes("ddp inside"):
        assert error.startswith("RuntimeError") and "without the wrapper" in error, error


def test_auto_tries_overlap_on_a_model_with_small_parameters() -> None:
    """A write to one gathered gradient must not look like a change of the others."""
    for modes in scenarios.outcomes("auto"):
        assert modes[:3] == ["none"] * 3 and modes.count("backward") >= 15


def test_averages_are_of_parameters_that_were_moved_too() -> None:
    found = scenarios.outcomes("averaged after a move")
    for tensors, distance, _ in found:
        assert runs.same(tensors, found[0][0]) and distance == found[0][1] > 0


def test_state_that_begins_at_x_begins_at_the_common_one() -> None:
    assert scenarios.outcomes("state from x") == [0.0] * N


def test_state_that_an_algorithm_begins_with_comes_back_from_a_checkpoint() -> None:
    assert scenarios.outcomes("state after a checkpoint") == [(False, True)] * N


def test_a_stable_form_runs_for_the_method_that_was_asked_for() -> None:
    expected = [("DecentLaM", "SteadyDecentLaM")] * 3
    assert scenarios.outcomes("stable form") == [expected] * N


def test_a_gradient_that_no_message_needs_may_be_replaced() -> None:
    for expected, found in scenarios.outcomes("replaced gradient"):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_an_interrupted_step_is_completed_and_counted(overlap: str) -> None:
    for (expected, found), steps in scenarios.outcomes(f"interrupted {overlap}"):
        assert torch.equal(expected, found) and steps == [3]


def test_what_failed_in_backward_fails_again_in_step() -> None:
    for first, second in scenarios.outcomes("not finite"):
        assert first.startswith("NonFiniteError") and second.startswith("NonFiniteError"), second


def test_who_goes_on_after_a_message_that_was_not_finite_is_told_why_it_cannot() -> None:
    for first, second in scenarios.outcomes("not finite and on"):
        assert first.startswith("NonFiniteError") and "nothing of it was sent" in first
        assert second.startswith("NonFiniteError") and "start again from a checkpoint" in second


@pytest.mark.parametrize("overlap", ["none", "auto"])
@pytest.mark.parametrize("replaces", [False, True])
def test_gradients_may_be_written_through_data(overlap: str, replaces: bool) -> None:
    """In place, and as `p.grad.data = ...`, which takes the memory of p.grad elsewhere."""
    for (said, mode, x), (_, _, expected) in zip(
        scenarios.outcomes(f"gradient data {overlap} {replaces}"),
        scenarios.outcomes("gradient data none False"),
        strict=True,
    ):
        assert said == "nothing was raised" and mode == "none" and torch.equal(x, expected)


def test_writes_through_data_are_noticed_from_the_start() -> None:
    for replaces in (False, True):
        for message, _, _ in scenarios.outcomes(f"gradient data backward {replaces}"):
            assert message.startswith("StaleMessageError"), message
    for message in scenarios.outcomes("parameter data"):
        assert message.startswith("StaleMessageError"), message


def test_averages_of_half_precision_do_not_overflow() -> None:
    assert scenarios.outcomes("averaged half") == [(20_000.0, 20_000.0)] * N


def test_a_stable_form_is_chosen_for_the_largest_momentum_of_all_groups() -> None:
    for found in scenarios.outcomes("groups' momentum"):
        assert found.startswith("SteadyDecentLaM(beta=0.9"), found


def test_an_unpickled_optimizer_forms_no_group_of_its_own() -> None:
    for message in scenarios.outcomes("unpickled exact"):
        assert message.startswith("RuntimeError") and "Build it anew" in message, message


def test_a_parameter_without_elements_takes_no_part() -> None:
    for x in scenarios.outcomes("empty parameter"):
        assert torch.equal(x, torch.full((3,), 0.9))


@pytest.mark.parametrize("other", [decentlam.DmSGD, torch.optim.SGD])
def test_the_state_of_another_optimizer_is_refused(other: type) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    theirs = other([p], lr=0.1, momentum=0.9)
    p.sum().backward()
    theirs.step()
    optimizer = decentlam.DecentLaM([q], lr=0.1)
    with pytest.raises(ValueError, match="oad the model alone"):
        optimizer.load_state_dict(theirs.state_dict())


def test_a_copy_of_an_elastic_optimizer_is_not_elastic() -> None:
    """A run has one, which changes its members."""
    optimizer = decentlam.DmSGD([nn.Parameter(torch.ones(2))], lr=0.1, topology="ring")
    state = optimizer.__getstate__()
    state["_options"] = dataclasses.replace(state["_options"], elastic=True)
    copied = object.__new__(decentlam.DmSGD)
    copied.__setstate__(state)
    assert copied._options.elastic is False


def test_evaluation_may_begin_in_inference_mode_and_end_outside() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = decentlam.DmSGD([p], lr=0.1)
    with torch.inference_mode():
        optimizer.eval()
    optimizer.train()
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((2,), 0.9))


def test_groups_of_one_optimizer_are_at_one_step() -> None:
    assert scenarios.outcomes("group of another") == [[3, 3]] * N


@pytest.mark.parametrize("method", ["decentlam", "pmsgd", "slowmo"])
def test_equal_data_on_all_nodes_is_told_once_and_only_then(method: str) -> None:
    for said in scenarios.outcomes(f"same {method}"):
        assert len(said) == 1 and "DistributedSampler" in said[0]
    assert scenarios.outcomes(f"own {method}") == [[]] * N


def test_a_node_that_rested_does_not_say_that_data_are_equal() -> None:
    shard = decentlam.DmSGD(runs.Quadratic().parameters(), lr=0.1).runtime.rounds[0].shard
    plan = Plan(decentlam.DmSGD(runs.Quadratic().parameters(), lr=0.1).algorithm, Step(0, 0.1))
    gradients = shard.cut([torch.ones_like(shard.x)])
    message = torch.empty_like(shard.x)[None]
    shard.form(message, gradients, plan, look=False)
    assert shard.mixed_with_the_same([(1.0, message)], gradients, plan) is None
    assert shard.mixed_with_the_same([(0.5, 2 * message)], gradients, plan)  # summed over two


def test_data_are_not_compared_for_ever() -> None:
    """A first bucket without gradients tells nothing, and every look waits for a GPU."""
    equal = EqualMessages()
    for _ in range(10):
        assert equal.looking
        equal.note(None, 0)
    assert not equal.looking


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_layer_frozen_during_training_stays_on_every_node(overlap: str) -> None:
    assert scenarios.outcomes(f"frozen {overlap}") == [(True, True, True)] * N


@pytest.mark.parametrize(("method", "overlap"), MOVED)
def test_parameters_given_memory_of_their_own_train_on(method: str, overlap: str) -> None:
    for expected, found in scenarios.outcomes(f"moved {method} {overlap}"):
        assert runs.same(expected, found)


def test_a_parameter_replaced_while_its_message_is_out_is_refused() -> None:
    for error in scenarios.outcomes("replaced"):
        assert error.startswith("StaleMessageError") and "was replaced" in error, error


@pytest.mark.parametrize("method", ["decentlam", "pmsgd", "slowmo"])
def test_one_process_may_copy_its_optimizer_alone(method: str) -> None:
    for (ours, theirs), said in scenarios.outcomes(f"copied {method}"):
        assert runs.same(ours, theirs)
        assert said.startswith("ValueError") and "optimizers built or copied before" in said, said


def test_an_optimizer_of_a_subgroup_is_not_moved_to_all_processes() -> None:
    for error in scenarios.outcomes("subgroup"):
        assert "cannot be saved with it" in error and "load_state_dict" in error, error


def test_whole_layers_are_not_given_to_nodes_of_several_processes() -> None:
    for error in scenarios.outcomes("layerwise"):
        assert error.startswith("ValueError") and "processes_per_node=1" in error, error


def test_averaging_that_fails_leaves_every_parameter_as_it_was() -> None:
    assert scenarios.outcomes("restored") == [True] * N


def test_a_model_compiled_in_place_trains_with_overlap_forward() -> None:
    for expected, found in scenarios.outcomes("compiled"):
        assert runs.same(expected, found)


def test_survivors_of_a_death_go_on_with_another_network() -> None:
    found = runs.run_processes(mistakes.after_a_death, N, (None,))
    survivors = [result for result in found if isinstance(result, tuple)]
    assert len(survivors) == N - 1
    assert any(error.startswith("ExchangeError") for error, _ in survivors)


# The algorithm says what it needs ---------------------------------------------------------------


@dataclass(frozen=True)
class WarmedUp(Algorithm):
    """Exact averages for the first steps, then neighbors."""

    first: int = 3
    warm: bool = True

    @property
    def warm_up(self) -> int:
        return self.first if self.warm else 0

    def reach(self, index: int) -> Reach:
        return Reach.EVERYONE if index < self.first else Reach.NEIGHBORS

    def message(self, x, g, state, step):  # type: ignore[no-untyped-def]
        return x - step.lr * g

    def update(self, x, g, mixed, state, step):  # type: ignore[no-untyped-def]
        x.copy_(mixed)


def test_an_algorithm_that_only_warms_up_with_everyone_is_not_taken_for_one_that_always_does() -> (
    None
):
    assert needs.reaches(WarmedUp()) == {Reach.EVERYONE, Reach.NEIGHBORS}
    assert not needs.always_everyone(WarmedUp())
    assert decentlam.growth(WarmedUp(), decentlam.topology.ring(8)) > 0.5


def test_an_algorithm_without_message_and_update_is_refused_when_it_is_made() -> None:
    class Half(Algorithm):
        def message(self, x, g, state, step):  # type: ignore[no-untyped-def]
            return x

    with pytest.raises(TypeError, match=r"abstract method '?update"):
        Half()  # type: ignore[abstract]


def test_a_long_period_is_known_whole() -> None:
    assert needs.reaches(decentlam.algorithms.SlowMo(tau=20_000)) == {
        Reach.EVERYONE,
        Reach.NEIGHBORS,
    }


def test_a_period_that_is_not_so_is_refused() -> None:
    with pytest.raises(ValueError, match=r"WarmedUp: reach\(\d+\) is .* period"):
        decentlam.simulate(WarmedUp(warm=False), "ring", torch.zeros(4, 1), lambda x, k: x, 0.1, 1)


def test_a_method_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class above is the file; this is the line. Everything else follows."""
    monkeypatch.setitem(decentlam.ALGORITHMS, "warmed-up", WarmedUp)
    target = torch.arange(8.0).double()[:, None]
    x = decentlam.simulate(
        "warmed-up", "ring", torch.zeros(8, 1).double(), lambda x, k: x - target, 0.1, 300
    )
    assert abs(x.mean().item() - 3.5) < 1e-9
    nodes = decentlam.SimulatedModule(nn.Linear(2, 1), "warmed-up", "ring", 4, lr=0.1)
    nodes.step(nn.functional.mse_loss, torch.ones(4, 3, 2), torch.ones(4, 3, 1))
    assert 0 < decentlam.growth("warmed-up", decentlam.topology.ring(8)) < 1
    cost = decentlam.analysis.cost
    price = cost.predict(
        "warmed-up", decentlam.topology.ring(8), cost.Link(), cost.Compute(1, 1), cost.Job(10**6)
    )
    assert price.bytes_sent == 2 * 10**6
    weight = nn.Parameter(torch.ones(1))
    optimizer = decentlam.DecentralizedOptimizer([weight], WarmedUp(), lr=0.5)
    weight.square().sum().backward()
    optimizer.step()
    assert weight.item() == 0.0


@pytest.mark.parametrize("name", decentlam.ALGORITHMS)
def test_one_node_runs_the_same_however_it_is_asked_for(name: str) -> None:
    algorithm = decentlam.algorithms.make(name)
    ours, theirs = (nn.Parameter(torch.ones(2, 2).double()) for _ in range(2))
    hyper = {"lars": True} if name == "pmsgd-lars" else {}
    one = runs.CLASSES[name]([ours], lr=0.1, **hyper)
    other = decentlam.DecentralizedOptimizer([theirs], algorithm, lr=0.1)
    assert one.algorithm == other.algorithm == algorithm.alone()
    for step in range(5):
        for p, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            ((p - step) ** 2).sum().backward()
            optimizer.step()
    assert torch.equal(ours, theirs)


# Kernels, options, devices ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decentlam", "decentlam-steady", "pmsgd"])
def test_without_torchs_private_kernel_the_steps_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x0 = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        return decentlam.simulate(name, "ring", x0, lambda x, k: x - x0.flip(0), 0.1, 30)

    expected = run()
    monkeypatch.setattr(kernels, "_fused_sgd", None)
    assert not kernels.fusible(x0, x0)
    assert (run() - expected).abs().max() < 1e-13


def test_the_keywords_of_optimizers_are_the_options() -> None:
    names = set(OptimizerOptions.__annotations__) - {"weight_decay", "process_group", "model"}
    assert names == set(Options.__dataclass_fields__)


def test_a_cpu_run_in_a_group_with_two_backends_is_not_taken_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group = object()
    assert not Network(group, 0, 2).is_nccl  # type: ignore[arg-type]
    on_gpu = Network(group, 0, 2, device=torch.device("cuda", 0))  # type: ignore[arg-type]
    assert on_gpu.is_nccl and on_gpu.control_device.type == "cpu"
    assert _backend(group, torch.device("cuda")) == "nccl"  # type: ignore[arg-type]


def test_weights_that_a_script_puts_in_place_for_a_while_reach_no_neighbor() -> None:
    for plain, swapped in scenarios.outcomes("swapped aside"):
        assert torch.equal(plain, swapped)


def test_what_is_not_finite_is_refused_in_a_step_that_sends_nothing() -> None:
    for node, (said, x) in enumerate(scenarios.outcomes("not finite alone")):
        assert ("became NaN or infinite" in said) == (node == 1), said
        assert x.isfinite().all()


def test_a_frozen_parameter_with_gaps_in_memory_starts_equal_and_alone() -> None:
    for node, large in enumerate(scenarios.outcomes("frozen with gaps")):
        assert torch.equal(large[:, :2], torch.zeros(4, 2))
        assert torch.equal(large[:, 2:], torch.full((4, 2), float(node)))


@pytest.mark.parametrize("first", range(3))
def test_writes_through_data_are_noticed_in_the_first_three_steps(first: int) -> None:
    for error in scenarios.outcomes(f"written in step {first}"):
        assert error.startswith("StaleMessageError"), error
