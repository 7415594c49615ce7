"""What NCCL would be asked to do, run by gloo on the CPU: the same branch, the same posts."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import re
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import runs
import runs_nodes
import runs_steps
import torch
import torch.distributed as dist
from runs_steps import Group, build, message_of, quadratic_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import decentlam
from decentlam.algorithms import compiled
from decentlam.analysis.cost import links
from decentlam.analysis.cost.links import _Meter
from decentlam.exchange.allreduce import AllReduce
from decentlam.exchange.base import Pending
from decentlam.exchange.neighbors import NcclWire
from decentlam.exchange.network import Network, _connected, connect
from decentlam.runtime import bucket, freshness

Place = tuple[int, int]  # step and bucket


class Post(NamedTuple):
    """What a process asks of a communicator."""

    group: str
    what: str  # "batch", or the name of a collective
    facts: tuple[Place | None, tuple[Any, ...]]

    @property
    def place(self) -> Place | None:
        """Of a message, or of an exact average over all nodes."""
        return self.facts[0]

    @property
    def sizes(self) -> tuple[Any, ...]:
        """(shape, dtype); of a batch (way, peer, shape, dtype) for each that is sent or received"""
        return self.facts[1]


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "broadcast",
    "reduce_scatter_tensor",
)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, parameters on a CPU are treated as on a GPU: torch's operations do all of the work,
    every gradient is gathered in its bucket, and nobody compares the values of the first steps."""
    with (
        unittest.mock.patch.object(compiled, "_loops", {}),
        unittest.mock.patch.object(bucket, "_LARGE", 1 << 62),
        unittest.mock.patch.object(freshness, "_VALUED", 0),
    ):
        yield


@contextlib.contextmanager
def batched() -> Iterator[list[Post]]:
    """Inside, every group counts as NCCL's; collects what is posted, in order."""
    posts: list[Post] = []
    place: list[Place | None] = [None]  # of what is being posted
    numbers = itertools.count()

    def noted(collective: Callable[..., Any]) -> Callable[..., Any]:
        def post(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            rest = [a for a in args if not isinstance(a, dist.ProcessGroup)]
            group = next((a for a in args if isinstance(a, dist.ProcessGroup)), group)
            size = _size(tensor[0] if isinstance(tensor, list) else tensor)
            posts.append(Post(_name(group), collective.__name__, (place[0], size)))
            return collective(tensor, *rest, group=group, **options)

        return post

    def noted_batch(batch: Callable[..., Any]) -> Callable[..., Any]:
        def post(operations: list[dist.P2POp]) -> Any:
            ways = ["send" if o.op is dist.isend else "receive" for o in operations]
            sizes = tuple(
                (w, o.peer, *_size(o.tensor)) for w, o in zip(ways, operations, strict=True)
            )
            posts.append(Post(_name(operations[0].group), "batch", (place[0], sizes)))
            return batch(operations)

        return post

    def placed(function: Callable[..., Any], where: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            place[0] = where(*args)
            try:
                return function(*args)
            finally:
                place[0] = None

        return call

    places = {
        NcclWire: ("send", lambda wire, bucket, tensors, pending: _place(pending, bucket)),
        AllReduce: ("send", lambda exchange, bucket, message, step: (step, bucket)),
        _Meter: ("exchange", lambda meter, number, size: (next(numbers), 0)),
    }
    with as_on_a_gpu(), contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(unittest.mock.patch.object(owner, name, value))

        for name in COLLECTIVES:
            replace(dist, name, noted(getattr(dist, name)))
        replace(dist, "batch_isend_irecv", noted_batch(dist.batch_isend_irecv))
        for owner, (name, where) in places.items():
            replace(owner, name, placed(getattr(owner, name), where))
        replace(Network, "is_nccl", property(lambda network: network.group is not None))
        yield posts


def _place(pending: Pending, bucket: int) -> Place:
    """Step and bucket of a message, as errors tell them."""
    found = re.search(r"step (\d+), bucket (\d+)", pending.where)
    assert found is not None and int(found[2]) == bucket
    return int(found[1]), bucket


def _name(group: Any) -> str:
    return (group or dist.group.WORLD).group_name


def _size(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


def trained(method: str, steps: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Post]]:
    with batched() as posts:
        return runs.train_quadratic(method, steps, options), posts


def in_nodes(method: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Post]]:
    assert dist.group.WORLD is not None
    with batched() as posts:
        return runs_nodes.trajectory(dist.group.WORLD, method, **options), posts


def rounded(
    method: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Post]]:
    """Messages of 16 bits by gloo's branch and by NCCL's, with the same arithmetic."""
    options = {**options, "message_dtype": dtype, "shared_memory": False}
    with as_on_a_gpu():
        plain = runs.train_quadratic(method, 6, options)
    return (plain, *trained(method, 6, options))


def left_out(
    process_group: Group, how: str, per_node: int
) -> tuple[list[Tensor], list[bool], list[Post]]:
    """The gradient of process 3 is bad at step 2, as a GradScaler or nonfinite="skip" find it."""
    with batched() as posts:
        return (*runs_nodes.bad_gradient(process_group, per_node, how), posts)


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


def looks(method: str, options: dict[str, Any], scaled: bool) -> list[dict[str, int]]:
    """In backward and step(), of each step after the first two, which look for equal data."""
    with batched():
        model = runs.Quadratic(seed=dist.get_rank())
        optimizer = runs.CLASSES[method](
            model.parameters(), lr=0.01, bucket_bytes=200, stable="ignore", **options
        )
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            loss = scaler.scale(quadratic_loss(model, dist.get_rank(), step))
            with Looks() if step > 1 else contextlib.nullcontext() as looked:
                loss.backward()
                scaler.step(optimizer)
            scaler.update()
            found += [dict(+looked.found)] if looked is not None else []
        return found


def unused(method: str) -> list[Post]:
    """A script that sums something over all processes between backward and step, and on every node
    another parameter without a gradient: some buckets are sent in backward, others in step."""
    rank = dist.get_rank()
    with batched() as posts:
        model = runs.Quadratic(seed=rank)
        optimizer = runs.CLASSES[method](
            model.parameters(),
            lr=0.01,
            topology="ring",
            overlap="backward",
            bucket_bytes=1,  # one for each parameter
            stable="ignore",
            timeout_seconds=runs.HANG_SECONDS,
        )
        for step in range(3):
            optimizer.zero_grad()
            used = [w for i, w in enumerate(model.weights) if i != (rank + step) % 5]
            torch.stack([w.square().sum() for w in used]).sum().backward()
            dist.all_reduce(torch.zeros(2))
            optimizer.step()
        optimizer.finish()
        return posts


def moved(process_group: Group) -> tuple[list[Tensor], list[Post], str]:
    """Trains, goes on on a ring of three without the last node, and is copied and unpickled."""
    node = dist.get_rank(process_group)
    with batched() as posts:
        model = runs.Quadratic(seed=node)
        optimizer = build("decentlam", model, process_group)
        trajectory = runs_steps.train(optimizer, model, node, range(3))
        copied = copy.deepcopy(optimizer)
        assert copied.network is optimizer.network  # it may not form a group
        data = pickle.dumps(optimizer)
        _connected.clear()  # as in another process
        said = message_of(lambda: pickle.loads(data))
        survivors = dist.new_group([0, 1, 2])
        if node < 3:
            optimizer.use_network(connect(survivors), decentlam.topology.ring(3))
            trajectory += runs_steps.train(optimizer, model, node, range(3, 6))
        return trajectory, posts, said


def clipped(process_group: Group, norm: float) -> list[list[Tensor]]:
    """The steps with max_grad_norm, by gloo's branch and by NCCL's."""
    node = dist.get_rank(process_group)
    found = []
    for branch in (contextlib.nullcontext, batched):
        with branch():
            model = runs.Quadratic(seed=node)
            options = {"overlap": "none", "max_grad_norm": norm}
            optimizer = build("decentlam", model, process_group, **options)
            found.append(runs_steps.train(optimizer, model, node, range(3)))
    return found


def exchanged() -> tuple[float, list[Post]]:
    """A mix outside of any optimizer: all ones, so that it stays that."""
    with batched() as posts:
        exchange = decentlam.neighbor_exchange("ring", timeout_seconds=runs.HANG_SECONDS)
        message = torch.ones(1, 3)
        exchange.receive(0, message, 0)
        pending = exchange.send(0, message, 0)
        mixed = sum(weight * term for weight, term in pending.wait())
        pending.finish()
        return float(torch.as_tensor(mixed).sum()), posts


def measured() -> tuple[bool, list[Post]]:
    """The links, as `topology="auto"` measures them: with NCCL without a timeout."""
    seen: list[Any] = []

    class Noted(_Meter):
        def _wait(self, work: Any) -> None:
            super()._wait(SimpleNamespace(wait=lambda *limit: seen.append(limit) or work.wait()))

    with batched() as posts, unittest.mock.patch.object(links, "_Meter", Noted):
        link = links.measure_links(connect(batches=True), seconds=0.05)
    return link.bytes_per_second > 0 and set(seen) == {()}, posts


def not_finite(process_group: Group, method: str) -> tuple[str, bool]:
    """Node 1 gets a NaN in step 2: what is said after it, and whether parameters are finite."""
    node = dist.get_rank(process_group)
    with batched():
        model = runs.Quadratic(seed=node)
        optimizer = build(method, model, process_group, overlap="backward")
        for step in range(3):
            optimizer.zero_grad()
            loss = quadratic_loss(model, node, step)
            (loss * float("nan") if (node, step) == (1, 2) else loss).backward()
            optimizer.step()
        said = message_of(optimizer.finish)
        return said, bool(torch.isfinite(runs.flat(model)).all())
