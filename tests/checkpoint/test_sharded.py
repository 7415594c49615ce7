"""Checkpoints of nodes whose model is sharded: to the bit, and with other numbers of shards."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import decentlam
from tests.helpers.processes import run_processes
from tests.runtime.test_sharded import Net, loss_of

SAVED_AT, STEPS = 4, 7


def build(nodes: int, shards: int) -> tuple[nn.Module, Any]:
    """Return a model cut into so many shards, none if one, and its optimizer."""
    model, options = Net(), {}
    if shards > 1:
        mesh = init_device_mesh("cpu", (nodes, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model.layers[0], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        options["mesh"] = mesh["replicate"]
    optimizer = decentlam.DecentLaM(
        model.parameters(), lr=0.05, stable="ignore", **options, topology=pairs(nodes)
    )
    return model, optimizer


def pairs(nodes: int) -> Any:
    return decentlam.topology.ring(nodes).lazy(0.5)


def train(model: nn.Module, optimizer: Any, steps: range) -> Tensor:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return whole(model.parameters())


def velocity(optimizer: Any) -> Tensor:
    return whole(state["v"] for state in optimizer.state.values())


def whole(tensors: Iterable[Any]) -> Tensor:
    return torch.cat(
        [
            (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().reshape(-1)
            for t in tensors
        ]
    )


def save(directory: str, nodes: int, shards: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return model and velocity of this node where it is saved, and the model at the end."""
    model, optimizer = build(nodes, shards)
    at_save = train(model, optimizer, range(SAVED_AT))
    model(torch.ones(1, 5, dtype=torch.float64))  # FSDP keeps what it gathers for that
    decentlam.save_checkpoint(directory, model=model, optimizer=optimizer)
    return at_save, velocity(optimizer), train(model, optimizer, range(SAVED_AT, STEPS))


def load(directory: str, nodes: int, shards: int) -> tuple[Any, Tensor, Tensor, Tensor]:
    model, optimizer = build(nodes, shards)
    found = decentlam.load_checkpoint(directory, model=model, optimizer=optimizer)
    at_load = flat(model), velocity(optimizer)
    return found, *at_load, train(model, optimizer, range(SAVED_AT, STEPS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for name, nodes, shards in (("2x2", 2, 2), ("2x1", 2, 1)):
        path = tmp_path_factory.mktemp(name)
        found[name] = path, run_processes(save, nodes * shards, (str(path), nodes, shards))
    return found


def test_the_same_layout_goes_on_to_the_bit(saved: dict[str, Any]) -> None:
    path, before = saved["2x2"]
    files = sorted(p.name for p in next(Path(path).iterdir()).glob("*.pt"))
    assert files == [f"process-{rank:05d}.pt" for rank in range(4)]
    for (_, _, expected), (facts, *_, found) in zip(
        before, run_processes(load, 4, (str(path), 2, 2)), strict=True
    ):
        assert facts == decentlam.Resumed(SAVED_AT, 2, 2, averaged=False)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "nodes", "shards"), [("2x2", 2, 1), ("2x1", 2, 2)])
def test_nodes_go_on_with_another_number_of_shards(
    saved: dict[str, Any], name: str, nodes: int, shards: int
) -> None:
    path, before = saved[name]
    each = len(before) // 2
    found = run_processes(load, nodes * shards, (str(path), nodes, shards))
    for rank, (facts, x, v, _) in enumerate(found):
        expected_x, expected_v, _ = before[rank // shards * each]
        assert not facts.averaged
        assert torch.equal(x, expected_x) and torch.equal(v, expected_v)


def test_another_number_of_nodes_starts_from_the_average(saved: dict[str, Any]) -> None:
    path, before = saved["2x2"]
    for facts, x, v, _ in run_processes(load, 6, (str(path), 3, 2)):
        assert facts.averaged
        for found, k in ((x, 0), (v, 1)):
            mean = (before[0][k] + before[2][k]) / 2
            assert (found - mean).abs().max() < 1e-12
