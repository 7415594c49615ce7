"""Parameters of any dtype, size and memory format train as under torch.optim.SGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from tests.helpers.models import trained
from tests.helpers.one_node import Net, one_step_each
from tests.helpers.processes import Group, Scenarios, every
from tests.helpers.quadratic import LR, assert_equal, build, flat, node_loss, simulate, train

# One process ------------------------------------------------------------------------------------


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
