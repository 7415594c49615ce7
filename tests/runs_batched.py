"""What NCCL would be asked to do, run by gloo on the CPU: the same branch, the same posts."""

from __future__ import annotations

import contextlib
import copy
import pickle
import unittest.mock
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import runs
import runs_nodes
import runs_steps
import torch
import torch.distributed as dist
from runs_steps import Group, build, message_of, quadratic_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import decentlam
from decentlam.analysis.cost import links
from decentlam.analysis.cost.links import _Meter
from decentlam.exchange.network import Network, _connected, connect

Post = tuple[str, str, tuple[Any, ...]]  # communicator, what, details
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast")


@contextlib.contextmanager
def batched() -> Iterator[list[Post]]:
    """Inside, every group counts as NCCL's; collects what is posted, in order."""
    posts: list[Post] = []
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, "batch_isend_irecv")}
    is_nccl = Network.is_nccl

    def noted(name: str) -> Callable[..., Any]:
        def collective(tensor: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            rest = [a for a in args if not isinstance(a, dist.ProcessGroup)]
            group = next((a for a in args if isinstance(a, dist.ProcessGroup)), group)
            posts.append((_name(group), name, tuple(tensor.shape)))
            return before[name](tensor, *rest, group=group, **options)

        return collective

    def batch(operations: list[dist.P2POp]) -> Any:
        facts = tuple(
            ("send" if o.op is dist.isend else "receive", o.peer, tuple(o.tensor.shape))
            for o in operations
        )
        posts.append((_name(operations[0].group), "batch", facts))
        return before["batch_isend_irecv"](operations)

    for name in COLLECTIVES:
        setattr(dist, name, noted(name))
    dist.batch_isend_irecv = batch
    Network.is_nccl = property(lambda network: network.group is not None)  # type: ignore
    try:
        yield posts
    finally:
        Network.is_nccl = is_nccl  # type: ignore[method-assign]
        for name, function in before.items():
            setattr(dist, name, function)


def _name(group: Any) -> str:
    return (group or dist.group.WORLD).group_name


def trained(method: str, steps: int, options: dict[str, Any]) -> tuple[list[Tensor], list[Post]]:
    with batched() as posts:
        return runs.train_quadratic(method, steps, options), posts


def in_nodes(method: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Post]]:
    assert dist.group.WORLD is not None
    with batched() as posts:
        return runs_nodes.trajectory(dist.group.WORLD, method, **options), posts


class Looks(TorchDispatchMode):
    """Counts what would wait for a GPU: every look at a value."""

    NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_to_copy")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        if name in self.NAMES and not (kwargs or {}).get("non_blocking"):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def looks(method: str, topology: str) -> dict[str, int]:
    """In backward and step, once the first two steps are over, which look for equal data."""
    with batched():
        model = runs.Quadratic(seed=dist.get_rank())
        optimizer = runs.CLASSES[method](
            model.parameters(), lr=0.01, topology=topology, bucket_bytes=100, stable="ignore"
        )
        found: Counter[str] = Counter()
        for step in range(5):
            optimizer.zero_grad()
            loss = quadratic_loss(model, dist.get_rank(), step)
            with Looks() as looked:
                loss.backward()
                optimizer.step()
            if step > 1:
                found += looked.found
        return dict(found)


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
