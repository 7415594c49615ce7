"""Models that use only parts of themselves, or are compiled, take the simulator's steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import Branches, branches_loss, mlp, mlp_loss, trained
from tests.helpers.processes import Group, Scenarios, every
from tests.helpers.quadratic import (
    SCALE,
    assert_equal,
    build,
    flat,
    simulate,
    start,
    targets_of,
    train,
)

N = 4
scenarios = Scenarios(N)


def branches(
    process_group: Group, method: str, overlap: bool | str, chatter: bool = False
) -> list[Tensor]:
    """With `chatter` the script communicates by itself between backward and step()."""
    node, n = dist.get_rank(process_group), dist.get_world_size(process_group)
    model = Branches(seed=node)
    optimizer = build(method, model, process_group, overlap=overlap)
    trajectory = []
    for step in range(8):
        optimizer.zero_grad()
        loss = branches_loss(model, node, step)
        loss.backward()
        if chatter:
            _talk(process_group, node, n)
        optimizer.step()
        trajectory.append(trained(model))
    return trajectory


def _talk(process_group: Group, node: int, n: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total, group=process_group)
    assert total.item() == n
    ranks = dist.get_process_group_ranks(process_group)
    received = torch.zeros(1)
    work = dist.irecv(received, ranks[(node - 1) % n], group=process_group)
    dist.send(torch.full((1,), float(node)), ranks[(node + 1) % n], group=process_group)
    work.wait()
    assert received.item() == (node - 1) % n


# The first optimizer of a process is where its messages could be taken for the script's own.
@scenarios.run(
    branches,
    [
        {"method": "decentlam", "overlap": True, "chatter": True},
        {"method": "decentlam", "overlap": False},
        {"method": "pmsgd", "overlap": True},
        {"method": "pmsgd", "overlap": True, "chatter": True},
        {"method": "awc-dmsgd", "overlap": True, "chatter": True},
        {"method": "da-dmsgd", "overlap": True},
        {"method": "slowmo", "overlap": True, "chatter": True},
    ],
)
def test_branches_that_nodes_take_in_different_order(results: Any, method: str) -> None:
    """Tied, frozen, unused parameters too; with chatter the script sends messages of its own."""
    assert_equal(results, simulate(method, N, 8, model=Branches, loss=branches_loss))


def disjoint(process_group: Group, first: str) -> list[Tensor]:
    """Two losses over different parameters, as actor and critic have, in two backwards."""
    node, model, optimizer = start(process_group, "decentlam", bucket_bytes=200)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        terms = [
            (1 + 0.1 * step) * 0.5 * s * (w - t).square().sum()
            for w, t, s in zip(model.weights, targets_of(node), SCALE, strict=True)
        ]
        halves = [terms[:2], terms[2:]]
        for half in halves if first == "front" else halves[::-1]:
            sum(half).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


@scenarios.run(disjoint, every(first=("front", "back")))
def test_losses_over_different_parameters_need_no_no_sync(results: Any) -> None:
    assert_equal(results, simulate("decentlam", N, 5))


class Checkpointed(nn.Module):
    """Forgets what is between its halves and computes it again in backward."""

    def __init__(self, seed: int = 0, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = mlp(seed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for half in (self.layers[:2], self.layers[2:]):
            x = checkpoint(half, x, use_reentrant=self.reentrant)
        return x


def checkpointed(process_group: Group, reentrant: bool, overlap: str) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = Checkpointed(node, reentrant)
    optimizer = build("decentlam", model, process_group, overlap=overlap)
    return train(optimizer, model, node, range(4), mlp_loss)


@scenarios.run(
    checkpointed,
    [{"reentrant": True, "overlap": "backward"}, {"reentrant": False, "overlap": "none"}],
)
def test_activations_computed_again_in_backward(results: Any) -> None:
    assert_equal(results, simulate("decentlam", N, 4, model=mlp, loss=mlp_loss))


def compiled(process_group: Group, backend: str) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = mlp(seed=node)
    optimizer = build("decentlam", model, process_group)
    fast = torch.compile(model, backend=backend)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        mlp_loss(fast, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


@scenarios.run(compiled, every(backend=["aot_eager"]))
def test_compiled_model(results: Any) -> None:
    assert_equal(results, simulate("decentlam", N, 5, model=mlp, loss=mlp_loss))


inductor = Scenarios(2)
inductor.add("inductor", compiled, backend="inductor")


@pytest.mark.slow
def test_model_compiled_with_inductor() -> None:
    expected = simulate("decentlam", 2, 5, model=mlp, loss=mlp_loss)
    assert_equal(inductor.outcomes("inductor"), expected)
