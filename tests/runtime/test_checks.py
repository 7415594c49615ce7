"""What watches the script: gradients that are late, not finite or equal, wrappers, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decentlam
from tests.helpers.one_node import Net, loss_of
from tests.helpers.processes import Group, Scenarios, every, message_of, spoiled, warnings_of
from tests.helpers.quadratic import (
    assert_equal,
    clipped,
    flat,
    quadratic_loss,
    same,
    simulate,
    start,
    train,
)

N = 4
scenarios = Scenarios(N)


# Something changes between backward and step() --------------------------------------------------

CHANGES = {
    "clip": "max_grad_norm=",
    "lr": "overlap='none'",
    "momentum": "overlap='none'",
    "weight decay": "overlap='none'",
    "zero_grad": "overlap='none'",
    "new gradient": "overlap='none'",
    "parameter": "between step() and backward",
    "new parameter": "was replaced",
    "second backward": "no_sync",
}


def stale(process_group: Group, what: str, method: str = "decentlam") -> str:
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    optimizer.zero_grad()
    quadratic_loss(model, node, 2).backward()
    group, weight = optimizer.param_groups[0], model.weights[1]
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif what == "lr":
        group["lr"] = 0.01
    elif what == "momentum":
        group["momentum"] = 0.5
    elif what == "weight decay":
        group["weight_decay"] = 0.5
    elif what == "zero_grad":
        optimizer.zero_grad()
    elif what == "new gradient":
        weight.grad = torch.zeros_like(weight)
    elif what == "parameter":
        with torch.no_grad():
            weight.add_(1)
    elif what == "new parameter":
        weight.data = weight.data + 1
    elif what == "second backward":
        return message_of(quadratic_loss(model, node, 2).backward)
    return message_of(optimizer.step)


@scenarios.run(stale, [*every(what=CHANGES), {"what": "clip", "method": "pmsgd"}])
def test_stale_message_is_refused_with_the_cure(errors: list[str], what: str) -> None:
    for error in errors:
        assert error.startswith("StaleMessageError") and CHANGES[what] in error, error
        if what == "lr":
            assert "lr=0.05" in error and "lr=0.01" in error
        if what == "second backward":
            assert "weights." in error


def awc_parameter_changed(process_group: Group, through_data: bool) -> str:
    """A parameter changes while the message of it is under way."""
    node, model, optimizer = start(process_group, "awc-dmsgd")
    train(optimizer, model, node, range(2))
    with torch.no_grad():
        for p in model.parameters():
            (p.data if through_data else p).clamp_(-0.01, 0.01)
    return message_of(lambda: train(optimizer, model, node, range(2, 4)))


@scenarios.run(awc_parameter_changed, every(through_data=(False, True)))
def test_awc_refuses_parameters_changed_while_its_message_travels(errors: list[str]) -> None:
    assert all(error.startswith("StaleMessageError") for error in errors), errors


def written_through_data(
    process_group: Group, overlap: str, first: int, replaces: bool = False
) -> tuple[str, Tensor]:
    """From that step on gradients are clipped through `.data`, which torch does not count."""
    node, model, optimizer = start(process_group, "dmsgd", overlap=overlap)

    def go() -> None:
        for step in range(8):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            for p in model.parameters() if step >= first else ():
                if replaces:
                    p.grad.data = p.grad.data.clamp(-0.01, 0.01)
                else:
                    p.grad.data.clamp_(-0.01, 0.01)
            optimizer.step()

    return message_of(go), flat(model)


@scenarios.run(written_through_data, every(overlap=["auto"], first=[0], replaces=(0, 1)))
def test_gradients_may_be_written_through_data(results: list[tuple[str, Tensor]]) -> None:
    """In place, and as `p.grad.data = ...`, which takes the memory of p.grad elsewhere."""
    expected = simulate("dmsgd", N, 8, change=lambda g: g.clamp(-0.01, 0.01))[-1:]
    assert {said for said, _ in results} == {"nothing was raised"}
    assert_equal([[x] for _, x in results], expected)


@scenarios.run(
    written_through_data,
    [
        *every(overlap=["backward"], first=(0, 2)),
        *every(overlap=["backward"], first=[0], replaces=[1]),
    ],
)
def test_writes_through_data_are_noticed_in_the_first_steps(
    results: list[tuple[str, Tensor]],
) -> None:
    for error, _ in results:
        assert error.startswith("StaleMessageError"), error


# Clipping and scaling ---------------------------------------------------------------------------


def clip(process_group: Group, how: str) -> list[Tensor]:
    built_in = {"max_grad_norm": 2.0} if how == "built in" else {}
    node, model, optimizer = start(process_group, "decentlam", overlap=False, **built_in)
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        if how == "by hand":
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


@scenarios.run(clip, every(how=("built in", "by hand")))
def test_clipping_equals_simulator_with_clipped_gradients(results: list[list[Tensor]]) -> None:
    assert_equal(results, simulate("decentlam", N, 6, change=clipped(2.0)))


def scaler(
    process_group: Group, method: str, unscale: bool = False, overlap: bool = False
) -> tuple[list[Tensor], list[bool], float]:
    """Node 1's gradient overflows at step 2: trajectory, skipped or not by step, last scale."""
    node, model, optimizer = start(process_group, method, overlap=overlap)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    trajectory, skipped = [], []
    for step in range(6):
        optimizer.zero_grad()
        grad_scaler.scale(quadratic_loss(model, node, step)).backward()
        if node == 1 and step == 2:
            model.weights[0].grad[0, 0] = torch.inf
        if unscale:
            grad_scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        trajectory.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return trajectory, skipped, grad_scaler.get_scale()


@scenarios.run(
    scaler,
    [
        *every(method=("decentlam", "awc-dmsgd", "pmsgd", "slowmo")),
        {"method": "decentlam", "unscale": True},
    ],
)
def test_node_whose_gradient_overflows_answers_with_gradient_zero(
    results: list[Any], method: str, unscale: bool = False
) -> None:
    def overflowed(node: int, step: int) -> bool:
        return node == 1 and step == 2

    change = clipped(2.0) if unscale else lambda g: g
    expected = simulate(method, N, 6, absent=overflowed, change=change)
    assert_equal([trajectory for trajectory, _, _ in results], expected)
    for node, (_, skipped, scale) in enumerate(results):
        assert skipped == [overflowed(node, step) for step in range(6)]
        assert scale == (2.0**9 if node == 1 else 2.0**10)


def scaler_with_overlap(process_group: Group) -> str:
    return message_of(lambda: scaler(process_group, "decentlam", overlap=True))


@scenarios.run(scaler_with_overlap)
def test_scaler_with_overlap_is_refused_with_the_cure(errors: list[str]) -> None:
    for error in errors:
        assert error.startswith("StaleMessageError: GradScaler with overlap")
        assert "overlap='none'" in error and "bfloat16" in error


def scaler_in_some(process_group: Group) -> str:
    """Nodes of two processes, of which only the first has a GradScaler."""
    node, model, optimizer = start(process_group, "decentlam", overlap=False, processes_per_node=2)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=node % 2 == 0)
    grad_scaler.scale(quadratic_loss(model, node, 0)).backward()
    return message_of(lambda: grad_scaler.step(optimizer))


@scenarios.run(scaler_in_some)
def test_scaler_in_some_processes_of_a_node_is_refused_by_all_of_them(errors: list[str]) -> None:
    for rank, error in enumerate(errors):
        assert error.startswith(f"RuntimeError: node {rank // 2}: 1 of its 2 processes"), error


# What is not finite -----------------------------------------------------------------------------


def nonfinite_raises(
    process_group: Group, method: str, overlap: bool, value: float
) -> tuple[str, bool]:
    """Node 2's gradient turns bad at step 3: the error of this node, whether its x is finite."""

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        bad = value if node == 2 and step == 3 else 0.0
        return quadratic_loss(model, node, step) + bad * model.weights[1][2]

    def attempt(process_group: Group, seconds: float) -> tuple[str, bool]:
        options = {"overlap": overlap, "timeout_seconds": seconds}
        node, model, optimizer = start(process_group, method, **options)
        error = message_of(lambda: train(optimizer, model, node, range(6), loss))
        return error, bool(flat(model).isfinite().all())

    return spoiled(process_group, attempt, step=3)


@scenarios.run(
    nonfinite_raises,
    [
        {"method": "decentlam", "overlap": True, "value": torch.nan},
        {"method": "da-dmsgd", "overlap": False, "value": torch.inf},
        {"method": "awc-dmsgd", "overlap": True, "value": -torch.inf},
        {"method": "pmsgd", "overlap": True, "value": torch.nan},
    ],
)
def test_nonfinite_gradient_stops_at_its_node(results: list[tuple[str, bool]]) -> None:
    for node, (error, finite) in enumerate(results):
        assert finite
        if node == 2:
            assert error.startswith("NonFiniteError: node 2, step 3: weights.1 became"), error
        else:
            assert error.startswith("ExchangeError"), error
            # Who does not talk to node 2 goes on a little; AWC's messages are a step ahead.
            assert any(f"step {step}, " in error for step in (3, 4, 5))


def nonfinite_skips(process_group: Group, method: str) -> tuple[list[Tensor], list[bool]]:
    node, model, optimizer = start(process_group, method, overlap=False, nonfinite="skip")
    trajectory, skipped = [], []
    for step in range(6):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        if node == 1 and step in (2, 4):
            model.weights[3].grad[1, 1] = torch.nan if step == 2 else torch.inf
        optimizer.step()
        trajectory.append(flat(model))
        skipped.append(optimizer.statistics.skipped)
    return trajectory, skipped


@scenarios.run(nonfinite_skips, every(method=("decentlam", "awc-dmsgd", "pmsgd")))
def test_nonfinite_gradient_can_be_left_out(results: list[Any], method: str) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 1 and step in (2, 4)

    expected = simulate(method, N, 6, absent=absent)
    assert_equal([trajectory for trajectory, _ in results], expected)
    for node, (_, skipped) in enumerate(results):
        assert skipped == [absent(node, step) for step in range(6)]


def not_finite(process_group: Group, overlap: str) -> list[str]:
    """The loss is NaN once: what is said in step(), and to a script that goes on."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap, shared_memory=True)
    message_of((quadratic_loss(model, node, 0) * torch.nan).backward)
    said = [message_of(optimizer.step)]
    if overlap == "none":
        optimizer.zero_grad()
        quadratic_loss(model, node, 0).backward()
        said.append(message_of(optimizer.step))
    return said


@scenarios.run(not_finite, every(overlap=("none", "backward")))
def test_what_failed_fails_again_and_says_why(results: list[list[str]], overlap: str) -> None:
    for first, *later in results:
        assert first.startswith("NonFiniteError"), first
        if overlap == "none":
            assert "nothing of it was sent" in first
            assert later[0].startswith("NonFiniteError")
            assert "start again from a checkpoint" in later[0]


def not_finite_alone(process_group: Group) -> tuple[str, Tensor]:
    node, model, optimizer = start(process_group, "slowmo", base="local", tau=4)
    train(optimizer, model, node, range(1))
    (quadratic_loss(model, node, 1) * (torch.nan if node == 1 else 1.0)).backward()
    return message_of(optimizer.step), flat(model)


@scenarios.run(not_finite_alone)
def test_what_is_not_finite_is_refused_in_a_step_that_sends_nothing(results: list[Any]) -> None:
    """What such a step leaves is averaged later."""
    for node, (said, x) in enumerate(results):
        assert ("became NaN or infinite" in said) == (node == 1), said
        assert x.isfinite().all()


# Wrappers, equal data, layers frozen and memory replaced ----------------------------------------


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        return self.inner(*inputs)


def in_ddp(process_group: Group, overlap: str, part: bool) -> str:
    """The wrapper was left around the model, or is around a part that has run without it."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    if part:
        quadratic_loss(model, node, 0)
    wrapped: nn.Module = DistributedDataParallel(model, process_group=process_group)
    quadratic_loss(Outer(wrapped) if part else wrapped, node, 0).backward()
    return message_of(optimizer.step)


@scenarios.run(in_ddp, [{"overlap": "none", "part": False}, {"overlap": "backward", "part": True}])
def test_ddp_left_around_the_model_or_a_part_is_noticed(errors: list[str]) -> None:
    for error in errors:
        assert error.startswith("RuntimeError") and "without the wrapper" in error, error


def said_of_data(process_group: Group, method: str, own: bool) -> list[str]:
    node, model, optimizer = start(process_group, method)
    with warnings_of("decentlam") as said:
        train(optimizer, model, node if own else 0, range(4))
    return said


@scenarios.run(said_of_data, every(method=("decentlam", "pmsgd", "slowmo"), own=(False, True)))
def test_equal_data_on_all_nodes_is_told_once_and_only_then(
    results: list[list[str]], own: bool
) -> None:
    for said in results:
        assert said == [] if own else len(said) == 1 and "DistributedSampler" in said[0]


def frozen(process_group: Group, overlap: str) -> tuple[bool, bool, bool]:
    """A layer is frozen after some steps: whether it stays, others move, and it moves again."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    train(optimizer, model, node, range(3))
    weight, other = model.weights[2], model.weights[1]
    weight.requires_grad_(False)
    before, others = weight.detach().clone(), other.detach().clone()
    train(optimizer, model, node, range(3, 6))
    stays, moves = torch.equal(weight, before), not torch.equal(other, others)
    weight.requires_grad_(True)
    train(optimizer, model, node, range(6, 8))
    return stays, moves, not torch.equal(weight, before)


@scenarios.run(frozen, every(overlap=("none", "backward")))
def test_a_layer_frozen_during_training_stays_on_every_node(results: list[Any]) -> None:
    assert results == [(True, True, True)] * N


def moved(process_group: Group, method: str, overlap: str) -> list[list[Tensor]]:
    """Parameters get memory of their own before some steps, as trainers do it."""
    found = []
    for moves in (False, True):
        node, model, optimizer = start(process_group, method, overlap=overlap)
        trajectory = []
        for step in range(6):
            if moves and step % 2:
                model.to("cpu:0")
            trajectory += train(optimizer, model, node, range(step, step + 1))
        found.append(trajectory)
    return found


@scenarios.run(
    moved,
    [{"method": "decentlam", "overlap": "none"}, {"method": "awc-dmsgd", "overlap": "backward"}],
)
def test_parameters_given_memory_of_their_own_train_on(results: list[list[list[Tensor]]]) -> None:
    for expected, found in results:
        assert same(expected, found)


# One process ------------------------------------------------------------------------------------


@pytest.fixture
def named() -> tuple[Net, decentlam.DecentLaM]:
    model = Net()
    return model, decentlam.DecentLaM(model.named_parameters(), lr=0.1)


def step_after(change: Callable[[Net], Any], model: Net, optimizer: Any) -> None:
    change(model)
    loss_of(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.double().float(), r"\w+ was changed .*float64 \(3,\) on cpu.*torch.float32"),
        (lambda m: m.load_state_dict(m.state_dict(), assign=True), r"without any.*assign=True"),
        (lambda m: m.frozen.requires_grad_(True), "frozen when the optimizer was built"),
    ],
)
def test_what_happened_to_a_parameter_is_named(
    named: tuple[Net, Any], change: Callable[[Net], Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        step_after(change, *named)


def test_parameter_of_two_optimizers_belongs_to_the_later_one(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    later = decentlam.DmSGD(model.named_parameters(), lr=0.1)
    loss_of(model, 0).backward()
    later.step()
    with pytest.raises(RuntimeError, match="belongs to another optimizer"):
        optimizer.step()


def test_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = decentlam.DecentLaM(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight has a sparse gradient.*sparse=False"):
        model(torch.tensor([1, 3])).sum().backward()
        optimizer.step()


def test_step_inside_no_sync_is_refused(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    with optimizer.no_sync():
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    optimizer.step()
