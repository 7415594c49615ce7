"""The contract of torch.optim: one process without a group takes the steps of torch.optim.SGD.

Every method's `alone()` is one algorithm, as tests/algorithms/test_base.py shows. So what its class
does by itself is tested for all of them, and what happens to that algorithm for DecentLaM.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import decentlam
from tests.helpers.one_node import (
    Net,
    assert_close,
    beside_sgd,
    flat,
    loss_of,
    one_step_each,
    train,
)
from tests.helpers.quadratic import CLASSES
from tests.helpers.trajectories import MOMENTUM_METHODS

MOMENTUM = [*dict.fromkeys(CLASSES[name] for name in MOMENTUM_METHODS)]  # in one order


# The same numbers as torch.optim.SGD -----------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_one_node_is_momentum_sgd(nesterov: bool, weight_decay: float) -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": weight_decay}
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), **hyper)
    reference = torch.optim.SGD(theirs.parameters(), **hyper)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


def test_a_graph_of_old_values_is_refused() -> None:
    """As with torch.optim: backward after step() would mix old activations with new weights."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_through_what_did_not_move_is_not_refused() -> None:
    """A layer that was frozen later is as it was, and its activations are still right."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    model[1].requires_grad_(False)
    prompt = torch.ones(2, 3, requires_grad=True)
    kept = model[1](prompt).sum()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    kept.backward()
    assert torch.equal(prompt.grad, model[1].weight.expand(2, 3))


def test_parameter_without_gradient_is_left_alone() -> None:
    """No decay, no momentum while it is unused, and its momentum waits for it."""
    ours, theirs = Net(), Net()
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    optimizer = decentlam.DecentLaM(ours.parameters(), **hyper)
    reference = torch.optim.SGD(theirs.parameters(), **hyper)
    for step in range(12):
        used = step in (2, 3, 7, 11)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, step, everything=used).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])
        if step < 2:
            assert torch.equal(ours.sometimes, torch.ones(3, dtype=torch.float64))


def test_groups_can_be_changed_between_steps() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        for opt in (optimizer, reference):
            group = opt.param_groups[0]
            group["lr"] = 0.1 / (1 + step) if step % 5 else 0.0
            group["momentum"] = 0.9 if step < 7 else 0.3
            group["weight_decay"] = 0.0 if step < 10 else 0.1
        a = train(ours, optimizer, range(step, step + 1))
        b = train(theirs, reference, range(step, step + 1))
        assert_close(a, b)


def test_a_group_of_one_process_is_one_node_too() -> None:
    """torchrun --nproc-per-node 1: a group exists, and SGD's rules for unused parameters hold."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours, theirs = Net(), Net()
        hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        optimizer = decentlam.DecentLaM(ours.parameters(), **hyper)
        reference = torch.optim.SGD(theirs.parameters(), **hyper)
        one_step_each(ours, optimizer, reference, theirs)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, 1, everything=False).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])
        with optimizer.averaged(ours):
            assert_close([flat(ours)], [flat(theirs)])
        assert optimizer.consensus_distance() == 0.0
    finally:
        dist.destroy_process_group()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 12),  # 0 at step 12
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=30),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: k / 5),  # starts at 0
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 9)],
        [4],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler_gives_what_it_gives_sgd(scheduler: str) -> None:
    """What rates that change mean to each method: tests/algorithms/test_reference.py."""
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    a = train(ours, optimizer, range(25), SCHEDULERS[scheduler](optimizer))
    b = train(theirs, reference, range(25), SCHEDULERS[scheduler](reference))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]
    assert_close(a, b)


def test_lr_may_be_a_tensor() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    a = train(ours, optimizer, range(8), lr_scheduler.ExponentialLR(optimizer, 0.8))
    b = train(theirs, reference, range(8), lr_scheduler.ExponentialLR(reference, 0.8))
    assert_close(a, b, 1e-8)  # torch multiplies by the float32 lr, we by its float64 value


# Hooks, closures, gradients that accumulate -----------------------------------------------------


def test_all_hooks_of_torch_run_once_in_order() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *arguments: seen.append(what)

    optimizer.register_step_pre_hook(note("before step"))
    optimizer.register_step_post_hook(note("after step"))
    optimizer.register_state_dict_pre_hook(note("before state_dict"))
    optimizer.register_state_dict_post_hook(note("after state_dict"))
    optimizer.register_load_state_dict_pre_hook(note("before load"))
    optimizer.register_load_state_dict_post_hook(note("after load"))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    words = ("step", "state_dict", "load")
    assert seen == [f"{when} {word}" for word in words for when in ("before", "after")]


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    ours, optimizer, theirs, reference = beside_sgd()
    for step in range(5):
        losses = []
        for model, opt in ((ours, optimizer), (theirs, reference)):

            def closure(model: Net = model, opt: Any = opt, step: int = step) -> Tensor:
                opt.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(opt.step(closure))
        assert (losses[0] - losses[1]).abs() < 1e-12
        assert_close([flat(ours)], [flat(theirs)])


def test_gradients_accumulate_over_backwards_as_in_torch() -> None:
    """On one node nothing is sent, so none of these is too late."""
    ours, optimizer, theirs, reference = beside_sgd()
    for step in range(4):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, step).backward()
            loss_of(model, step + 100).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.param_groups[0]["lr"] *= 0.9
            opt.step()
            opt.step()  # again, with the same gradients
        assert_close([flat(ours)], [flat(theirs)])


def test_optimizer_that_nobody_uses_is_gone() -> None:
    """The parameters keep its hooks, but these must not keep it, its buckets and its state."""
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    theirs = copy.deepcopy(model)
    second = decentlam.DmSGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    assert_close(train(model, second, range(4)), train(theirs, reference, range(4)))


# Saving, loading and copying --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, "pickle") for kind in MOMENTUM), (decentlam.SlowMo, "deepcopy")]
)
def test_copy_goes_on_like_the_original(kind: Any, how: str) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(5))
    both = (model, optimizer)
    twin, twin_optimizer = (
        pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    )
    assert type(twin_optimizer) is type(optimizer) and twin_optimizer.method == optimizer.method
    ours = train(model, optimizer, range(5, 10))
    theirs = train(twin, twin_optimizer, range(5, 10))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(flat(model), ours[0])  # and is a copy: neither disturbed the other


def test_state_dict_has_torchs_form() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    trained = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert sorted(saved["state"]) == trained
    for i, p in enumerate(model.parameters()):
        for value in saved["state"].get(i, {}).values():
            assert value.shape == p.shape


def test_model_loaded_after_construction_is_what_trains() -> None:
    other = Net()
    train(other, decentlam.DmSGD(other.parameters(), lr=0.3), range(3))
    ours, optimizer, theirs, reference = beside_sgd()
    for model in (ours, theirs):
        model.load_state_dict(other.state_dict())
    assert_close([flat(ours)], [flat(other)])
    assert_close(train(ours, optimizer, range(5)), train(theirs, reference, range(5)))


def test_parameters_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 1 is complex.*view_as_real"):
        decentlam.DecentLaM([torch.ones(2, requires_grad=True), torch.ones(1).cfloat()], lr=0.1)
    with pytest.raises(ValueError, match=r"^phase is complex"):
        decentlam.DecentLaM([("phase", torch.ones(1).cfloat())], lr=0.1)
    with pytest.raises(ValueError, match="there is no parameter"):
        decentlam.DecentLaM([{"params": []}], lr=0.1)


def test_a_state_that_is_refused_leaves_everything_as_it_was() -> None:
    def trained(size: int, lr: float) -> Any:
        p = nn.Parameter(torch.ones(size))
        optimizer = decentlam.DecentLaM([p], lr=lr)
        p.sum().backward()
        optimizer.step()
        return optimizer

    ours, theirs = trained(2, lr=0.1), trained(3, lr=9.0)
    before = ours.state_dict()
    with pytest.raises(ValueError, match="Is it of the same model"):
        ours.load_state_dict(theirs.state_dict())
    damaged = trained(2, lr=9.0).state_dict()
    damaged["state"][0]["m"] = [1.0, 2.0]
    with pytest.raises(ValueError, match="is no tensor"):
        ours.load_state_dict(damaged)
    after = ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, value in before["state"][0].items():
        assert torch.equal(after["state"][0][name], value)
    (p,) = ours.param_groups[0]["params"]
    ours.step()  # with lr 0.1 and the momentum of before
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 0.1 - 0.19))


@pytest.mark.parametrize("other", [decentlam.DmSGD, torch.optim.SGD])
def test_the_state_of_another_optimizer_is_refused(other: type) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    theirs = other([p], lr=0.1, momentum=0.9)
    p.sum().backward()
    theirs.step()
    optimizer = decentlam.DecentLaM([q], lr=0.1)
    with pytest.raises(ValueError, match="oad the model alone"):
        optimizer.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "algorithm", [None, "decentlam", 0.1, decentlam.algorithms.DecentLaM], ids=repr
)
def test_what_is_no_algorithm_is_refused(algorithm: Any) -> None:
    with pytest.raises(TypeError, match=r"algorithm must be an Algorithm, such as .*, got "):
        decentlam.DecentralizedOptimizer(nn.Linear(2, 1).parameters(), algorithm)


@pytest.mark.parametrize("name", ["momentum", "dampening"])
def test_a_tensor_of_several_numbers_is_refused_in_a_group(name: str) -> None:
    group = {"params": nn.Linear(2, 1).parameters(), name: torch.ones(2)}
    with pytest.raises(ValueError, match=f"{name} of a param group must be one value, got tensor"):
        decentlam.DecentLaM([group], lr=0.1)


def test_one_line_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "decentlam"):
        decentlam.DecentLaM(nn.Linear(2, 1).parameters(), lr=0.1)
    (line,) = caplog.messages
    assert line.startswith("DecentLaM on one node, without communication; node 0 of 1 on ")


def test_a_state_of_a_run_with_other_nodes_is_loaded_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = decentlam.DecentLaM(nn.Linear(2, 1).parameters(), lr=0.1)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert not caplog.messages
    state["param_groups"][0]["num_nodes"] = 4
    optimizer.load_state_dict(state)
    assert "one node of 4, and this run has 1" in caplog.text
