"""The branch for NCCL without a GPU: its values, its order of posts, and that it waits for nothing.

gloo stands in for NCCL and fake tensors for a GPU. What only a GPU can show is in docs/runtime.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
from runs_batched import Post
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import decentlam
from decentlam.algorithms import kernels
from decentlam.exchange.network import Network
from decentlam.options import usual_bucket_bytes
from decentlam.runtime import finite
from decentlam.runtime.finite import DeferredLook
from decentlam.runtime.gradients import WholeGradient
from decentlam.runtime.mistakes import EqualMessages

LOW = {"momentum": 0.3}
HYPER: dict[str, dict[str, Any]] = {
    "dsgd": {},
    "pmsgd-lars": {"lars": True, "momentum": 0.8},
    "slowmo": {"momentum": 0.3, "tau": 5, "inner_momentum": "average"},
}
STATIC = [(m, "ring", overlap) for m, overlap in zip(runs.CLASSES, itertools.cycle((True, False)))]
PAIRS = "bipartite-random-match"
AVERAGED = ("pmsgd", "pmsgd-lars")  # exactly, by everyone: no neighbors
MIXING = [method for method in runs.CLASSES if method not in AVERAGED]
SYMMETRIC = ("d2-dmsgd", "decentlam", "decentlam-steady")  # what they need; others may be directed
CHANGING = [
    (method, "one-peer-hypercube" if method in SYMMETRIC else "one-peer-exponential", True)
    for method in MIXING
]
CASES = [*STATIC, *CHANGING]
# Methods that differ in kind; with 16 bits the others are slow.
KINDS = ("dmsgd", "awc-dmsgd", "slowmo", "decentlam", "decentlam-steady", "gt-dmsgd")
# Of 5 nodes one rests in each step of random pairs; in a mesh they have one or two neighbors.
RESTING = [*((method, PAIRS, True) for method in KINDS), ("awc-dmsgd", "mesh", True)]
NODES = [method for method in runs.CLASSES if method != "pmsgd-lars"]
IN_NODES = [*((method, "auto") for method in NODES), ("awc-dmsgd", "backward")]
BITS = {
    method: (dtype, topology)
    for method, dtype, topology in zip(
        MIXING,
        itertools.cycle((torch.float16, torch.bfloat16)),
        itertools.cycle((PAIRS, PAIRS, "ring", "ring")),
    )
}
by_kind = [runs.slow_if(method not in KINDS, method) for method in MIXING]


def options_of(method: str, topology: str, overlap: bool) -> dict[str, Any]:
    return {
        "topology": topology,
        "overlap": overlap,
        "bucket_bytes": 100,
        "timeout_seconds": runs.HANG_SECONDS,
        "stable": "ignore",
        **HYPER.get(method, LOW),
    }


def scenarios(nodes: int, slow: bool) -> Iterator[runs.Scenario]:
    """What one group of so many processes runs, one after the other."""
    if slow:
        for method in MIXING:
            if method not in KINDS:
                yield from with_16_bits(method)
        return
    for case in CASES if nodes == 4 else RESTING:
        arguments = {"method": case[0], "steps": runs.STEPS, "options": options_of(*case)}
        yield str(case), batched.trained, arguments
    if nodes == 5:
        return
    for method, overlap in IN_NODES:
        options = {"topology": "ring", "overlap": overlap, "processes_per_node": 2}
        yield f"nodes {method} {overlap}", batched.in_nodes, {"method": method, "options": options}
    options = {**options_of("pmsgd-lars", "ring", True), "processes_per_node": 2}
    arguments = {"method": "pmsgd-lars", "steps": runs.STEPS, "options": options}
    yield "nodes pmsgd-lars", batched.trained, arguments
    for method in KINDS:
        yield from with_16_bits(method)
    for name, arguments in LOOKS.items():
        yield f"looks {name}", batched.looks, arguments
    for method in runs.CLASSES:
        yield f"unused {method}", batched.unused, {"method": method}
    yield "exchanged", batched.exchanged, {}
    yield "measured", batched.measured, {}


def with_16_bits(method: str) -> Iterator[runs.Scenario]:
    dtype, topology = BITS[method]
    arguments = {"method": method, "dtype": dtype, "options": options_of(method, topology, True)}
    yield f"16 bits {method}", batched.rounded, arguments
    arguments = looking(method, topology=topology, message_dtype=dtype)
    yield f"looks 16 bits {method}", batched.looks, arguments


@cache
def found(nodes: int, slow: bool) -> list[Any]:
    return runs.run_processes(runs.run_scenarios, nodes, (list(scenarios(nodes, slow)),))


def outcomes(name: str, nodes: int = 4, slow: bool = False) -> list[Any]:
    return runs.outcomes(found(nodes, slow), name)


@pytest.mark.parametrize(
    ("nodes", "case"),
    [*((4, case) for case in CASES), *((5, case) for case in RESTING)],
    ids=lambda value: value if isinstance(value, int) else "-".join(map(str, value)),
)
def test_takes_the_simulators_steps(nodes: int, case: tuple[str, str, bool]) -> None:
    method, topology, _ = case
    rows = outcomes(str(case), nodes)
    expected = runs.simulate_quadratic(
        method, topology, nodes, runs.STEPS, **HYPER.get(method, LOW)
    )
    runs.assert_equal([trajectory for trajectory, _ in rows], expected)
    check_order([posts for _, posts in rows])


@pytest.mark.parametrize(("method", "overlap"), IN_NODES)
def test_nodes_of_several_processes(method: str, overlap: str) -> None:
    rows = outcomes(f"nodes {method} {overlap}")
    per_node = 1 if method == "pmsgd" else 2
    loss = runs_nodes.node_loss(per_node)
    expected = runs_steps.simulate(method, 4 // per_node, runs.STEPS, loss=loss, lr=runs.lr_at)
    for row, (trajectory, _) in enumerate(rows):
        for x, real in zip(expected, trajectory, strict=True):
            assert (x[row // per_node] - real).abs().max() < 1e-12
    check_order([posts for _, posts in rows])


def test_lars_takes_every_process_for_a_node() -> None:
    rows = outcomes("nodes pmsgd-lars")
    hyper = HYPER["pmsgd-lars"]
    expected = runs.simulate_quadratic("pmsgd-lars", "ring", 4, runs.STEPS, **hyper)
    runs.assert_equal([trajectory for trajectory, _ in rows], expected)
    check_order([posts for _, posts in rows])


def test_processes_without_a_scaler_ask_their_node_once() -> None:
    """In step 0, whether some of them have one. AWC-DmSGD sends nothing in backward, and may change
    its gradient until step()."""
    for _, posts in outcomes("nodes awc-dmsgd auto"):
        inside = next(post.group for post in posts if post.what == "reduce_scatter_tensor")
        assert [(post.group, post.what) for post in posts].count((inside, "all_reduce")) == 1


@pytest.mark.parametrize("method", by_kind)
def test_messages_of_16_bits_are_those_of_the_plain_branch(method: str) -> None:
    rows = outcomes(f"16 bits {method}", slow=method not in KINDS)
    assert all(runs.same(plain, batches) for plain, batches, _ in rows)
    check_order([posts for _, _, posts in rows])
    sent = {size[3] for _, _, posts in rows for p in posts if p.what == "batch" for size in p.sizes}
    assert sent == {str(BITS[method][0])}


# The rules of NCCL ------------------------------------------------------------------------------


def check_order(everyone: list[list[Post]]) -> None:
    """NCCL matches by order alone: any two processes post in one order what both take part in, on
    each communicator, and the sends of one end are the receives of the other."""
    for group in {post.group for posts in everyone for post in posts}:
        posted = [[post for post in posts if post.group == group] for posts in everyone]
        members = [rank for rank, listed in enumerate(posted) if listed]
        for one, other in itertools.combinations(members, 2):
            seen = [_between(posted[a], a, b) for a, b in ((one, other), (other, one))]
            assert seen[0] == seen[1], f"processes {one} and {other} differ on {group}"
        if any(post.what == "batch" for listed in posted for post in listed):
            assert group != WORLD, "messages in a group that the script has"
            check_batches([posted[rank] for rank in members])


def check_batches(posted: list[list[Post]]) -> None:
    """Of a communicator that carries messages: everyone begins with the same collective, then come
    the buckets of all steps in order, each in one batch with all that it sends and receives. A step
    may have exact averages over all nodes in their place, as SlowMo's, but not beside them."""
    kinds: dict[int, set[str]] = {}
    for listed in posted:
        assert (listed[0].what, listed[0].place) == ("all_reduce", None), "no warm-up"
        steps = list(itertools.dropwhile(lambda post: post.place is None, listed))
        assert all(post.place is not None for post in steps), "a collective between messages"
        places = [post.place for post in steps if post.place is not None]
        assert len(places) == len(set(places)), "two batches for one bucket of a step"
        assert places == sorted(places), "not in the order of steps and buckets"
        for (step, _), post in zip(places, steps, strict=True):
            kinds.setdefault(step, set()).add(post.what)
    assert all(len(kind) == 1 for kind in kinds.values()), "messages and averages in one step"


WORLD = "0"


def _between(posted: list[Post], me: int, other: int) -> list[Any]:
    """What two processes take part in, as one of them posts it."""
    found: list[Any] = []
    for post in posted:
        if post.what != "batch":
            found.append((post.what, post.facts))
            continue
        ways = [(way, size) for way, peer, *size in post.sizes if peer == other]
        both = sorted((me if way == "send" else other, *size) for way, size in ways)
        found += [(post.place, both)] if both else []
    return found


def batch(place: Any, *ways: tuple[str, int], dtype: str = "torch.float32") -> Post:
    """Of a log that is written by hand, as are those below."""
    sizes = tuple((way, peer, (3,), dtype) for way, peer in ways)
    return Post("ours", "batch", (place, sizes))


def collective(what: str = "all_reduce", place: Any = None, group: str = "ours") -> Post:
    return Post(group, what, (place, ((1,), "torch.float32")))


WARM_UP = collective()


def pair(*places: tuple[int, int]) -> list[list[Post]]:
    """Two processes that send each other one message at each place."""
    return [
        [WARM_UP, *(batch(place, ("receive", peer), ("send", peer)) for place in places)]
        for peer in (1, 0)
    ]


def ring_of_three(*kinds: tuple[str, ...]) -> list[list[Post]]:
    """Each sends to the next and receives from the one before, in one batch for each of `kinds`."""
    peers = [{"receive": (rank - 1) % 3, "send": (rank + 1) % 3} for rank in range(3)]
    return [
        [WARM_UP, *(batch((0, 0), *((way, ways[way]) for way in kind)) for kind in kinds)]
        for ways in peers
    ]


AVERAGE = collective(place=(1, 0))
GOOD = {
    "pair": pair((0, 0), (0, 1), (1, 0)),
    "directed": ring_of_three(("receive", "send")),
    "average in a step of its own": [[*posts, AVERAGE] for posts in pair((0, 0), (0, 1))],
    "more before the first message": [
        [WARM_UP, collective("all_gather"), *posts[1:]] for posts in pair((0, 0))
    ],
    "one rests": [*pair((0, 0)), [WARM_UP]],
    "script beside": [
        [*posts[:k], collective(group=WORLD), *posts[k:]]
        for k, posts in zip((2, 3), pair((0, 0), (0, 1)), strict=True)
    ],
}
HALF = batch((0, 0), ("receive", 0), ("send", 0), dtype="torch.float16")
DIFFER, TWICE, BETWEEN = "differ on ours", "two batches for one", "a collective between"
BAD = {
    "two batches for one bucket": (TWICE, pair((0, 0), (0, 0))),
    "receive and send in two batches": (TWICE, ring_of_three(("receive",), ("send",))),
    "nobody receives": (DIFFER, ring_of_three(("send",))),
    "another order at one end": (DIFFER, [pair((0, 0), (0, 1))[0], pair((0, 1), (0, 0))[1]]),
    "another order at both": ("not in the order", pair((0, 1), (0, 0))),
    "another step at one end": (DIFFER, [pair((0, 0))[0], pair((1, 0))[1]]),
    "another size at one end": (DIFFER, [pair((0, 0))[0], [WARM_UP, HALF]]),
    "a collective at one end": (DIFFER, [[*pair((0, 0))[0], collective()], pair((0, 0))[1]]),
    "a collective between buckets": (
        BETWEEN,
        [[*posts[:2], collective(), *posts[2:]] for posts in pair((0, 0), (0, 1))],
    ),
    "a collective after a step": (BETWEEN, [[*p, collective("broadcast")] for p in pair((0, 0))]),
    "an average beside messages": (
        "messages and averages",
        [[*posts, collective(place=(0, 1))] for posts in pair((0, 0))],
    ),
    "no warm-up": ("no warm-up", [posts[1:] for posts in pair((0, 0))]),
    "a batch of no bucket": (
        BETWEEN,
        [
            [*p, batch(None, ("send", 1 - i), ("receive", 1 - i))]
            for i, p in enumerate(pair((0, 0)))
        ],
    ),
    "messages in the script's group": (
        "the script has",
        [[post._replace(group=WORLD) for post in posts] for posts in pair((0, 0))],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_nccl_takes_passes_the_check_of_posts(name: str) -> None:
    check_order(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_may_hang_nccl_is_caught_by_the_check_of_posts(name: str) -> None:
    said, posts = BAD[name]
    with pytest.raises(AssertionError, match=said):
        check_order(posts)


# Nothing waits ----------------------------------------------------------------------------------

NONE: dict[str, int] = {}
ONE = {"_local_scalar_dense": 1}
PER_NODE = {"processes_per_node": 2}
CLIPPED = {"overlap": "none", "max_grad_norm": 0.1}


def looking(method: str, scaled: bool = False, **options: Any) -> dict[str, Any]:
    more = {"lars": True} if method == "pmsgd-lars" else {}
    more |= {"tau": 3} if method == "slowmo" else {}
    options = {"topology": "ring", **more, **options}
    return {"method": method, "options": options, "scaled": scaled}


LOOKS = {
    **{method: looking(method) for method in (*AVERAGED, "decentlam")},
    **{f"nodes {method}": looking(method, **PER_NODE) for method in NODES if method != "pmsgd"},
    "pairs": looking("decentlam", topology=PAIRS),
    "nodes 16 bits": looking("decentlam", message_dtype=torch.float16, **PER_NODE),
    "nodes none": looking("decentlam", overlap="none", **PER_NODE),
    "clipped pmsgd": looking("pmsgd", **CLIPPED),
    "clipped awc-dmsgd": looking("awc-dmsgd", **CLIPPED),
    "clipped nodes": looking("decentlam", **CLIPPED, **PER_NODE),
}
# What the documentation names: one look in each step.
LOOK_ONCE = {
    f"{how} {len(nodes)}": looking("decentlam", how == "scaler", overlap="none", **more, **nodes)
    for how, more in (("scaler", {}), ("skip", {"nonfinite": "skip"}))
    for nodes in ({}, PER_NODE)
}
LOOKS |= LOOK_ONCE


@pytest.mark.parametrize("name", LOOKS)
def test_nothing_waits_for_the_device(name: str) -> None:
    expected = ONE if name in LOOK_ONCE else NONE
    assert outcomes(f"looks {name}") == [[expected] * 2] * 4


@pytest.mark.parametrize("method", by_kind)
def test_nothing_waits_for_the_device_with_16_bits(method: str) -> None:
    looked = outcomes(f"looks 16 bits {method}", slow=method not in KINDS)
    assert looked == [[NONE] * 2] * 4


@pytest.mark.parametrize("method", runs.CLASSES)
def test_no_message_meets_a_collective_of_the_script(method: str) -> None:
    posts = outcomes(f"unused {method}")
    check_order(posts)
    theirs = Post(WORLD, "all_reduce", (None, ((2,), "torch.float32")))
    assert [listed.count(theirs) for listed in posts] == [3] * 4


def test_messages_outside_of_an_optimizer_have_a_group_of_their_own() -> None:
    results = outcomes("exchanged")
    assert [total for total, _ in results] == [3.0] * 4
    check_order([posts for _, posts in results])


def test_links_are_measured_as_messages_travel() -> None:
    results = outcomes("measured")
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


LEFT_OUT = [(how, per_node) for how in ("nan", "scaler") for per_node in (1, 2)]


@pytest.mark.parametrize(("how", "per_node"), LEFT_OUT)
def test_a_bad_gradient_of_one_process_is_left_out_by_its_node(how: str, per_node: int) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 3 // per_node and step == 2

    loss = runs_nodes.node_loss(per_node)
    expected = runs_steps.simulate("decentlam", 4 // per_node, 5, loss=loss, absent=absent)
    results = several.outcomes(f"left out {how} {per_node}")
    for rank, (trajectory, skipped, _) in enumerate(results):
        for x, real in zip(expected, trajectory, strict=True):
            assert (x[rank // per_node] - real).abs().max() < 1e-12
        assert skipped == [absent(rank // per_node, step) for step in range(5)]
    check_order([posts for _, _, posts in results])


several = runs.Scenarios(4)
several.add("moved", batched.moved)
for how, per_node in LEFT_OUT:
    several.add(f"left out {how} {per_node}", batched.left_out, how=how, per_node=per_node)
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
    "bfloat16": {"message_dtype": torch.bfloat16},
    "nodes": {"processes_per_node": 2},
    "nodes clipped": {"processes_per_node": 2, "max_grad_norm": 1.0},
    "decay": {"weight_decay": 0.1},
    "nesterov": {"nesterov": True},
    "clipped": {"max_grad_norm": 1.0},
}
FAKE = [
    *((method, overlap, "") for method in runs.CLASSES for overlap in ("none", "backward")),
    *((method, "backward", "decay") for method in runs.CLASSES),
    *((method, "backward", "float16") for method in ("dmsgd", "decentlam", "decentlam-steady")),
    *((method, "backward", "bfloat16") for method in ("awc-dmsgd", "decentlam", "gt-dmsgd")),
    *((method, "auto", "nodes") for method in (*KINDS, "pmsgd")),
    *((method, "none", "nodes clipped") for method in ("awc-dmsgd", "decentlam")),
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
    monkeypatch.setattr(WholeGradient, "_check_scaler", lambda *given: None)  # likewise
    monkeypatch.setattr(DeferredLook, "look", _told)
    TOLD.clear()
    per_node = MORE[more].get("processes_per_node", 1)
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 3))
    optimizer = runs.CLASSES[method](
        model.parameters(),
        lr=0.1,
        topology=decentlam.topology.ring(4 if method in AVERAGED else 4 // per_node),
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
