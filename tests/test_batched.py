"""The branch for NCCL without a GPU: its values, its order of posts, and that it waits for nothing.

gloo stands in for NCCL and fake tensors for a GPU. What only a GPU can show is in docs/runtime.md.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import runs
import runs_batched as batched
import runs_nodes
import runs_state
import runs_steps
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import decentlam
from decentlam.algorithms import kernels
from decentlam.exchange.network import Network
from decentlam.options import usual_bucket_bytes
from decentlam.runtime import finite
from decentlam.runtime.finite import DeferredLook
from decentlam.runtime.mistakes import EqualMessages

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
            listed.append((f"unused {method}", batched.unused, {"method": method}))
        listed.append(("exchanged", batched.exchanged, {}))
        listed.append(("measured", batched.measured, {}))
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
    """NCCL matches by order alone: any two processes post in one order what both take part in, on
    each communicator, and the sends of one end are the receives of the other. The first operation
    of a communicator is everyone's, and batches have one that the script does not know."""
    groups = {group for posts in everyone for group, _, _ in posts}
    for group in groups:
        posted = [[(w, facts) for name, w, facts in posts if name == group] for posts in everyone]
        members = [rank for rank, listed in enumerate(posted) if listed]
        for one, other in itertools.combinations(members, 2):
            seen = [_between(posted[a], a, b) for a, b in ((one, other), (other, one))]
            assert seen[0] == seen[1], (group, one, other)
        if any(what == "batch" for listed in posted for what, _ in listed):
            assert group != WORLD
            assert all(posted[rank][0][0] == "all_reduce" for rank in members)


WORLD = "0"


def _between(posted: list[Any], me: int, other: int) -> list[Any]:
    """What two processes take part in, as one of them posts it."""
    found = []
    for what, facts in posted:
        if what != "batch":
            found.append((what, facts))
            continue
        ways = [(way, shape) for way, peer, shape in facts if peer == other]
        both = [(me if way == "send" else other, shape) for way, shape in ways]
        found += [("batch", *sorted(both))] if both else []
    return found


@pytest.mark.parametrize("method", runs.CLASSES)
def test_nothing_waits_for_the_device(method: str) -> None:
    assert runs.outcomes(found(4), f"looks {method}") == [{}] * 4


@pytest.mark.parametrize("method", runs.CLASSES)
def test_no_message_meets_a_collective_of_the_script(method: str) -> None:
    posts = runs.outcomes(found(4), f"unused {method}")
    check_order(posts)
    theirs = [[p for p in listed if p == (WORLD, "all_reduce", (2,))] for listed in posts]
    assert [len(listed) for listed in theirs] == [3] * 4


def test_messages_outside_of_an_optimizer_have_a_group_of_their_own() -> None:
    results = runs.outcomes(found(4), "exchanged")
    assert [total for total, _ in results] == [3.0] * 4
    check_order([posts for _, posts in results])


def test_links_are_measured_as_messages_travel() -> None:
    results = runs.outcomes(found(4), "measured")
    assert [good for good, _ in results] == [True] * 4
    check_order([posts for _, posts in results])


def test_a_network_that_changes_and_a_copy_go_on() -> None:
    results = several.outcomes("moved")
    expected = runs_state.simulate_without_last("decentlam", 4, 3, 6)
    for rank, (trajectory, _, said) in enumerate(results[:3]):
        for x, real in zip(expected, trajectory[3:], strict=True):
            assert (x[rank] - real).abs().max() < 1e-12
        assert "process groups cannot be saved with it" in said, said
    check_order([posts for _, posts, _ in results])


@pytest.mark.parametrize("norm", [0.5, 1e6])
def test_a_norm_that_nobody_looks_at_clips_as_well(norm: float) -> None:
    for plain, on_gpu in several.outcomes(f"clipped {norm}"):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(plain, on_gpu, strict=True))


several = runs.Scenarios(4)
several.add("moved", batched.moved)
for norm in (0.5, 1e6):
    several.add(f"clipped {norm}", batched.clipped, norm=norm)
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
    monkeypatch.setattr(kernels, "_fused_sgd", _check_fused)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield
    dist.destroy_process_group()


def _check_fused(*lists: list[torch.Tensor], **numbers: Any) -> None:
    """What torch's fused kernel asks of its tensors on a GPU; it cannot be run on fake ones."""
    assert all(len(tensors) == 1 for tensors in lists) and len(lists) == 3
    flat = [tensor for tensors in lists for tensor in tensors]
    assert len({(t.device, t.dtype, t.shape, t.stride()) for t in flat}) == 1
    assert all(t.is_contiguous() and t.is_floating_point() for t in flat)
    assert all(isinstance(number, float | bool) for number in numbers.values())


class _Event:
    """Of a GPU that is not there."""

    def record(self, stream: Any) -> None:
        assert stream.type == "cuda"

    def synchronize(self) -> None:
        return


def _told(noted: Any, node: int) -> None:
    """In place of the look at flags that were copied to the host, which have no values here."""
    if noted._noted is not None:
        (_, on_host, copied), noted._noted = noted._noted, None
        assert on_host.device.type == "cpu" and isinstance(copied, _Event)
        copied.synchronize()
        TOLD.append(len(on_host))


TOLD: list[int] = []
MORE: dict[str, dict[str, Any]] = {
    "": {},
    "float16": {"message_dtype": torch.float16},
    "decay": {"weight_decay": 0.1},
    "nesterov": {"nesterov": True},
    "clipped": {"max_grad_norm": 1.0},
}
FAKE = [
    *((method, overlap, "") for method in runs.CLASSES for overlap in ("none", "backward")),
    *((method, "backward", "decay") for method in runs.CLASSES),
    *((method, "backward", "float16") for method in ("dmsgd", "decentlam", "decentlam-steady")),
    *((method, "backward", "nesterov") for method in ("pmsgd", "slowmo")),
    *((method, "none", "clipped") for method in ("pmsgd", "decentlam")),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("method", "overlap", "more"), FAKE)
def test_tensors_stay_on_the_device(
    fake_gpus: None, method: str, overlap: Any, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a value, or two tensors of different devices in one operation, is an error here."""
    monkeypatch.setattr(EqualMessages, "looking", False)  # it looks at values, in the first steps
    monkeypatch.setattr(DeferredLook, "look", _told)
    TOLD.clear()
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 3))
    optimizer = runs.CLASSES[method](
        model.parameters(),
        lr=0.1,
        topology=decentlam.topology.ring(4),
        overlap=overlap,
        stable="ignore",  # the analysis looks at values
        **({"lars": True} if method == "pmsgd-lars" else {}),
        **MORE[more],
    )
    assert isinstance(optimizer, decentlam.DecentralizedOptimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for round in optimizer.runtime.rounds:  # as backward does, which needs a driver
            for i, p in enumerate(round.bucket.params):
                p.grad = torch.randn_like(p)
                optimizer.runtime.on_gradient(round, i)
        optimizer.step()
    assert {bucket.x.device.type for bucket in optimizer.runtime.buckets} == {"cuda"}
    assert [len(optimizer.runtime.buckets)] * 2 == TOLD, "of each step, at the one after it"


def test_buckets_of_nccl_grow_to_those_of_ddp() -> None:
    assert usual_bucket_bytes(1 << 30) == 4 << 20
    assert usual_bucket_bytes(1 << 30, nccl=True) == 25 << 20
    assert usual_bucket_bytes(1 << 20, nccl=True) == usual_bucket_bytes(1 << 20)


def test_flags_see_every_value_that_is_not_finite() -> None:
    good = [torch.ones(3), -torch.ones(2, 2)]
    assert finite.flag(good, None) and finite.flag(good[:1], torch.tensor(True))
    assert not finite.flag(good, torch.tensor(False))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not finite.flag([*good, torch.tensor([1.0, bad])], None)
        assert not finite.flag([torch.tensor([bad, 1.0])], None)


def test_flags_of_two_devices_are_told_together(fake_gpus: None) -> None:
    deferred = DeferredLook()
    deferred.note(3, [torch.ones((), device=device).bool() for device in ("cuda:0", "cuda:1")])
    assert deferred._noted is not None and deferred._noted[1].shape == (2,)
