"""The branch for NCCL without a GPU: its values, its order of posts, and that it waits for nothing.

gloo stands in for NCCL and fake tensors for a GPU. What only a GPU can show is in docs/runtime.md.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import runs
import runs_batched as batched
import runs_nodes
import runs_steps
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import decentlam
from decentlam.algorithms import kernels
from decentlam.exchange.network import Network

LOW = {"momentum": 0.3}
HYPER: dict[str, dict[str, Any]] = {
    "dsgd": {},
    "pmsgd-lars": {"lars": True, "momentum": 0.8},
    "slowmo": {"momentum": 0.3, "tau": 5, "inner_momentum": "average"},
}
STATIC = [(m, "ring", overlap) for m, overlap in zip(runs.CLASSES, itertools.cycle((True, False)))]
CHANGING = [
    (method, "one-peer-hypercube" if method in ("d2-dmsgd",) else topology, True)
    for method, topology in zip(
        runs.CLASSES, itertools.cycle(("one-peer-hypercube", "bipartite-random-match"))
    )
]
CASES = [*STATIC, *CHANGING]
NODES = ["decentlam", "da-dmsgd", "awc-dmsgd", "slowmo", "pmsgd"]


def options_of(method: str, topology: str, overlap: bool) -> dict[str, Any]:
    return {
        "topology": topology,
        "overlap": overlap,
        "bucket_bytes": 100,
        "timeout_seconds": runs.HANG_SECONDS,
        "stable": "ignore",
        **HYPER.get(method, LOW),
    }


@cache
def found(nodes: int) -> list[Any]:
    listed = [
        (str(case), batched.trained, {"method": case[0], "steps": runs.STEPS, "options": options})
        for case in (CASES if nodes == 4 else RESTING)
        for options in [options_of(*case)]
    ]
    if nodes == 4:
        for method in NODES:
            options = {"topology": "ring", "overlap": True, "processes_per_node": 2}
            listed.append(
                (f"nodes {method}", batched.in_nodes, {"method": method, "options": options})
            )
        for method in runs.CLASSES:
            arguments = {"method": method, "topology": "ring"}
            listed.append((f"looks {method}", batched.looks, arguments))
    return runs.run_processes(runs.run_scenarios, nodes, (listed,))


RESTING = [("decentlam", "bipartite-random-match", True), ("awc-dmsgd", "mesh", True)]


@pytest.mark.parametrize(
    ("nodes", "case"),
    [*((4, case) for case in CASES), *((5, case) for case in RESTING)],
    ids=lambda value: value if isinstance(value, int) else "-".join(map(str, value)),
)
def test_takes_the_simulators_steps(nodes: int, case: tuple[str, str, bool]) -> None:
    method, topology, _ = case
    rows = runs.outcomes(found(nodes), str(case))
    expected = runs.simulate_quadratic(
        method, topology, nodes, runs.STEPS, **HYPER.get(method, LOW)
    )
    runs.assert_equal([trajectory for trajectory, _ in rows], expected)
    check_order([posts for _, posts in rows])


@pytest.mark.parametrize("method", NODES)
def test_nodes_of_several_processes(method: str) -> None:
    rows = runs.outcomes(found(4), f"nodes {method}")
    per_node = 1 if method == "pmsgd" else 2
    loss = runs_nodes.node_loss(per_node)
    expected = runs_steps.simulate(method, 4 // per_node, runs.STEPS, loss=loss, lr=runs.lr_at)
    for row, (trajectory, _) in enumerate(rows):
        for x, real in zip(expected, trajectory, strict=True):
            assert (x[row // per_node] - real).abs().max() < 1e-12
    check_order([posts for _, posts in rows])


def check_order(everyone: list[list[batched.Post]]) -> None:
    """NCCL matches by order alone: the sends of one end are the receives of the other, and each
    communicator's collectives come in one order, never between two halves of an exchange."""
    between: dict[tuple[int, int, str], list[Any]] = defaultdict(list)
    collectives: dict[str, list[list[Any]]] = defaultdict(list)
    kinds: dict[str, set[str]] = defaultdict(set)
    for rank, posts in enumerate(everyone):
        own: dict[str, list[Any]] = defaultdict(list)
        for group, what, facts in posts:
            kinds[group].add(what)
            if what != "batch":
                own[group].append((what, facts))
                continue
            for way, peer, shape in facts:
                ends = (rank, peer) if way == "send" else (peer, rank)
                between[*ends, way].append(shape)
        for group, listed in own.items():
            collectives[group].append(listed)
    for sender, receiver, _ in list(between):
        assert between[sender, receiver, "send"] == between[sender, receiver, "receive"]
    for listed in collectives.values():
        assert all(one == listed[0] for one in listed)
    for group, what in kinds.items():  # parameters are made equal at the start, before any batch
        assert "batch" not in what or what <= {"batch", "broadcast"}, group


@pytest.mark.parametrize("method", runs.CLASSES)
def test_nothing_waits_for_the_device(method: str) -> None:
    assert runs.outcomes(found(4), f"looks {method}") == [{}] * 4


several = runs.Scenarios(4)
for method in ("decentlam", "pmsgd", "awc-dmsgd"):
    several.add(f"not finite {method}", batched.not_finite, method=method)


@pytest.mark.parametrize("method", ["decentlam", "pmsgd", "awc-dmsgd"])
def test_nan_is_reported_one_step_later_and_reaches_nobody(method: str) -> None:
    results = several.outcomes(f"not finite {method}")
    assert all(finite for _, finite in results)
    said = [text for text, _ in results]
    assert said[1].startswith("NonFiniteError: node 1, step 2") and "no neighbor" in said[1]
    assert said[0] == said[2] == said[3] == "nothing was raised"


# On tensors of a GPU that is not there ----------------------------------------------------------


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of four processes with NCCL, as far as Python can tell; tensors have no values."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(Network, "is_nccl", property(lambda network: network.group is not None))
    monkeypatch.setattr(Network, "gather", lambda network, value: [value] * 4)  # its own looks
    monkeypatch.setattr(kernels, "_fused_sgd", None)  # it cannot be run on fake tensors
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("overlap", ["none", "backward"])
@pytest.mark.parametrize("method", runs.CLASSES)
def test_tensors_stay_on_the_device(fake_gpus: None, method: str, overlap: Any) -> None:
    """A look at a value, or two tensors of different devices in one operation, is an error here."""
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 3))
    more = {"lars": True} if method == "pmsgd-lars" else {}
    optimizer = runs.CLASSES[method](
        model.parameters(),
        lr=0.0,
        topology=decentlam.topology.ring(4),
        overlap=overlap,
        nonfinite="ignore",
        stable="ignore",  # the analysis looks at values
        **more,
    )
    assert isinstance(optimizer, decentlam.DecentralizedOptimizer)
    for _ in range(2):
        optimizer.zero_grad()
        for round in optimizer.runtime.rounds:  # as backward does, which needs a driver
            for i, p in enumerate(round.bucket.params):
                p.grad = torch.randn_like(p)
                optimizer.runtime.on_gradient(round, i)
        optimizer.step()
    assert {bucket.x.device.type for bucket in optimizer.runtime.buckets} == {"cuda"}
