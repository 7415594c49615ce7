"""Nodes whose model FSDP2 has sharded: the same run as with whole models, and what is refused."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import decentlam
from decentlam.topology import Topology, ring
from tests.helpers.processes import Scenarios, every, message_of
from tests.helpers.quadratic import CLASSES, assert_equal, build, node_loss, simulate
from tests.helpers.quadratic import clipped as clip_to

NODES, SHARDS, STEPS = 2, 2, 20
parity, scenarios = (Scenarios(NODES * SHARDS, own_group=False) for _ in range(2))


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
    rank, model = dist.get_rank(), fully_shard(Net(), mesh=mesh()["shard"])
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
    *every(method=list(CLASSES), topology=["changing"], overlap=["none"]),
    {"method": "decentlam", "topology": "changing", "overlap": "backward"},
    {"method": "awc-dmsgd", "topology": "ring", "overlap": "backward"},
]


@pytest.mark.system
@parity.run(trained, CASES)
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


# The whole node ---------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, method: str = "decentlam", **options: Any) -> Any:
    return build(method, model, None, **{"mesh": mesh()["replicate"], "overlap": "none", **options})


def beside_whole(method: str, **options: Any) -> float:
    """Train nodes of shards and nodes of whole models; return how far apart they ever are."""
    rank = dist.get_rank()
    models = [shard(Net()), Net()]
    options = {"mesh": mesh()["replicate"], "topology": "bipartite-random-match", **options}
    first, second = (optimizer_of(model, method, **options) for model in models)
    apart = 0.0
    for step in range(20):
        for optimizer, loss in (
            (first, loss_of(models[0], rank, step)),
            (second, node_loss(SHARDS, loss_of)(models[1], rank // SHARDS, step)),
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        flat = torch.cat([p.detach().reshape(-1) for p in models[1].parameters()])
        apart = max(apart, (whole(models[0].parameters()) - flat).abs().max().item())
    return apart


OPTIONS = [
    {"method": "decentlam", "message_dtype": torch.float16},
    {"method": "adamw", "message_dtype": torch.bfloat16},
    {"method": "decentlam", "shared_memory": True},
]


@scenarios.run(beside_whole, OPTIONS)
def test_messages_of_16_bits_and_shared_memory_change_nothing(results: list[float]) -> None:
    assert max(results) < 1e-12


def clipped(max_norm: float) -> list[Tensor]:
    return trained("dmsgd", overlap="none", max_grad_norm=max_norm)


@scenarios.run(clipped, [{"max_norm": 0.5}])
def test_clipping_sees_the_norm_of_the_whole_node(
    results: list[list[Tensor]], max_norm: float
) -> None:
    loss = node_loss(SHARDS, loss_of)
    expected = simulate("dmsgd", NODES, STEPS, model=Net, loss=loss, change=clip_to(max_norm))
    assert_equal(results, expected)
    free = simulate("dmsgd", NODES, STEPS, model=Net, loss=loss)
    assert (free[-1] - expected[-1]).abs().max() > 1e-3


def skipped() -> bool:
    """One element of one gradient is NaN on one process; return whether this one left it out."""
    rank, model = dist.get_rank(), shard(Net())
    optimizer = optimizer_of(model, nonfinite="skip")
    loss_of(model, rank, 0).backward()
    if rank == 1:
        next(model.parameters()).grad.to_local()[0, 0] = torch.nan
    optimizer.step()
    return bool(optimizer.statistics.skipped)


@scenarios.run(skipped)
def test_a_gradient_that_is_not_finite_is_left_out_by_the_whole_node(results: list[bool]) -> None:
    assert results == [True, True, False, False]


def refused_by_the_node() -> str:
    """Node 0 refuses a NaN that only process 1 has; the other node is told by its timeout."""
    rank, model = dist.get_rank(), shard(Net())
    optimizer = optimizer_of(model, timeout_seconds=3.0)
    loss_of(model, rank, 0).backward()
    if rank == 1:
        next(model.parameters()).grad.to_local()[0, 0] = torch.nan
    return message_of(optimizer.step)


def test_all_processes_of_a_node_refuse_what_one_of_them_must() -> None:
    first, second, *others = scenarios.outcomes("refused by the node")
    assert "another process of this node" in first and first.startswith("NonFiniteError")
    assert "layers.0.weight became NaN or infinite" in second
    assert all(error.startswith("ExchangeError") for error in others)


def looked_at() -> dict[str, Any]:
    """Average, measure and merge models that differ; forwards in between leave what FSDP gathers
    in memory, and must not be seen later."""
    rank, model = dist.get_rank(), shard(Net())
    model.register_buffer("statistic", torch.tensor(float(rank)))
    optimizer = optimizer_of(model, topology=TOPOLOGIES["changing"])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    x = torch.ones(2, 5, dtype=torch.float64)
    own, own_out = whole(model.parameters()), model(x).detach()
    found: dict[str, Any] = {"own": own, "distance": optimizer.consensus_distance()}
    with optimizer.averaged(model):
        found["mean out"] = model(x).detach()
        assert model.statistic == 1.5  # of all four processes
    assert model.statistic == rank and torch.equal(model(x).detach(), own_out)
    with optimizer.averaged(model):
        found["mean"] = whole(model.parameters())
    model_reshard(model)
    assert torch.equal(whole(model.parameters()), own)
    optimizer.merge()
    found["merged out"] = model(x).detach()
    model_reshard(model)
    found["merged"] = whole(model.parameters())
    optimizer.zero_grad()
    loss_of(model, rank, 3).backward()
    optimizer.step()
    found["after"] = whole(model.parameters())
    return found


def model_reshard(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


@scenarios.run(looked_at)
def test_averages_are_those_of_all_nodes_and_seen_by_the_next_forward(
    results: list[dict[str, Any]],
) -> None:
    own = torch.stack([results[0]["own"], results[2]["own"]])
    mean = own.mean(0)
    distance = (own - mean).square().sum(1).mean().sqrt().item()
    assert distance > 1e-3
    net = Net()
    nn.utils.vector_to_parameters(mean, net.parameters())
    expected = net(torch.ones(2, 5, dtype=torch.float64)).detach()
    for found in results:
        assert found["distance"] == pytest.approx(distance, rel=1e-12)
        assert (found["mean"] - mean).abs().max() < 1e-12
        assert (found["merged"] - mean).abs().max() < 1e-12
        assert (found["mean out"] - expected).abs().max() < 1e-12
        assert (found["merged out"] - expected).abs().max() < 1e-12
        assert (found["after"] - found["merged"]).abs().max() < 1.0


# What FSDP offers -------------------------------------------------------------------------------


def with_fsdp(case: str) -> list[Tensor]:
    """Train ten steps with an option of fully_shard; the last is a change by hand."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {
        "keeps the gathered": {"reshard_after_forward": False},
        "mixed precision": {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        },
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }.get(case, {})
    rank, model = dist.get_rank(), shard(Net(), **options)
    optimizer = optimizer_of(model, overlap="backward" if case == "accumulated" else "none")
    trajectory = []
    for step in range(10):
        optimizer.zero_grad()
        if case == "accumulated":
            model.set_requires_gradient_sync(False)
            with optimizer.no_sync():
                (loss_of(model, rank, step) / 2).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model, rank, step) / 2).backward()
        else:
            loss_of(model, rank, step).backward()
        optimizer.step()
        trajectory.append(whole(model.parameters()))
    return trajectory


FSDP = ["plain", "keeps the gathered", "mixed precision", "offloaded", "accumulated"]


@scenarios.run(with_fsdp, [{"case": case} for case in FSDP])
def test_options_of_fully_shard_work(results: list[list[Tensor]], case: str) -> None:
    loss = node_loss(SHARDS, loss_of)
    expected = simulate("decentlam", NODES, 10, model=Net, loss=loss)
    assert_equal(results, expected, 1e-5 if case == "mixed precision" else 1e-12)


# State ------------------------------------------------------------------------------------------


def kept() -> dict[str, Any]:
    """Look at the state, and take it over in new optimizers in torch's two ways."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    rank = dist.get_rank()

    def go_on(model: nn.Module, optimizer: Any, steps: range) -> Tensor:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return whole(model.parameters())

    model = shard(Net())
    optimizer = optimizer_of(model)
    go_on(model, optimizer, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    by_name = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    weights = [p.detach().clone() for p in model.parameters()]
    p, state = next(iter(optimizer.state.items()))
    found: dict[str, Any] = {
        "kinds": (isinstance(state["v"], DTensor), state["v"].placements == p.placements),
        "names": sorted(by_name["state"]),
        "expected": go_on(model, optimizer, range(4, 7)),
    }
    for way in ("load_state_dict", "set_optimizer_state_dict"):
        model = shard(Net())
        optimizer = optimizer_of(model)
        with torch.no_grad():
            for mine, value in zip(model.parameters(), weights, strict=True):
                mine.copy_(value)
        if way == "load_state_dict":
            optimizer.load_state_dict(saved)
        else:
            set_optimizer_state_dict(model, optimizer, by_name)
        found[way] = go_on(model, optimizer, range(4, 7))
    return found


@scenarios.run(kept)
def test_state_is_in_dtensors_and_taken_over_by_torchs_own_functions(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        assert found["kinds"] == (True, True)
        assert found["names"] == [
            "layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight",
        ]  # fmt: skip
        for way in ("load_state_dict", "set_optimizer_state_dict"):
            assert torch.equal(found[way], found["expected"]), way


# Costs ------------------------------------------------------------------------------------------


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def sent_in_a_step() -> int:
    model = shard(Even())
    optimizer = optimizer_of(model, bucket_bytes=None)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return optimizer.statistics.bytes_sent


@scenarios.run(sent_in_a_step)
def test_a_process_sends_its_share(results: list[int]) -> None:
    assert results == [2 * 64 * 64 * 4 // SHARDS] * NODES * SHARDS


# Refusals ---------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """Return what is said to those who build what cannot be trained."""
    rank, names = dist.get_rank(), ("replicate", "shard")
    model, both = shard(Net()), Net()
    fully_shard(both, mesh=mesh())
    mixed = Net()
    fully_shard(mixed.layers[0], mesh=mesh()["shard"])
    meshes = Net()
    fully_shard(meshes.layers[0], mesh=mesh()["shard"])
    fully_shard(meshes.layers[2], mesh=mesh()["replicate"])
    tensor_parallel = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    tensor_parallel = parallelize_module(tensor_parallel, mesh()["shard"], plan)
    other = shard(Net()) if rank < SHARDS else Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    join = optimizer_of(model)
    builds: dict[str, Callable[[], Any]] = {
        "hsdp": lambda: optimizer_of(both),
        "mixed": lambda: optimizer_of(mixed),
        "meshes": lambda: optimizer_of(meshes),
        "tensor parallel": lambda: optimizer_of(tensor_parallel),
        "no mesh": lambda: optimizer_of(model, mesh=None),
        "two dimensions": lambda: optimizer_of(model, mesh=mesh()),
        "a list": lambda: optimizer_of(model, mesh=[0, 2]),
        "twice": lambda: decentlam.DSGD(
            model.parameters(), mesh=mesh()["replicate"], process_group=dist.group.WORLD
        ),
        "several per node": lambda: optimizer_of(model, processes_per_node=2),
        "elastic": lambda: optimizer_of(model, elastic=True, mesh=None, overlap="none"),
        "not sharded there": lambda: optimizer_of(other),
        "another rate": lambda: optimizer_of(model, lr=0.1 * (1 + rank % SHARDS)),
        "local steps": lambda: decentlam.LocalSteps(sgd),
        "join": lambda: Join([join]).__enter__(),
    }
    assert names == mesh().mesh_dim_names
    return {name: message_of(call) for name, call in builds.items()}


REFUSED = {
    "hsdp": 'layers.0.weight is placed (R, S(0)): fully_shard with a mesh of two.*mesh["shard"]',
    "mixed": "layers.2.weight is no DTensor, but layers.0.weight is",
    "meshes": "layers.2.weight is sharded over another mesh than layers.0.weight",
    "tensor parallel": "tensor parallelism is not supported",
    "no mesh": 'they have different shards of one model.*mesh=mesh["replicate"]',
    "two dimensions": 'mesh must have one dimension.*mesh["replicate"]',
    "a list": "mesh must be a DeviceMesh of one dimension",
    "twice": "mesh and process_group mean the same",
    "several per node": "processes_per_node is for models that are not sharded",
    "elastic": "elastic=True",
    "not sharded there": "do not agree on the run: process 1 has",
    "another rate": "process 1 has lr of group 0 = 0.2, process 0 has 0.1",
    "local steps": "LocalSteps is for models that are not sharded",
    "join": "Join works with one process per node, and here a node has 2",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_the_cure(case: str) -> None:
    for said in scenarios.outcomes("refusals {}"):
        wanted = re.escape(REFUSED[case]).replace(r"\.\*", ".*")
        assert re.search(wanted, said[case]), said[case]


scenarios.add("refusals {}", refusals)
scenarios.add("refused by the node", refused_by_the_node)  # the last: connections are broken then
