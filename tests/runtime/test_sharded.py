"""Nodes whose model FSDP2 has sharded: the same run as with whole models, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from decentlam.topology import Topology, ring
from tests.helpers.processes import Scenarios, every
from tests.helpers.quadratic import CLASSES, assert_equal, build, node_loss, simulate

NODES, SHARDS, STEPS = 2, 2, 50
scenarios = Scenarios(NODES * SHARDS, own_group=False)


@functools.cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (NODES, SHARDS), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Layers that two processes cannot share evenly, one of which only the first has."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        for p in self.layers.parameters():
            nn.init.normal_(p, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of one process on data of its own."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    return (model(x) - x.sum(1, keepdim=True).sin() - rank).square().mean()


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for layer in model.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh()["shard"], **options)
    return fully_shard(model, mesh=mesh()["shard"], **options)


def whole(tensors: Any) -> Tensor:
    """All of some DTensors, flat."""
    return torch.cat([t.detach().full_tensor().reshape(-1) for t in tensors])


def changing(step: int) -> Any:
    return ring(NODES).lazy(0.3 + 0.1 * (step % 5)).sparse(0)


TOPOLOGIES = {"ring": "ring", "changing": Topology("changing", NODES, None, changing)}


def trained(method: str, topology: str = "ring", **options: Any) -> list[Tensor]:
    rank, model = dist.get_rank(), shard(Net())
    optimizer = build(
        method, model, None, topology=TOPOLOGIES[topology], mesh=mesh()["replicate"], **options
    )
    trajectory = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        trajectory.append(whole(model.parameters()))
    return trajectory


CASES = [
    *every(method=list(CLASSES), topology=list(TOPOLOGIES), overlap=["none"]),
    {"method": "decentlam", "topology": "changing", "overlap": "backward"},
    {"method": "awc-dmsgd", "topology": "ring", "overlap": "backward"},
]


@scenarios.run(trained, CASES)
def test_two_nodes_of_two_shards_are_two_whole_nodes(
    results: list[list[Tensor]], method: str, topology: str
) -> None:
    expected = simulate(
        method,
        NODES,
        STEPS,
        model=Net,
        loss=node_loss(SHARDS, loss_of),
        topology=TOPOLOGIES[topology],
    )
    assert_equal(results, expected)
