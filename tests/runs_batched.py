"""What NCCL would be asked to do, run by gloo on the CPU: the same branch, the same posts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import runs
import runs_nodes
import torch
import torch.distributed as dist
from runs_steps import Group, build, message_of, quadratic_loss
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decentlam.exchange.network import Network

Post = tuple[str, str, tuple[Any, ...]]  # communicator, what, details
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast")


@contextlib.contextmanager
def batched() -> Iterator[list[Post]]:
    """Inside, every group counts as NCCL's; collects what is posted, in order."""
    posts: list[Post] = []
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, "batch_isend_irecv")}
    is_nccl = Network.is_nccl

    def noted(name: str) -> Callable[..., Any]:
        def collective(*args: Any, group: Any = None, **options: Any) -> Any:
            posts.append((_name(group), name, tuple(args[0].shape)))
            return before[name](*args, group=group, **options)

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
