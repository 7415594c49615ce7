"""The average of all nodes: to evaluate it, to keep it, to measure the distance from it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentlam.network.network import Network
from decentlam.runtime.bucket import memory_of
from decentlam.runtime.sharded import local

_active: weakref.WeakSet[Evaluation] = weakref.WeakSet()  # of all optimizers of this process


def beside(flat: Sequence[Tensor], model: nn.Module | None) -> list[Tensor]:
    """Return what is averaged besides the optimizer's parameters: the model's floating buffers, as
    batch norm has them, and its parameters if it is another model, as an EMA of the first."""
    if model is None:
        return []
    ours, params = {_memory(x) for x in flat}, list(model.parameters())
    held = [_memory(local(p)) in ours for p in params]
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if any(held) or not params:
        return buffers
    if others := [p for p in params if memory_of(p) is not p]:
        raise ValueError(
            f"{len(others)} parameters of this {type(model).__name__} belong to another optimizer "
            "of decentlam, and none to this one; call that optimizer's averaged, eval or merge"
        )
    return [local(p.data) for p in params if p.is_floating_point()] + buffers


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def average_(
    flat: Sequence[Tensor], model: nn.Module | None, network: Network, rates: Sequence[float] = ()
) -> None:
    """Replaces parameters and floating buffers by their mean over all processes."""
    others = beside(flat, model)
    for t, mean in zip(
        [*flat, *others], _means(flat, others, network, "merge", rates), strict=True
    ):
        t.copy_(mean)


class Evaluation:
    """A switch between a node's own parameters and the mean of all nodes; it keeps the other."""

    def __init__(self) -> None:
        self._flat: Sequence[Tensor] = []
        self._model: nn.Module | None = None
        self._aside: list[Tensor] | None = None  # the node's own values
        self.active = False

    def enter(
        self,
        flat: Sequence[Tensor],
        model: nn.Module | None,
        network: Network,
        rates: Sequence[float] = (),
    ) -> None:
        """From here on the mean; every process must come here."""
        assert not self.active
        means = _means(flat, beside(flat, model), network, "average", rates)
        self._flat, self._model = flat, model
        self._put(means)

    def leave(self) -> None:
        """From here on the node's own values, to the bit."""
        if self._aside is not None:
            self._swap(self._aside)
        self._aside, self._model, self.active = None, None, False
        _active.discard(self)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Inside, the node's own values; nothing is communicated."""
        means, model = self._aside, self._model  # once they are left
        self.leave()
        try:
            yield
        finally:
            if means is not None:
                self._model = model
                self._put(means)

    def _put(self, means: list[Tensor]) -> None:
        self._swap(means)
        self._aside, self.active = means, True
        _active.add(self)

    @torch.no_grad()
    def _swap(self, others: Sequence[Tensor]) -> None:
        # The buffers as the model has them now: a trainer may have moved them.
        for a, b in zip([*self._flat, *beside(self._flat, self._model)], others, strict=True):
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)


def check_none_averaged(model: nn.Module, what: str) -> None:
    """Refuses a model of which an optimizer, whichever it is, has put the mean in place."""
    means = {_memory(t) for e in _active for t in (*e._flat, *beside(e._flat, e._model))}
    named = (*model.named_parameters(), *model.named_buffers())
    averaged = [name for name, t in named if t.numel() and _memory(local(memory_of(t))) in means]
    if averaged:
        more = f" and {len(averaged) - 1} more" if averaged[1:] else ""
        raise RuntimeError(
            f"cannot {what}: {averaged[0]}{more} of the model is the average of all nodes, because "
            "another optimizer is in evaluation. Call its train() on every process first."
        )


@torch.no_grad()
def _means(
    flat: Sequence[Tensor],
    others: Sequence[Tensor],
    network: Network,
    what: str,
    rates: Sequence[float],
) -> list[Tensor]:
    """Not in place: when a node dies meanwhile, nothing has changed."""
    tensors = [*flat, *others]
    numbers = sum(t.numel() for t in tensors)
    network.meet(f"{what} the model ({len(tensors)} tensors, {numbers} numbers)", rates)
    with torch.inference_mode(False):  # they outlive it
        means = [_wide(t) for t in tensors]
    if network.group is None:
        return means
    with network.errors():
        for work in [dist.all_reduce(m, group=network.group, async_op=True) for m in means]:
            work.wait()
        if network.shard_group is not None:  # of the others all processes of a node have their own
            for mean in means[len(flat) :]:
                dist.all_reduce(mean.div_(network.shards), group=network.shard_group)
    for mean in means:
        mean.div_(network.num_processes)
    return means


def _wide(tensor: Tensor) -> Tensor:
    """A copy in which a sum over all nodes neither overflows nor loses bits that 16 do not have."""
    return tensor.to(torch.float32, copy=True) if tensor.itemsize < 4 else tensor.clone()


@torch.no_grad()
def consensus_distance(
    flat: Sequence[Tensor], network: Network, rates: Sequence[float] = ()
) -> float:
    """sqrt((1/n) sum_i |x_i - mean|^2)."""
    if network.group is None:
        return 0.0
    network.meet("measure the consensus distance", rates)
    total = torch.zeros((), dtype=torch.float64, device=network.control_device)
    with network.errors():
        for x in flat:
            mean = _wide(x)
            dist.all_reduce(mean, group=network.group)
            mean.div_(network.num_processes)
            total += torch.linalg.vector_norm(mean.sub_(x)).to(total).square()
        dist.all_reduce(total, group=network.group)
        if network.shard_group is not None:
            dist.all_reduce(total, group=network.shard_group)
    return (total / network.num_processes).sqrt().item()
