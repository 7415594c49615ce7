"""The branch for NCCL without a GPU: its values, its order of posts, and that it waits for nothing.

gloo stands in for NCCL and fake tensors for a GPU. docs/architecture.md says what only a GPU can
show.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import decentlam
from decentlam.algorithms import make
from decentlam.exchange.allreduce import AllReduce
from decentlam.exchange.neighbors import Neighbors
from decentlam.exchange.rounded import Rounded
from decentlam.network.network import Network, _connected
from decentlam.runtime import bucket, checks, gradients
from tests.helpers.nodes import bad_gradient
from tests.helpers.processes import HANG_SECONDS, Group, Scenarios, message_of
from tests.helpers.quadratic import (
    CLASSES,
    assert_equal,
    flat,
    node_loss,
    quadratic_loss,
    same,
    simulate,
    start,
    train,
)

Place = tuple[int, int]  # step and bucket
STEPS = 4  # SlowMo averages exactly in the third
AVERAGED = ("pmsgd", "pmsgd-lars", "pmadamw")  # exactly, by everyone: no neighbors
PAIRS = "bipartite-random-match"
# Methods that differ in kind: no gradient in the message, exact averages in between, one payload,
# two payloads.
KINDS = ("awc-dmsgd", "slowmo", "decentlam", "gt-dmsgd")
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "reduce_scatter_tensor",
)
WORLD = "0"


class Post(NamedTuple):
    """What a process asks of a communicator."""

    group: str
    what: str  # "batch", or the name of a collective
    place: Place | None  # of a message, or of an exact average over all nodes
    sizes: tuple[Any, ...]  # (shape, dtype); of a batch (way, peer, shape, dtype) for each


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, parameters on a CPU are treated as on a GPU: every gradient is gathered in its
    bucket, and nobody compares the values of the first steps."""
    with (
        unittest.mock.patch.object(bucket, "_LARGE", 1 << 62),
        unittest.mock.patch.object(checks, "_COMPARED", 0),
    ):
        yield


@contextlib.contextmanager
def batched() -> Iterator[list[Post]]:
    """Inside, every group counts as NCCL's; collects what is posted, in order."""
    posts: list[Post] = []
    place: list[Place | None] = [None]  # of what is being posted

    def recorded(collective: Callable[..., Any]) -> Callable[..., Any]:
        def post(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            rest = [a for a in args if not isinstance(a, dist.ProcessGroup)]
            group = next((a for a in args if isinstance(a, dist.ProcessGroup)), group)
            size = _size(tensor[0] if isinstance(tensor, list) else tensor)
            posts.append(Post(_name(group), collective.__name__, place[0], size))
            return collective(tensor, *rest, group=group, **options)

        return post

    def recorded_batch(operations: list[dist.P2POp]) -> Any:
        ways = ["send" if o.op is dist.isend else "receive" for o in operations]
        sizes = tuple((w, o.peer, *_size(o.tensor)) for w, o in zip(ways, operations, strict=True))
        posts.append(Post(_name(operations[0].group), "batch", place[0], sizes))
        return batch_isend_irecv(operations)

    def placed(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(exchange: Any, number: int, message: Tensor, step: int) -> Any:
            before, place[0] = place[0], (step, number)
            try:
                return send(exchange, number, message, step)
            finally:
                place[0] = before

        return call

    batch_isend_irecv = dist.batch_isend_irecv
    with as_on_a_gpu(), contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(unittest.mock.patch.object(owner, name, value))

        for name in COLLECTIVES:
            replace(dist, name, recorded(getattr(dist, name)))
        replace(dist, "batch_isend_irecv", recorded_batch)
        for exchange in (Neighbors, Rounded, AllReduce):
            replace(exchange, "send", placed(exchange.send))
        replace(Network, "is_nccl", property(lambda network: network.group is not None))
        yield posts


def _name(group: Any) -> str:
    return (group or dist.group.WORLD).group_name


def _size(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


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


def _between(posted: list[Post], me: int, other: int) -> list[Any]:
    """What two processes take part in, as one of them posts it."""
    found: list[Any] = []
    for post in posted:
        if post.what != "batch":
            found.append((post.what, post.place, post.sizes))
            continue
        ways = [(way, size) for way, peer, *size in post.sizes if peer == other]
        both = sorted((me if way == "send" else other, *size) for way, size in ways)
        found += [(post.place, both)] if both else []
    return found


# What the branch does ---------------------------------------------------------------------------


def trained(method: str, **options: Any) -> tuple[list[Tensor], list[Post]]:
    with batched() as posts:
        node, model, optimizer = start(None, method, **options)
        return train(optimizer, model, node, range(STEPS)), posts


def rounded(method: str, **options: Any) -> tuple[list[Tensor], list[Tensor], list[Post]]:
    """Messages of 16 bits by gloo's branch and by NCCL's, with the same arithmetic."""
    with as_on_a_gpu():
        node, model, optimizer = start(None, method, **options)
        plain = train(optimizer, model, node, range(STEPS))
    return (plain, *trained(method, **options))


def unused(method: str) -> list[Post]:
    """A script that sums something over all processes between backward and step, and on every node
    another parameter without a gradient: some buckets are sent in backward, others in step."""
    with batched() as posts:
        rank, model, optimizer = start(None, method, bucket_bytes=1)  # one for each parameter
        for step in range(3):
            optimizer.zero_grad()
            used = [w for i, w in enumerate(model.weights) if i != (rank + step) % 5]
            torch.stack([w.square().sum() for w in used]).sum().backward()
            dist.all_reduce(torch.zeros(2))
            optimizer.step()
        return posts


def exchanged() -> tuple[float, list[Post]]:
    """A mix outside of any optimizer: all ones, so that it stays that."""
    with batched() as posts:
        exchange = decentlam.neighbor_exchange("ring", timeout_seconds=HANG_SECONDS)
        message = torch.ones(1, 3)
        exchange.receive(0, message, 0)
        mixed = sum(weight * term for weight, term in exchange.send(0, message, 0).wait())
        return float(torch.as_tensor(mixed).sum()), posts


def copied(process_group: Group) -> str:
    """Return what unpickling says where the network is unknown; a copy here takes the same one."""
    with batched():
        node, model, optimizer = start(process_group, "decentlam")
        train(optimizer, model, node, range(3))
        assert copy.deepcopy(optimizer).network is optimizer.network  # it may not form a group
        data = pickle.dumps(optimizer)
        _connected.clear()  # as in another process
        return message_of(lambda: pickle.loads(data))


def clipped_twice(norm: float) -> list[list[Tensor]]:
    """The steps with max_grad_norm, by gloo's branch and by NCCL's."""
    found = []
    for branch in (contextlib.nullcontext, batched):
        with branch():
            node, model, optimizer = start(None, "decentlam", overlap="none", max_grad_norm=norm)
            found.append(train(optimizer, model, node, range(3)))
    return found


def left_out(how: str, per_node: int) -> tuple[list[Tensor], list[bool], list[Post]]:
    """The gradient of process 3 is bad at step 2, as a GradScaler or nonfinite="skip" find it."""
    with batched() as posts:
        return (*bad_gradient(None, per_node, how), posts)


def not_finite(process_group: Group, method: str, bad: float) -> tuple[str, bool]:
    """The gradient of node 1 turns bad in step 2: its error in the next step, and whether
    parameters are finite."""
    with batched():
        node, model, optimizer = start(process_group, method)
        said = "nothing was raised"
        for step in range(4):
            optimizer.zero_grad()
            loss = quadratic_loss(model, node, step)
            (loss * bad if (node, step) == (1, 2) else loss).backward()
            if step == 3 and node != 1:  # who waits for node 1 now would wait for long
                break
            said = message_of(optimizer.step)
        return said, bool(torch.isfinite(flat(model)).all())


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {}
for number, method in enumerate(CLASSES):
    CASES[f"{method} ring"] = (4, method, {"overlap": number % 2 == 0})
for method in KINDS:
    changing = "one-peer-hypercube" if make(method).needs_symmetric else "one-peer-exponential"
    CASES[f"{method} {changing}"] = (4, method, {"topology": changing})
for method in (*KINDS, "pmsgd"):
    CASES[f"nodes {method}"] = (4, method, {"processes_per_node": 2, "overlap": "auto"})
CASES["nodes awc-dmsgd backward"] = (4, "awc-dmsgd", {"processes_per_node": 2})
CASES["5 mesh"] = (5, "awc-dmsgd", {"topology": "mesh"})  # with one or two neighbors
CASES["5 decentlam"] = (5, "decentlam", {"topology": PAIRS})  # one rests
BITS = {
    method: {"message_dtype": dtype, "topology": topology}
    for method, dtype, topology in zip(
        KINDS,
        itertools.cycle((torch.float16, torch.bfloat16)),
        (PAIRS, "ring", "ring", PAIRS),
        strict=False,
    )
}
LEFT_OUT = [(how, per_node) for how in ("nan", "scaler") for per_node in (1, 2)]

groups = {processes: Scenarios(processes, own_group=False) for processes in (4, 5)}
scenarios = groups[4]
for name, (processes, method, options) in CASES.items():
    groups[processes].add(name, trained, method=method, **options)
for method, options in BITS.items():
    scenarios.add(f"16 bits {method}", rounded, method=method, **options)
UNUSED = (*KINDS, "pmsgd")
for method in UNUSED:
    scenarios.add(f"unused {method}", unused, method=method)
scenarios.add("exchanged", exchanged)
for how, per_node in LEFT_OUT:
    scenarios.add(f"left out {how} {per_node}", left_out, how=how, per_node=per_node)
for norm in (0.5, 1e6):
    scenarios.add(f"clipped {norm}", clipped_twice, norm=norm)


@pytest.mark.parametrize("name", CASES)
def test_takes_the_simulators_steps(name: str) -> None:
    processes, method, options = CASES[name]
    per_node = 1 if method in AVERAGED else options.get("processes_per_node", 1)
    expected = simulate(
        method,
        processes // per_node,
        STEPS,
        loss=node_loss(per_node),
        topology=options.get("topology", "ring"),
    )
    rows = groups[processes].outcomes(name)
    assert_equal([trajectory for trajectory, _ in rows], expected)
    check_order([posts for _, posts in rows])


def test_processes_without_a_scaler_ask_their_node_once() -> None:
    """In step 0, whether some of them have one. AWC-DmSGD sends nothing in backward, and may change
    its gradient until step()."""
    for _, posts in scenarios.outcomes("nodes awc-dmsgd"):
        inside = next(post.group for post in posts if post.what == "reduce_scatter_tensor")
        assert [(post.group, post.what) for post in posts].count((inside, "all_reduce")) == 1


@pytest.mark.parametrize("method", BITS)
def test_messages_of_16_bits_are_those_of_the_plain_branch(method: str) -> None:
    rows = scenarios.outcomes(f"16 bits {method}")
    assert all(same(plain, batches) for plain, batches, _ in rows)
    check_order([posts for _, _, posts in rows])
    sent = {size[3] for _, _, posts in rows for p in posts if p.what == "batch" for size in p.sizes}
    assert sent == {str(BITS[method]["message_dtype"])}


@pytest.mark.parametrize("method", UNUSED)
def test_no_message_meets_a_collective_of_the_script(method: str) -> None:
    posts = scenarios.outcomes(f"unused {method}")
    check_order(posts)
    theirs = Post(WORLD, "all_reduce", None, ((2,), "torch.float32"))
    assert [listed.count(theirs) for listed in posts] == [3] * 4


def test_messages_outside_of_an_optimizer_have_a_group_of_their_own() -> None:
    results = scenarios.outcomes("exchanged")
    assert [total for total, _ in results] == [3.0] * 4
    check_order([posts for _, posts in results])


@pytest.mark.parametrize("norm", [0.5, 1e6])
def test_a_norm_that_nobody_looks_at_clips_as_well(norm: float) -> None:
    for plain, on_gpu in scenarios.outcomes(f"clipped {norm}"):
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(plain, on_gpu, strict=True))


@pytest.mark.parametrize(("how", "per_node"), LEFT_OUT)
def test_a_bad_gradient_of_one_process_is_left_out_by_its_node(how: str, per_node: int) -> None:
    def absent(node: int, step: int) -> bool:
        return node == 3 // per_node and step == 2

    results = scenarios.outcomes(f"left out {how} {per_node}")
    expected = simulate("decentlam", 4 // per_node, 5, loss=node_loss(per_node), absent=absent)
    assert_equal([trajectory for trajectory, _, _ in results], expected)
    for rank, (_, skipped, _) in enumerate(results):
        assert skipped == [absent(rank // per_node, step) for step in range(5)]
    check_order([posts for _, _, posts in results])


spoiled = Scenarios(4)


@spoiled.run(
    not_finite,
    [
        {"method": "decentlam", "bad": math.nan},
        {"method": "pmsgd", "bad": math.inf},
        {"method": "awc-dmsgd", "bad": math.nan},
    ],
)
def test_what_is_not_finite_is_reported_one_step_later_and_reaches_nobody(
    results: list[tuple[str, bool]],
) -> None:
    assert all(finite for _, finite in results)
    said = [text for text, _ in results]
    assert said[1].startswith("NonFiniteError: node 1, step 2") and "no neighbor" in said[1]
    assert said[0] == said[2] == said[3] == "nothing was raised"


@spoiled.run(copied)  # the last: what is connected is forgotten
def test_a_copy_keeps_the_network_and_an_unpickled_optimizer_forms_none(said: list[str]) -> None:
    assert all("process groups cannot be saved with it" in text for text in said), said


# Nothing waits ----------------------------------------------------------------------------------


class Looks(TorchDispatchMode):
    """Counts what would wait for a GPU: every look at a value. Copies between host and device
    cannot be seen here; on fake tensors they are errors."""

    NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        self.found[name] += name in self.NAMES
        return function(*args, **(kwargs or {}))


def looks(method: str, scaled: bool, **options: Any) -> list[dict[str, int]]:
    """In backward and step(), of each step after the first two, which look for equal data."""
    with batched():
        node, model, optimizer = start(None, method, bucket_bytes=200, **options)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = scaler.scale(quadratic_loss(model, node, step))
            with Looks() if step > 1 else contextlib.nullcontext() as looked:
                loss.backward()
                scaler.step(optimizer)
            scaler.update()
            found += [dict(+looked.found)] if looked is not None else []
        return found


NODES = {"processes_per_node": 2}
CLIPPED = {"overlap": "none", "max_grad_norm": 0.1}
LOOKS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in (*AVERAGED, "decentlam")},
    **{f"nodes {method}": {"method": method, **NODES} for method in UNUSED[:3]},
    **{f"16 bits {method}": {"method": method, **BITS[method]} for method in UNUSED[:3]},
    "pairs": {"method": "decentlam", "topology": PAIRS},
    "nodes 16 bits": {"method": "decentlam", "message_dtype": torch.float16, **NODES},
    "nodes none": {"method": "decentlam", "overlap": "none", **NODES},
    "clipped pmsgd": {"method": "pmsgd", **CLIPPED},
    "clipped awc-dmsgd": {"method": "awc-dmsgd", **CLIPPED},
    "clipped nodes": {"method": "decentlam", **CLIPPED, **NODES},
}
# What the documentation names: one look in each step.
LOOK_ONCE: dict[str, dict[str, Any]] = {
    f"{how} {len(nodes)}": {"method": "decentlam", "overlap": "none", **more, **nodes}
    for how, more in (("scaler", {}), ("skip", {"nonfinite": "skip"}))
    for nodes in ({}, NODES)
}
for name, arguments in {**LOOKS, **LOOK_ONCE}.items():
    scenarios.add(f"looks {name}", looks, scaled=name.startswith("scaler"), **arguments)


@pytest.mark.parametrize("name", {**LOOKS, **LOOK_ONCE})
def test_nothing_waits_for_the_device(name: str) -> None:
    expected = {"_local_scalar_dense": 1} if name in LOOK_ONCE else {}
    assert scenarios.outcomes(f"looks {name}") == [[expected] * 2] * 4


# On tensors of a GPU that is not there ----------------------------------------------------------


@pytest.fixture
def fake_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of four processes with NCCL, as far as Python can tell; tensors have no values."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    monkeypatch.setattr(Network, "is_nccl", property(lambda network: network.group is not None))
    monkeypatch.setattr(Network, "gather", lambda network, value: [value] * 4)  # its own looks
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        yield
    dist.destroy_process_group()


class _Event:
    """Of a GPU that is not there."""

    def record(self, stream: Any) -> None:
        assert stream.type == "cuda"

    def synchronize(self) -> None:
        return


def _told(checks: Any) -> None:
    """In place of the look at flags that were copied to the host, which have no values here."""
    if checks._flags is not None:
        (_, on_host, copied), checks._flags = checks._flags, None
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
    *((method, ("none", "backward")[k % 2], "") for k, method in enumerate(CLASSES)),
    ("decentlam", "none", ""),
    ("pmsgd-lars", "backward", "decay"),
    *((method, "backward", "float16") for method in ("decentlam", "adamw")),
    *((method, "backward", "bfloat16") for method in ("awc-dmsgd", "gt-dmsgd")),
    *((method, "auto", "nodes") for method in (*KINDS, "pmsgd", "adamw")),
    ("decentlam", "none", "nodes clipped"),
    ("pmsgd", "backward", "nesterov"),
    ("decentlam", "none", "clipped"),
]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("method", "overlap", "more"), FAKE)
def test_tensors_stay_on_the_device(
    fake_gpus: None, method: str, overlap: Any, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a value, or two tensors of different devices in one operation, is an error here."""
    monkeypatch.setattr(checks, "_TRIED", 0)  # equal data: it looks at values, in the first steps
    monkeypatch.setattr(gradients.WholeGradient, "_check_scaler", lambda *given: None)  # likewise
    monkeypatch.setattr(checks.Checks, "look", _told)
    TOLD.clear()
    per_node = MORE[more].get("processes_per_node", 1)
    model = nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 3))
    optimizer = CLASSES[method](
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
        for filled in optimizer.runtime.buckets:  # as backward does, which needs a driver
            for i, p in enumerate(filled.params):
                p.grad = torch.randn_like(p)
                optimizer.runtime.on_gradient(filled, i)
        optimizer.step()
    assert {bucket.x.device.type for bucket in optimizer.runtime.buckets} == {"cuda"}
    assert [len(optimizer.runtime.buckets)] * 2 == TOLD, "of each step, at the one after it"
