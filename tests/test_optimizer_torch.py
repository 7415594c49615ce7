"""One process without a group takes the steps of torch.optim.SGD, under any scheduler.

Every method's `alone()` is one algorithm, as tests/test_algorithms.py shows. So what its class does
by itself is tested for all of them, and what happens to that algorithm for DecentLaM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_node import (
    MOMENTUM_METHODS,
    Net,
    assert_close,
    build,
    every_method,
    flat,
    loss_of,
    one_step_each,
    train,
)
from torch.optim import lr_scheduler

import decentlam
from decentlam.algorithms import ALGORITHMS, PmSGD, make

# The same numbers as torch.optim.SGD ------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_one_node_is_momentum_sgd(nesterov: bool, weight_decay: float) -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": weight_decay}
    ours, theirs = Net(), Net()
    optimizer = build("DecentLaM", ours.parameters(), **hyper)
    reference = torch.optim.SGD(theirs.parameters(), **hyper)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


@every_method
def test_every_optimizer_runs_momentum_sgd_on_one_node(method: str) -> None:
    """And has nothing to hide behind backward, whatever overlap it is given."""
    for nesterov, overlap in ((False, False), (True, True), (True, "forward"), (False, "auto")):
        hyper = {"momentum": 0.8, "nesterov": nesterov}
        optimizer = build(method, Net().parameters(), lr=0.1, overlap=overlap, **hyper)
        assert optimizer.algorithm == PmSGD(0.8, nesterov)
        assert optimizer.runtime.overlap.mode == "none"


def test_no_optimizer_with_momentum_is_left_out() -> None:
    listed = {type(build(method, Net().parameters()).method) for method in MOMENTUM_METHODS}
    assert listed == {type(make(name)) for name in ALGORITHMS if name != "dsgd"}


def test_one_node_is_momentum_sgd_in_float32() -> None:
    ours, theirs = Net(torch.float32), Net(torch.float32)
    optimizer = build("DecentLaM", ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)), 1e-5)


def test_a_graph_of_old_values_is_refused() -> None:
    """As with torch.optim: backward after step() would mix old activations with new weights."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = build("DecentLaM", model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_through_what_did_not_move_is_not_refused() -> None:
    """A layer that was frozen later is as it was, and its activations are still right."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = build("DecentLaM", model.parameters(), lr=0.1)
    model[1].requires_grad_(False)
    prompt = torch.ones(2, 3, requires_grad=True)
    kept = model[1](prompt).sum()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    kept.backward()
    assert torch.equal(prompt.grad, model[1].weight.expand(2, 3))


def test_dsgd_on_one_node_is_sgd() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DSGD(ours.parameters(), lr=0.1, weight_decay=0.05)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.05)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


def test_parameter_without_gradient_is_left_alone() -> None:
    """No decay, no momentum while it is unused, and its momentum waits for it."""
    ours, theirs = Net(), Net()
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    optimizer = build("DecentLaM", ours.parameters(), **hyper)
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


def test_frozen_parameter_is_left_alone() -> None:
    model = Net()
    train(model, decentlam.DecentLaM(model.parameters(), lr=0.1, weight_decay=0.1), range(3))
    assert torch.equal(model.frozen, torch.ones(3, dtype=torch.float64))


@every_method
def test_groups_have_their_own_lr_decay_and_momentum(method: str) -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": model.first.parameters(), "lr": 0.2, "weight_decay": 0.1},
            {"params": model.second.parameters(), "momentum": 0.5, "nesterov": True},
            {"params": [model.sometimes], "momentum": 0.0},
        ]

    ours, theirs = Net(), Net()
    optimizer = build(method, groups(ours), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(groups(theirs), lr=0.05, momentum=0.9)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


def test_groups_can_be_changed_between_steps() -> None:
    ours, theirs = Net(), Net()
    optimizer = build("DecentLaM", ours.parameters(), lr=0.1, momentum=0.9)
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


def test_add_param_group_mid_run() -> None:
    ours, theirs = Net(), Net()
    optimizer = build("DecentLaM", ours.first.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.first.parameters(), lr=0.1, momentum=0.9)
    assert_close(train(ours, optimizer, range(4)), train(theirs, reference, range(4)))
    optimizer.zero_grad()
    reference.zero_grad()
    for model in (ours, theirs):
        model.zero_grad()
    optimizer.add_param_group({"params": ours.second.parameters(), "lr": 0.3})
    reference.add_param_group({"params": theirs.second.parameters(), "lr": 0.3})
    assert_close(train(ours, optimizer, range(4, 12)), train(theirs, reference, range(4, 12)))


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


# Schedulers -------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 5, gamma=0.3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [4, 9], gamma=0.1),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 12),  # 0 at step 12
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 7),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=30),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.0, 0.2, step_size_up=4),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: k / 5),  # starts at 0
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 12),  # stays at 0 from step 12
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 9)],
        [4],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduler_gives_what_it_gives_sgd(scheduler: str) -> None:
    """What rates that change mean to each method: tests/test_algorithms_reference.py."""
    ours, theirs = Net(), Net()
    optimizer = build("DecentLaM", ours.parameters(), lr=0.1, momentum=0.9)
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
