"""Parameters of any dtype, size and memory format train as under torch.optim.SGD."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from tests.helpers.models import trained
from tests.helpers.one_node import Net, assert_close, one_step_each
from tests.helpers.processes import Group, Scenarios, every
from tests.helpers.quadratic import (
    LR,
    Quadratic,
    assert_equal,
    build,
    flat,
    node_loss,
    simulate,
    train,
)

# One process ------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_channels_last_weights_keep_values_and_memory_format(frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(not frozen)
    twin = copy.deepcopy(model)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert_close([flat(model)], [flat(twin)])
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        for m, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            m(x.to(memory_format=torch.channels_last)).square().mean().backward()
            opt.step()
    assert_close([flat(model)], [flat(twin)])
    for layer in (model[0], model[2]):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        assert not layer.weight.is_contiguous()
    states = [s for p in (model[0].weight, model[2].weight) for s in optimizer.state[p].values()]
    assert len(states) == (1 if frozen else 2)
    assert all(s.is_contiguous(memory_format=torch.channels_last) for s in states)


def test_dtypes_may_be_mixed_in_one_group() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    values = [torch.randn(5, 3).to(dtype) for dtype in dtypes]
    ours = [nn.Parameter(v.clone()) for v in values]
    theirs = [nn.Parameter(v.clone()) for v in values]
    optimizer = decentlam.DecentLaM(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(5):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            sum((p.double() - 1).square().sum() for p in params).backward()
            opt.step()
    for a, b, dtype in zip(ours, theirs, dtypes, strict=True):
        assert (
            a.dtype == dtype and optimizer.state[a][next(iter(optimizer.state[a]))].dtype == dtype
        )
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert (a - b).abs().max() < tolerance


def test_parameters_larger_than_one_piece() -> None:
    ours = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (2**20 + 3, 40_001)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = decentlam.DecentLaM(ours, **hyper)
    reference = torch.optim.SGD(theirs, **hyper)
    for step in range(3):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            used = params if step != 1 else params[:1]
            sum((p * torch.linspace(0, 1, len(p))).square().sum() for p in used).backward()
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_everything_frozen() -> None:
    model = Net().requires_grad_(False)
    before = flat(model)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    with optimizer.averaged(model):
        pass
    assert torch.equal(flat(model), before) and optimizer.consensus_distance() == 0.0


def test_scalar_and_empty_parameters() -> None:
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))]
    optimizer = decentlam.DecentLaM(params, lr=0.1, momentum=0.9, bucket_bytes=1)
    params[0].square().backward()
    optimizer.step()
    assert params[0].item() == pytest.approx(1.6)
    assert params[1].shape == (0, 3)


def test_empty_first_group() -> None:
    model = Net()
    groups = [{"params": []}, {"params": list(model.parameters())}]
    theirs = Net()
    optimizer = decentlam.DecentLaM(groups, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    one_step_each(model, optimizer, reference, theirs)


class Mixed(nn.Module):
    """Large and small parameters in turn, one of them in channels-last order, one often unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(200, 200)  # 40,000 weights: large
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # 36,864: large
        self.last = nn.Linear(64, 3)
        self.spare = nn.Linear(200, 200)

    def forward(self, x: Tensor, use_spare: bool) -> Tensor:
        x = self.first(x)
        x = self.spare(x) if use_spare else x
        x = x[:, None, :64, None].expand(-1, 64, -1, 3)
        return self.last(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_gradients_large_and_small_train_as_sgd_does(
    set_to_none: bool, max_grad_norm: float | None
) -> None:
    torch.manual_seed(0)
    ours = Mixed().double()
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = decentlam.DecentLaM(
        ours.parameters(), **options, overlap=False, max_grad_norm=max_grad_norm
    )
    reference = torch.optim.SGD(theirs.parameters(), **options)
    for step in range(5):
        x = torch.randn(4, 200, dtype=torch.float64)
        for model, stepper in ((ours, optimizer), (theirs, reference)):
            stepper.zero_grad(set_to_none=set_to_none)
            model(x, use_spare=step != 2).square().mean().backward()
            if model is theirs and max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


# Several processes ------------------------------------------------------------------------------


scenarios = Scenarios(4)


def channels_last(process_group: Group) -> tuple[list[Tensor], bool]:
    """Convolutions, one of them frozen, in channels-last memory."""
    node = dist.get_rank(process_group)
    model = conv_model(seed=node)
    optimizer = build("decentlam", model, process_group)
    trajectory = []
    for step in range(4):
        optimizer.zero_grad()
        conv_loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(trained(model))
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    kept = all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convs)
    return trajectory, kept


def conv_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3))
    model[2].weight.requires_grad_(False)
    return model.double().to(memory_format=torch.channels_last)


def conv_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
    return model(x.to(memory_format=torch.channels_last)).square().mean()


@scenarios.run(channels_last)
def test_channels_last_convolutions(results: Any) -> None:
    expected = simulate("decentlam", 4, 4, model=conv_model, loss=conv_loss)
    assert_equal([trajectory for trajectory, _ in results], expected)
    assert all(kept for _, kept in results)


def mixed_dtypes(process_group: Group) -> tuple[list[str], float, float]:
    """float32, float64 and bfloat16 parameters in one group: dtypes, loss before and after."""
    node = dist.get_rank(process_group)
    torch.manual_seed(node)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 3).to(dtype)) for dtype in dtypes])
    optimizer = build("decentlam", model, process_group, overlap=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = sum((p.double() - 1).square().sum() for p in model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [str(p.dtype) for p in model], losses[0], losses[-1]


@scenarios.run(mixed_dtypes)
def test_parameters_of_several_dtypes_train_together(results: Any) -> None:
    for dtypes, first, last in results:
        assert dtypes == ["torch.float32", "torch.float64", "torch.bfloat16", "torch.float32"]
        assert last < 0.05 * first


class FromHere(decentlam.algorithms.DmSGD):
    """Remembers where the run began."""

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().init(x), "start": x.clone()}


def state_from_x(process_group: Group) -> float:
    """Processes start from different parameters, which the optimizer makes equal."""
    model = Quadratic(seed=dist.get_rank(process_group))
    optimizer = decentlam.DecentralizedOptimizer(
        model.parameters(), FromHere(0.6), LR, topology="ring", process_group=process_group
    )
    starts = [optimizer.state[p]["start"] for p in model.parameters()]
    pairs = zip(starts, model.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@scenarios.run(state_from_x)
def test_state_that_begins_at_x_begins_at_the_common_one(results: list[float]) -> None:
    assert results == [0.0] * 4


def frozen_with_gaps(process_group: Group) -> Tensor:
    """A frozen parameter that is a part of a larger tensor; that is what others start with."""
    node = dist.get_rank(process_group)
    large = torch.full((4, 4), float(node))
    part = nn.Parameter(large[:, :2], requires_grad=False)
    parameters = [nn.Parameter(torch.ones(3)), part]
    decentlam.DmSGD(parameters, LR, process_group=process_group)
    return large


@scenarios.run(frozen_with_gaps)
def test_a_frozen_parameter_with_gaps_in_memory_starts_equal_and_alone(results: Any) -> None:
    for node, large in enumerate(results):
        assert torch.equal(large[:, :2], torch.zeros(4, 2))
        assert torch.equal(large[:, 2:], torch.full((4, 2), float(node)))


class Large(nn.Module):
    """More elements than the runtime handles in one piece, and not a multiple of that."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(2**19 + 3, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(402, dtype=torch.float64))


def large_loss(model: nn.Module, node: int, step: int) -> Tensor:
    return sum((p - node - 0.1 * step).square().sum() for p in model.parameters())


def some(x: Tensor) -> Tensor:
    """Return elements from everywhere: all would take long to send to the test."""
    return x[..., ::997]


def large(process_group: Group, method: str, per_node: int = 1) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Large(seed=rank)
    options = {"bucket_bytes": 10**8, "processes_per_node": per_node}
    optimizer = build(method, model, process_group, **options)
    return [some(x) for x in train(optimizer, model, rank, range(3), large_loss)]


@scenarios.run(
    large,
    [
        *every(method=("decentlam", "da-dmsgd", "awc-dmsgd", "slowmo", "pmsgd")),
        {"method": "decentlam", "per_node": 2},
    ],
)
def test_processes_with_parameters_larger_than_one_piece(
    results: Any, method: str, per_node: int = 1
) -> None:
    loss = node_loss(per_node, large_loss)
    expected = simulate(method, 4 // per_node, 3, model=Large, loss=loss)
    assert_equal(results, [some(x) for x in expected])
