"""Flat buckets: parameters and gradients of a group become views of a few long tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from decentlam.algorithms.kernels import CHUNK
from decentlam.runtime.groups import ParamGroup, named_parameters

_LARGE = 1 << 15  # elements from which a copy of the gradient costs more than calls of its own


# The bucket in which a parameter lives: the one that was built last. Two optimizers with the same
# parameter would otherwise take it from each other for ever.
_owners: Any = WeakTensorKeyDictionary()


def memory_of(p: Tensor) -> Tensor:
    """The long tensor of the bucket in which p lives; p itself if no optimizer has it."""
    bucket: Bucket | None = _owners.get(p, lambda: None)()
    return p if bucket is None else bucket.x


@dataclass(frozen=True)
class Stretch:
    """Neighbors in a bucket whose gradients lie together in memory."""

    span: slice  # of x
    owner: int | None  # the one parameter whose gradient stays where backward left it
    inside: slice  # of g, if there is no owner


@dataclass(eq=False)
class Bucket:
    """Some parameters of one group, laid out one after the other in `x`.

    Gradients are gathered in `g`. On a CPU, large ones are used where backward left them: the copy
    would be the dearest pass over memory of the whole step.
    """

    group: int  # index of the param group
    params: list[Tensor]
    names: list[str]
    x: Tensor  # (size,) padded with zeros to a multiple of `parts`
    g: Tensor
    x_views: list[Tensor]
    g_views: list[Tensor | None]  # None: nothing was gathered for this parameter yet
    g_spans: list[slice | None]  # where in g that is; None: the gradient stays where it is
    spans: list[slice] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)

    def adopt_gradient(self, i: int) -> None:
        """Makes sure the gradient of parameter i is where `gradients` expects it."""
        grad, view = self.params[i].grad, self._view_of_g(i)
        if grad is None or grad is view:
            return
        if grad.is_sparse:
            raise ValueError(
                f"{self.names[i]} has a sparse gradient, which cannot be averaged "
                "with neighbors; use sparse=False in its embedding"
            )
        if view is None:
            if _alike(grad, self.x_views[i]):
                return
            view = self.g_views[i] = torch.empty_like(self.x_views[i])
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad.detach())  # backward(create_graph=True) gives it a history
        self.params[i].grad = view

    def gather_gradients(self) -> None:
        """Puts every gradient in place; a parameter that got none has gradient zero."""
        for i, p in enumerate(self.params):
            if p.grad is not None:
                self.adopt_gradient(i)
                continue
            view = self._view_of_g(i)
            if view is None:
                self.g_views[i] = torch.zeros_like(self.x_views[i])
            else:
                view.zero_()

    def _view_of_g(self, i: int) -> Tensor | None:
        """Where the gradient of parameter i is gathered.

        The view is p.grad itself, so `p.grad.data = ...` takes it to other memory, and so does
        `model.to("cpu:0")`; then there is a new one.
        """
        view, span = self.g_views[i], self.g_spans[i]
        if view is not None and span is not None:
            place = self.g.data_ptr() + span.start * self.g.element_size()
            if view.data_ptr() != place:
                view = self.g_views[i] = _view(self.g, span, self.x_views[i])
        return view

    def gradients(self) -> list[Tensor]:
        """The gradient, gathered before, as flat tensors in the order of `stretches`."""
        return [
            self.g[stretch.inside] if stretch.owner is None else _flat(self.gradient(stretch.owner))
            for stretch in self.stretches
        ]

    def gradient(self, i: int) -> Tensor:
        grad = self.params[i].grad
        found = self.g_views[i] if grad is None else grad.detach()
        assert found is not None
        return found

    def gradient_bytes(self) -> int:
        """What gradients take, as far as the bucket keeps them or the parameters do."""
        owners = [s.owner for s in self.stretches if s.owner is not None]
        held = [g for i in owners for g in (self.params[i].grad, self.g_views[i]) if g is not None]
        return self.g.nbytes + sum({g.data_ptr(): g.nbytes for g in held}.values())

    def holds(self, i: int) -> bool:
        """Whether the memory of parameter i is still the bucket's."""
        p, view = self.params[i], self.x_views[i]
        return p.data_ptr() == view.data_ptr() and p.dtype == view.dtype

    def owns(self, i: int) -> bool:
        """Whether no other optimizer was built with parameter i since."""
        owner = _owners.get(self.params[i], lambda: None)()
        return owner is None or owner is self

    @torch.no_grad()
    def reclaim(self, i: int) -> bool:
        """Makes parameter i live in the bucket again, with the value it has; True if that is new.

        `model.to("cpu:0")`, as some trainers call it, moves a parameter to memory of its own and
        changes nothing else. What changes shape, precision or kind of device is refused.
        """
        p, view, name = self.params[i], self.x_views[i], self.names[i]
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
        changed = not torch.equal(p, view)
        view.copy_(p)
        p.data = view
        return changed

    def pieces(self, per_layer: bool, part: slice) -> list[tuple[int, slice, slice]]:
        """How `x[part]` is cut for one call of message or update: by layer or by cache size.

        Each is the number of its stretch, its place in that, and its place in x[part].
        """
        if len(self.stretches) == 1 and self.stretches[0].owner is None:
            size = part.stop - part.start
            chunk = CHUNK if self.x.device.type == "cpu" else max(size, 1)
            spans = self.spans if per_layer else _cut(0, size, chunk)
            return [(0, span, span) for span in spans]
        return [
            (k, slice(piece.start - span.start, piece.stop - span.start), piece)
            for k, span in enumerate(stretch.span for stretch in self.stretches)
            for piece in _cut(span.start, span.stop, CHUNK)
        ]


def build_buckets(
    param_groups: Sequence[ParamGroup], bucket_bytes: int, parts: int = 1, gather: bool = False
) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` by group, dtype and device, in order of arrival.

    `gather` copies even large gradients into the bucket, so that they are one tensor.

    Backward reaches the last parameters first, so buckets and what is in them run backwards.
    """
    names = {id(p): name for name, p in named_parameters(param_groups)}
    places = {key: place for place, key in enumerate(names)}
    buckets: list[Bucket] = []
    for index, group in enumerate(param_groups):
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in reversed(group["params"]):
            if p.requires_grad and p.numel():
                alike.setdefault((p.dtype, p.device), []).append(p)
        for members in alike.values():
            for chosen in _fill(members, bucket_bytes):
                called = [names[id(p)] for p in chosen]
                buckets.append(_flatten(index, chosen, called, parts, gather))
    return sorted(buckets, key=lambda bucket: -places[id(bucket.params[0])])


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


@torch.no_grad()
def _flatten(
    group: int, params: list[Tensor], names: list[str], parts: int, gather: bool
) -> Bucket:
    size = sum(p.numel() for p in params)
    padded = -(-size // parts) * parts
    gather = gather or parts > 1 or params[0].device.type != "cpu"
    x = params[0].new_zeros(padded)
    large = [not gather and p.numel() >= _LARGE for p in params]
    g = x.new_zeros(sum(p.numel() for p, own in zip(params, large, strict=True) if not own))
    if gather:
        g = torch.zeros_like(x)
    bucket = Bucket(group, params, names, x, g, [], [], [])
    start = used = 0
    for i, p in enumerate(params):
        span = slice(start, start + p.numel())
        start = span.stop
        bucket.spans.append(span)
        bucket.x_views.append(shaped_like(x[span], p))
        bucket.x_views[-1].copy_(p)
        p.data = bucket.x_views[-1]
        _owners[p] = weakref.ref(bucket)
        if large[i]:
            bucket.g_views.append(None)
            bucket.g_spans.append(None)
            bucket.stretches.append(Stretch(span, i, slice(0, 0)))
            continue
        inside = slice(used, used + p.numel())
        used = inside.stop
        bucket.g_views.append(_view(g, inside, p))
        bucket.g_spans.append(inside)
        last = bucket.stretches.pop() if i and not large[i - 1] else Stretch(span, None, inside)
        bucket.stretches.append(
            Stretch(slice(last.span.start, span.stop), None, slice(last.inside.start, inside.stop))
        )
    if gather:
        bucket.stretches = [Stretch(slice(0, padded), None, slice(0, padded))]
    for i in range(len(params)):
        bucket.adopt_gradient(i)
    return bucket


def _view(g: Tensor, inside: slice, p: Tensor) -> Tensor:
    # .data, so that a write to one of them does not count as a write to all: see Freshness.
    return shaped_like(g[inside], p).data


def _cut(start: int, stop: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, stop)) for i in range(start, stop, chunk)]


def _described(p: Tensor) -> str:
    return f"{p.dtype} {tuple(p.shape)} on {p.device.type}"


def _alike(grad: Tensor, view: Tensor) -> bool:
    """Whether the gradient's elements lie in memory as the parameter's do."""
    return grad.dtype == view.dtype and grad.shape == view.shape and grad.stride() == view.stride()


def _flat(dense: Tensor) -> Tensor:
    """A view of all elements in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))


def shaped_like(flat: Tensor, p: Tensor) -> Tensor:
    """`flat` in the shape of p, with p's own memory order if it is dense (channels last)."""
    if p.is_contiguous() or not _dense(p):
        return flat.view(p.shape)
    return flat.as_strided(p.shape, p.stride())


def _dense(p: Tensor) -> bool:
    """Whether p's elements fill a stretch of memory without holes, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
