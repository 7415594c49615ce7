"""Parameters of any dtype, size and memory format train as under torch.optim.SGD."""

from __future__ import annotations

import copy

import pytest
import torch
from one_node import Net, assert_close, flat, one_step_each
from runs_models import cut_parameters
from torch import Tensor, nn

import decentlam
from decentlam.algorithms.kernels import CHUNK


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
    ours = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (CHUNK + 3, 40_001)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = decentlam.DecentLaM(ours, **hyper)
    (cut,) = cut_parameters(optimizer)
    assert cut is ours[0]
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
def test_large_gradients_stay_where_backward_left_them_and_train_as_sgd_does(
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
        left = {p: p.grad.data_ptr() for p in ours.parameters() if p.grad is not None}
        optimizer.step()
        reference.step()
        if step < 2:  # afterwards the spare layer has a place of its own
            large = [p for p in left if p.numel() >= 1 << 15]
            assert len(large) == 3
            assert all(p.grad.data_ptr() == left[p] for p in large)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
