"""One process without a group: hooks, closures, gradients that accumulate, a scaler."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_node import Net, assert_close, beside_sgd, flat, loss_of, train
from torch import Tensor, nn

import decentlam


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


def test_global_hooks_run_once() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    handle = register_optimizer_step_post_hook(lambda *arguments: seen.append(1))
    try:
        model = Net()
        train(model, decentlam.DmSGD(model.parameters(), lr=0.1), range(2))
    finally:
        handle.remove()
    assert seen == [1, 1]


def test_state_dict_hook_may_rewrite_what_is_saved() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))

    def double(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        for values in state["state"].values():
            for value in values.values():
                value.mul_(2)
        return state

    optimizer.register_load_state_dict_pre_hook(double)
    before = {i: copy.deepcopy(s) for i, s in optimizer.state_dict()["state"].items()}
    optimizer.load_state_dict(optimizer.state_dict())
    for i, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(value, 2 * before[i][name])


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


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    assert model.first.weight.grad is not None
    optimizer.zero_grad(set_to_none=to_none)
    if to_none:
        assert model.first.weight.grad is None
    else:
        assert not model.first.weight.grad.any()
    loss_of(model, 0).backward()
    expected = torch.autograd.grad(loss_of(model, 0), model.first.weight)[0]
    assert torch.allclose(model.first.weight.grad, expected, atol=1e-15)


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


def test_backward_may_keep_its_graph() -> None:
    ours, optimizer, theirs, reference = beside_sgd()
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss = loss_of(model, step)
            grads = torch.autograd.grad(loss, list(model.second.parameters()), create_graph=True)
            (loss + sum(g.square().sum() for g in grads)).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph() -> None:
    ours, optimizer, theirs, reference = beside_sgd()
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, step).backward(create_graph=True)
            opt.step()
        assert not any(p.requires_grad for b in optimizer.runtime.buckets for p in (b.x, b.g))
        assert_close([flat(ours)], [flat(theirs)])


def test_grad_scaler_with_overflow_skips_as_torch_does() -> None:
    """torch skips the step; here the gradient is zero, which differs only by the momentum."""
    ours, theirs = Net(torch.float32), Net(torch.float32)
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.0)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            opt.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 2:
                model.first.weight.grad[0, 0] = torch.inf
            if step == 4:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_close([flat(ours)], [flat(theirs)], 1e-6)
    assert optimizer.statistics.skipped_steps == 1


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
