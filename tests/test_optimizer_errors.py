"""What happened to a parameter behind the optimizer's back is refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_node import Net, loss_of, one_step_each
from torch import nn

import decentlam


@pytest.fixture
def named() -> Iterator[tuple[Net, Any]]:
    model = Net()
    yield model, decentlam.DecentLaM(model.named_parameters(), lr=0.1)


def test_named_parameters_train(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    theirs = Net()
    reference = torch.optim.SGD(theirs.named_parameters(), lr=0.1, momentum=0.9)
    one_step_each(model, optimizer, reference, theirs)
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "sometimes"


@pytest.mark.parametrize("move", [lambda m: m.float(), lambda m: m.first.half()])
def test_parameter_moved_after_construction(
    named: tuple[Net, Any], move: Callable[[Net], Any]
) -> None:
    model, optimizer = named
    move(model)
    with pytest.raises(
        RuntimeError,
        match=r"(first|second)\.bias was changed .*float64 \(\d,\) on cpu.*torch.float",
    ):
        optimizer.step()


def test_parameter_given_new_data_after_construction_trains_from_there(
    named: tuple[Net, Any],
) -> None:
    model, optimizer = named
    theirs = Net()
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for each in (model, theirs):
        each.second.bias.data = torch.zeros(3, dtype=torch.float64)
    one_step_each(model, optimizer, reference, theirs)
    for each in (model, theirs):  # as Accelerate and HF's Trainer do
        each.first.weight.data = each.first.weight.data.clone()
    one_step_each(model, optimizer, reference, theirs)


def test_parameter_of_two_optimizers_belongs_to_the_later_one(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    later = decentlam.DmSGD(model.named_parameters(), lr=0.1)
    loss_of(model, 0).backward()
    later.step()
    with pytest.raises(RuntimeError, match="belongs to another optimizer"):
        optimizer.step()


def test_step_in_which_nothing_has_a_gradient_is_refused(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    model.load_state_dict(model.state_dict(), assign=True)  # replaces the parameters
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"without any gradient.*assign=True"):
        optimizer.step()


def test_parameters_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 1 is complex.*view_as_real"):
        decentlam.DecentLaM([torch.ones(2, requires_grad=True), torch.ones(1).cfloat()], lr=0.1)
    with pytest.raises(ValueError, match=r"^phase is complex"):
        decentlam.DecentLaM([("phase", torch.ones(1).cfloat())], lr=0.1)
    with pytest.raises(ValueError, match="there is no parameter"):
        decentlam.DecentLaM([{"params": []}], lr=0.1)


def test_layer_frozen_during_training_stays_where_it_is(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    theirs = Net()
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    one_step_each(model, optimizer, reference, theirs)
    for each in (model, theirs):
        each.first.weight.requires_grad_(False)
        each.zero_grad()
    before = model.first.weight.clone()
    one_step_each(model, optimizer, reference, theirs)
    assert torch.equal(model.first.weight, before)
    for each in (model, theirs):
        each.first.weight.requires_grad_(True)
    one_step_each(model, optimizer, reference, theirs)
    assert not torch.equal(model.first.weight, before)


def test_parameter_unfrozen_after_construction(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    model.frozen.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="frozen when the optimizer was built"):
        optimizer.step()


def test_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    _kept = decentlam.DecentLaM(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight has a sparse gradient.*sparse=False"):
        model(torch.tensor([1, 3])).sum().backward()


def test_step_inside_no_sync_is_refused(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    with optimizer.no_sync():
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    optimizer.step()


def test_wrong_state_is_refused() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(3, 3)
    saved = decentlam.DecentLaM(small.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="shape"):
        decentlam.DecentLaM(large.parameters(), lr=0.1).load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_param_group_that_is_refused_leaves_nothing_behind(dtype: torch.dtype) -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = decentlam.DecentLaM([first], lr=0.1, message_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"float64|complex"):
        optimizer.add_param_group({"params": [second]})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]
    first.sum().backward()
    optimizer.step()
    assert torch.equal(first.detach(), torch.full((2,), 0.9))


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
