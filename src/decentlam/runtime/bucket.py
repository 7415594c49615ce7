"""A bucket: some parameters laid out one after the other, and everything a step needs of them.

Message and update are called on pieces that stay in the cache, with scratch memory used again, so
no method needs to know about memory. The terms of a mix are summed inside of that, so each received
byte is read once.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakTensorKeyDictionary

from decentlam.algorithms import Algorithm, Message, Step
from decentlam.algorithms.base import layer_norm
from decentlam.algorithms.turns import TURNS, parts
from decentlam.errors import StaleMessageError
from decentlam.exchange.base import Pending, Terms, combine
from decentlam.network.network import Network
from decentlam.runtime.param_groups import ParamGroup, named_parameters
from decentlam.runtime.sharded import Shard, extent, is_sharded, norm_over

Plan = tuple[Algorithm, Step]  # with what the param group has now
Version = tuple[int, int, float] | None  # see `checks.version`
Versions = tuple[list[Version], list[Version]]  # of gradients and parameters

PIECE = 1 << 18  # elements; smaller pieces cost calls, larger ones fall out of the cache
_LARGE = 1 << 15  # elements from which a copy of the gradient costs more than calls of its own

# The bucket in which a parameter lives: the one that was built last. Two optimizers with the same
# parameter would otherwise take it from each other for ever.
_owners: Any = WeakTensorKeyDictionary()


def memory_of(p: Tensor) -> Tensor:
    """Return the flat tensor of the bucket in which p lives, or p itself if no optimizer has it or
    it is a shard, which stays in its own memory."""
    bucket: Bucket | None = _owners.get(p, lambda: None)()
    return p if bucket is None or is_sharded(p) else bucket.x


@dataclass(frozen=True)
class Piece:
    """Neighboring elements of a bucket's shard, for one call of message or update."""

    span: slice  # of the shard
    owner: int | None  # the parameter whose gradient is read in place; None: the gathered copy
    inside: slice  # of that gradient
    adaptive: bool  # whether a layer-wise rate applies
    x: Tensor
    state: dict[str, Tensor]


class Bucket:
    """Some parameters of one group: memory, gradient, state and the message under way.

    One process per node updates all of it. In a node of several processes each of them has one
    shard of every bucket, exchanges it with the same shard of other nodes, and updates it.
    """

    # What `abandon` resets, besides the plan, which is that of the last message or gradient:
    arrived: set[int]  # parameters whose gradient backward has left
    absent: list[int]  # parameters that are frozen, or have no gradient
    gradients: list[Tensor]  # flat, one for each piece
    gathered: bool  # the gradient is complete and must not change any more
    updated: bool
    plan: Plan  # what message and update are made with
    versions: Versions | None  # what the message was made of
    pending: Pending | None  # the message under way
    finite: Tensor | None  # NCCL: a flag on the device that nobody looked at yet
    _summing: Pending | None
    norm: Callable[[Tensor], Tensor] = staticmethod(layer_norm)  # of layers, also in shards

    def __init__(
        self,
        number: int,
        group: int,
        params: list[Tensor],
        names: list[str],
        algorithm: Algorithm,
        network: Network,
        timeout: timedelta,
    ) -> None:
        self.number, self.group, self.names = number, group, names
        self.wholes = params  # as the optimizer has them; `params` has shards in place of DTensors
        self.shards = [Shard(p) for p in params if is_sharded(p)]  # of all, or of none
        self.params = params = [shard.part for shard in self.shards] or params
        self.network, self._timeout = network, timeout
        several = network.processes_per_node
        size = -(-sum(p.numel() for p in params) // several) or 1  # of a shard; zeros fill it up
        self.x = params[0].new_zeros(several * size)
        self.spans: list[slice] = []  # of each parameter in x
        self.views: list[Tensor] = []  # x in the shape of each parameter
        self._lay_out()
        self.shard = slice(network.local_rank * size, (network.local_rank + 1) * size)
        self.shard_x = self.x[self.shard]
        self.init = algorithm.init
        self.state = algorithm.init(self.shard_x)
        self._cut_pieces(algorithm.layerwise)
        self._averaged = algorithm.averaged_state
        self._extents = list(map(extent, self.wholes, self.spans))
        if network.shard_group is not None and algorithm.layerwise:
            self.norm = partial(norm_over, network.shard_group)
        self._turns: dict[int, list[list[tuple[slice, slice]]]] = {}
        if several > 1:
            # NCCL reduces a shard. gloo's reduce_scatter is an all_reduce, too, but one that ends
            # only in wait(); so here the whole is reduced.
            self._sum = torch.empty_like(self.shard_x if network.is_nccl else self._g)
        self.abandon()

    def abandon(self) -> None:
        """Forget the step: the bucket is ready for new gradients."""
        self.arrived, self.absent, self.gradients = set(), [], []
        self.gathered = self.updated = False
        self.versions = self.pending = self.finite = self._summing = None

    # Layout -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _lay_out(self) -> None:
        start = 0
        for p, whole in zip(self.params, self.wholes, strict=True):
            span = slice(start, start + p.numel())
            start = span.stop
            view = shaped_like(self.x[span], p)
            view.copy_(p)
            p.data = view
            self.spans.append(span)
            self.views.append(view)
            _owners[whole] = weakref.ref(self)

    def _cut_pieces(self, layerwise: bool) -> None:
        """Cut the shard for calls of message and update: by layer, or to what fits the cache.

        A large gradient on a CPU is read where backward left it: a copy would be the dearest pass
        over memory of the whole step. All others are gathered in `_g`.
        """
        on_cpu = self.x.device.type == "cpu"
        in_place = self.network.processes_per_node == 1 and (on_cpu or layerwise)
        gathered = 0 if in_place else len(self.x)
        places: list[slice | None] = []  # of each parameter's gradient in _g; None: stays in place
        cuts: list[tuple[slice, int | None, slice, bool]] = []  # the first four fields of a piece
        for i, (p, span) in enumerate(zip(self.params, self.spans, strict=True)):
            if in_place and (layerwise or p.numel() >= _LARGE):
                places.append(None)
                adaptive = not layerwise or p.ndim > 1
                spans = _cut(span.start, span.stop, p.numel() if layerwise else PIECE)
                for s in spans or [span]:
                    inside = slice(s.start - span.start, s.stop - span.start)
                    cuts.append((s, i, inside, adaptive))
            elif in_place:
                inside = slice(gathered, gathered + p.numel())
                gathered = inside.stop
                places.append(inside)
                if cuts and cuts[-1][1] is None and span.stop - cuts[-1][0].start <= PIECE:
                    before, _, gathered_before, _ = cuts.pop()  # this one goes on where it ends
                    span = slice(before.start, span.stop)
                    inside = slice(gathered_before.start, inside.stop)
                cuts.append((span, None, inside, True))
            else:
                places.append(span)
        if not in_place:
            size = len(self.shard_x)
            length = PIECE if on_cpu else max(size, 1)
            cuts = [(s, None, s, True) for s in _cut(0, size, length)]
        self._g = self.x.new_zeros(gathered)
        self._g_views = [
            None if place is None else shaped_like(self._g[place], p)
            for place, p in zip(places, self.params, strict=True)
        ]
        self.pieces = [
            Piece(*cut, self.shard_x[cut[0]], {name: t[cut[0]] for name, t in self.state.items()})
            for cut in cuts
        ]

    def holds(self, i: int) -> bool:
        """Return True if the memory of parameter i is still the bucket's."""
        p, view = self.params[i], self.views[i]
        return p.data_ptr() == view.data_ptr() and p.dtype == view.dtype

    def owns(self, i: int) -> bool:
        """Return True unless another optimizer was built with parameter i since."""
        owner = _owners.get(self.wholes[i], lambda: None)()
        return owner is None or owner is self

    @torch.no_grad()
    def reclaim(self, i: int) -> None:
        """Make parameter i live in the bucket again, with the value it has.

        `model.to("cpu:0")`, as some trainers call it, moves a parameter to memory of its own and
        changes nothing else. What changes shape, precision or kind of device is refused.
        """
        p, view, name = self.params[i], self.views[i], self.names[i]
        if not self.owns(i):
            raise RuntimeError(
                f"{name} now belongs to another optimizer, which was built later; use only that "
                "one, or give each optimizer parameters of its own"
            )
        kind, before = ((t.shape, t.dtype, t.device.type) for t in (p, view))
        if kind != before:
            raise RuntimeError(
                f"{name} was changed after the optimizer was built: it was {_described(view)} and "
                f"is {_described(p)} (by model.to(...), .half() or a new p.data). Convert the "
                "model before the optimizer is built; to change values in the midst of training, "
                "use p.copy_(...) under torch.no_grad()"
            )
        if (self.gathered or self.pending is not None) and not torch.equal(p, view):
            raise StaleMessageError(
                f"{name} was replaced while its message was on the way; change parameters between "
                "step() and backward"
            )
        view.copy_(p)
        p.data = view

    # Gradient -----------------------------------------------------------------------------------

    def gather(self, step: int, skip: bool = False) -> None:
        """Take the gradient as it is; a parameter without one, and all if `skip`, counts as zero.

        In a node of several processes their gradients begin to be summed.
        """
        self.gathered = True
        in_place: dict[int | None, Tensor] = {None: self._g}
        for i, p in enumerate(self.params):
            if p.grad is None or not p.requires_grad:
                self.absent.append(i)
            grad = None if skip or p.grad is None else p.grad.detach()
            if grad is not None and grad.is_sparse:
                raise ValueError(
                    f"{self.names[i]} has a sparse gradient, which cannot be averaged "
                    "with neighbors; use sparse=False in its embedding"
                )
            target = self._g_views[i]
            if target is None:
                if grad is not None and _layout(grad) == _layout(self.views[i]):
                    in_place[i] = _flat(grad)
                    continue
                target = torch.empty_like(self.views[i])
                in_place[i] = _flat(target)
            target.zero_() if grad is None else target.copy_(grad)
        if self.network.intra_node_group is not None:
            self._begin_sum(step)
        else:
            self.gradients = [in_place[piece.owner][piece.inside] for piece in self.pieces]

    def _begin_sum(self, step: int) -> None:
        tensors = [self._sum, self._g]
        collective: Callable[..., Any] = dist.reduce_scatter_tensor
        if not self.network.is_nccl:
            self._sum.copy_(self._g)
            tensors, collective = [self._sum], dist.all_reduce
        self._summing = inside_node(
            self.network, self._timeout, step, self.number, collective, *tensors
        )

    def summed(self, next_is_gathered: bool) -> bool:
        """Return True if the node's gradient is there. Backward must not wait for it: the script
        may have a collective of its own before step(), and a process of the node be in it already.
        On a GPU only the GPU waits, and not even that if another bucket came in between."""
        if self._summing is None:
            return True
        return next_is_gathered if self.network.is_nccl else self._summing.arrived()

    def finish_sum(self) -> None:
        """Wait for the node's gradient: the mean over its processes."""
        if self._summing is not None:
            self._summing.wait()
            self._summing = None
            mean = self._sum if self.network.is_nccl else self._sum[self.shard]
            mean.div_(self.network.processes_per_node)
            self.gradients = [mean[piece.span] for piece in self.pieces]

    # Message and update -------------------------------------------------------------------------

    def message_size(self, algorithm: Algorithm, index: int) -> int:
        """Return the elements of the message of step `index`: payloads, then averaged state."""
        size = algorithm.payloads(index) * len(self.shard_x)
        return size if self._averaged is None else size + self._turn_size(index)

    def largest_message(self, payloads: int) -> int:
        """Return the elements of the largest message with so many payloads."""
        averaged = 0 if self._averaged is None else max(map(self._turn_size, range(TURNS)))
        return payloads * len(self.shard_x) + averaged

    def _turn_size(self, index: int) -> int:
        """Return how many elements send their averaged state in step `index`."""
        return max((place.stop for turn in self._turn(index) for _, place in turn), default=0)

    def _turn(self, index: int) -> list[list[tuple[slice, slice]]]:
        """Return which elements of each piece send their averaged state in step `index`, and where
        in that part of the message they are."""
        turn = index % TURNS
        if turn not in self._turns:
            self._turns[turn], stop, first = [], 0, self.shard.start
            for piece in self.pieces:
                window = slice(first + piece.span.start, first + piece.span.stop)
                self._turns[turn].append([])
                for inside in parts(self.spans, window, turn, self._extents):
                    start, stop = stop, stop + inside.stop - inside.start
                    self._turns[turn][-1].append((inside, slice(start, stop)))
        return self._turns[turn]

    def form(self, message: Tensor, look: bool) -> bool:
        """Fill the message; return False if `look` finds a value that is not finite. It looks at
        each piece while that is in the cache."""
        (algorithm, step), gradients, finite = self.plan, self.gradients, True
        rows, side = self._split(message, algorithm.payloads(step.index))
        if not algorithm.needs_gradient:  # it may not be there yet; x stands in, unread
            gradients = [piece.x for piece in self.pieces]
            step = replace(step, weight_decay=0.0)
        for k, (piece, g) in enumerate(zip(self.pieces, gradients, strict=True)):
            g = decayed(g, piece.x, algorithm, step)
            formed = algorithm.message(piece.x, g, piece.state, step)
            payloads = list(formed) if isinstance(formed, tuple) else [formed]
            if self._averaged is not None:
                averaged = payloads.pop()
                for inside, place in self._turn(step.index)[k]:
                    part = side[place].copy_(averaged[inside])
                    finite = finite and (not look or math.isfinite(part.sum().item()))
            for row, payload in zip(rows, payloads, strict=True):
                part = row[piece.span].copy_(payload)
                finite = finite and (not look or math.isfinite(part.sum().item()))
        return finite

    def update(self) -> None:
        """Update x and state from the mix; without a message the node's own is the mix."""
        (algorithm, step), unmoved = self.plan, self._unmoved() if self.absent else []
        terms = [(w, *self._split(t, algorithm.payloads(step.index))) for w, t in self.terms]
        for piece, g in zip(self.pieces, self.gradients, strict=True):
            here = step if piece.adaptive else replace(step, adaptive=False)
            g = decayed(g, piece.x, algorithm, step)
            if terms:
                mixed = _mixed(terms, piece)
            else:
                mixed = algorithm.message(piece.x, g, piece.state, here)
                mixed = mixed[0] if self._averaged is not None else mixed
            algorithm.update(piece.x, g, mixed, piece.state, here)
        if self._averaged is not None and terms:
            self._share_state(self._averaged, [(weight, side) for weight, _, side in terms], step)
        moved = self.params
        if unmoved:
            for _, inside, x, state in unmoved:
                self.shard_x[inside] = x
                for name, value in state.items():
                    self.state[name][inside] = value
            moved = [p for i, p in enumerate(moved) if all(i != k for k, *_ in unmoved)]
        # A graph of the old values must not run backward through the new ones: torch then refuses.
        increment_version(moved)
        self.updated = True

    @property
    def terms(self) -> Terms:
        """The terms of the mix, once `pending` was waited for; none if nothing was sent."""
        return [] if self.pending is None else self.pending.terms

    def _split(self, message: Tensor, payloads: int) -> tuple[Tensor, Tensor]:
        """Return the payloads of a message, (payloads, size), and its averaged state."""
        size = payloads * len(self.shard_x)
        return message[:size].view(payloads, -1), message[size:]

    def _share_state(self, name: str, terms: Terms, step: Step) -> None:
        """Put the mix of an averaged state, whose turn it was, in its place."""
        if terms[0][1].numel():
            for k, (weight, side) in enumerate(terms):
                if side.dtype is torch.float16 and side.dtype is not self.x.dtype:
                    terms[k] = weight, side.view(torch.bfloat16)  # as `Rounded` sends it
            mixed = combine(terms).clamp_(min=0)  # rounding may be larger than a tiny one
            for piece, turn in zip(self.pieces, self._turn(step.index), strict=True):
                for inside, place in turn:
                    piece.state[name][inside] = mixed[place]

    def begin_gather(self, step: int) -> Pending:
        """Start to collect the shards that the processes of a node have updated."""
        collective, tensors = dist.all_gather_into_tensor, (self.x, self.shard_x)
        return inside_node(self.network, self._timeout, step, self.number, collective, *tensors)

    def _unmoved(self) -> list[tuple[int, slice, Tensor, dict[str, Tensor]]]:
        """Return what a step must leave as it is: parameters that were frozen since, and on one
        node alone, as in torch.optim, those without a gradient."""
        alone, size, first = self.network.num_processes == 1, len(self.shard_x), self.shard.start
        found = []
        for i in self.absent:
            if alone or not self.params[i].requires_grad:
                span = self.spans[i]
                inside = slice(*(min(max(k - first, 0), size) for k in (span.start, span.stop)))
                state = {name: t[inside].clone() for name, t in self.state.items()}
                found.append((i, inside, self.shard_x[inside].clone(), state))
        return found

    def nonfinite_names(self, values: Tensor, step: int) -> list[str]:
        """Return the parameters with a NaN or infinity in a gradient, or in a message."""
        bad, size = torch.zeros(len(self.x), dtype=torch.bool), len(self.shard_x)
        wrong = ~torch.isfinite(values).cpu()
        whole = len(wrong) - len(wrong) % size
        bad[self.shard] = wrong[:whole].view(-1, size).any(dim=0)
        if len(wrong) > whole:
            for piece, turn in zip(self.pieces, self._turn(step), strict=True):
                for inside, place in turn:
                    bad[self.shard][piece.span][inside] |= wrong[whole:][place]
        spans = zip(self.names, self.spans, strict=True)
        return [name for name, span in spans if bad[span].any()]


def inside_node(
    network: Network,
    timeout: timedelta,
    step: int,
    bucket: int,
    collective: Callable[..., Any],
    *tensors: Tensor,
) -> Pending:
    """Start a collective of the processes of this node."""
    peer, pending = "another process of its node", Pending(network, step, bucket, timeout)
    with pending.posting(peer):
        work = collective(*tensors, group=network.node_group, async_op=True)
    pending.works.append((peer, work))
    return pending


def build_buckets(
    groups: Sequence[ParamGroup],
    bucket_bytes: int,
    algorithm: Algorithm,
    network: Network,
    timeout: timedelta,
) -> list[Bucket]:
    """Build buckets of at most `bucket_bytes` by group, dtype and device, in order of arrival.

    Backward reaches the last parameters first, so buckets and what is in them run backwards.
    """
    names = {id(p): name for name, p in named_parameters(groups)}
    order = {key: position for position, key in enumerate(names)}
    filled: list[tuple[int, list[Tensor]]] = []
    for index, group in enumerate(groups):
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in reversed(group["params"]):
            if p.requires_grad and p.numel():
                alike.setdefault((p.dtype, p.device), []).append(p)
        for members in alike.values():
            filled += [(index, params) for params in _fill(members, bucket_bytes * network.shards)]
    filled.sort(key=lambda item: -order[id(item[1][0])])
    return [
        Bucket(
            number,
            index,
            params,
            [names[id(p)] for p in params],
            algorithm.with_hyper(groups[index]),
            network,
            timeout,
        )
        for number, (index, params) in enumerate(filled)
    ]


def _fill(params: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    filled: list[list[Tensor]] = []
    room = 0
    for p in params:
        if not filled or p.nbytes > room:
            filled.append([])
            room = bucket_bytes
        filled[-1].append(p)
        room -= p.nbytes
    return filled


def shaped_like(flat: Tensor, p: Tensor) -> Tensor:
    """Return `flat` in the shape of p, with p's own memory order if it is dense (channels last)."""
    if p.is_contiguous() or not _dense(p):
        return flat.view(p.shape)
    return flat.as_strided(p.shape, p.stride())


def _dense(p: Tensor) -> bool:
    """Return True if p's elements fill a stretch of memory without holes, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _layout(t: Tensor) -> tuple[object, ...]:
    """Return how the elements lie in memory."""
    return t.dtype, t.shape, t.stride()


def _flat(dense: Tensor) -> Tensor:
    """Return a view of all elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))


def _cut(start: int, stop: int, length: int) -> list[slice]:
    return [slice(i, min(i + length, stop)) for i in range(start, stop, max(length, 1))]


def _described(p: Tensor) -> str:
    return f"{p.dtype} {tuple(p.shape)} on {p.device.type}"


def decayed(g: Tensor, x: Tensor, algorithm: Algorithm, step: Step) -> Tensor:
    """Return the gradient with weight decay, unless the method has that apart."""
    if not step.weight_decay or algorithm.decoupled_decay:
        return g
    return torch.add(g, x, alpha=step.weight_decay, out=_scratch(0, x))


def _mixed(terms: Sequence[tuple[float, Tensor, Tensor]], piece: Piece) -> Message:
    """Return the mix of one piece: the weighted sum of the terms, payload by payload."""
    mixes = []
    for k in range(len(terms[0][1])):
        parts = [(weight, payloads[k, piece.span]) for weight, payloads, _ in terms]
        mixes.append(combine(parts, out=_scratch(1 + k, piece.x)))
    return mixes[0] if len(mixes) == 1 else tuple(mixes)


class _Memory(threading.local):
    """Scratch memory by row and dtype, of each thread."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, torch.dtype], Tensor] = {}


_memory = _Memory()


def _scratch(row: int, like: Tensor) -> Tensor | None:
    """Return memory for one piece, the same at every call: fresh memory costs more than what is
    computed in it. None on a GPU, whose allocator knows which stream uses what."""
    if like.device.type != "cpu" or len(like) > PIECE:
        return None
    found = _memory.held.get((row, like.dtype))
    if found is None:
        with torch.inference_mode(False):  # it outlives an evaluation that needs it first
            found = _memory.held[row, like.dtype] = like.new_empty(PIECE)
    return found[: len(like)]
