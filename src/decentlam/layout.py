"""Flat buckets: parameters and gradients of a group become views of a few long tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 17  # elements; smaller ones cost calls, larger ones fall out of the cache


@dataclass(eq=False)
class Bucket:
    """Some parameters of one group, laid out one after the other in `x`, gradients in `g`."""

    group: int  # index of the param group
    params: list[Tensor]
    names: list[str]
    x: Tensor  # (size,) padded with zeros to a multiple of `parts`
    g: Tensor
    x_views: list[Tensor]
    g_views: list[Tensor]
    spans: list[slice] = field(default_factory=list)

    def adopt_gradient(self, i: int) -> None:
        """Moves the gradient of parameter i into its place in `g`."""
        grad, view = self.params[i].grad, self.g_views[i]
        if grad is None or grad is view:
            return
        if grad.is_sparse:
            raise ValueError(
                f"parameter {self.names[i]} has a sparse gradient, which cannot be averaged "
                "with neighbors; use sparse=False in its embedding"
            )
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad.detach())  # backward(create_graph=True) gives it a history
        self.params[i].grad = view

    def holds(self, i: int) -> bool:
        """Whether parameter i lives in the bucket: not moved, nor taken over by another."""
        p, view = self.params[i], self.x_views[i]
        return p.data_ptr() == view.data_ptr() and p.dtype == view.dtype

    def check_in_place(self) -> None:
        """Refuses to go on when a parameter no longer lives in the bucket."""
        for i, name in enumerate(self.names):
            if not self.holds(i):
                raise RuntimeError(
                    f"parameter {name} was moved or converted after the optimizer was built (by "
                    "model.to(...), .half(), a new p.data or another optimizer); build the "
                    "optimizer after that"
                )

    def pieces(self, per_layer: bool, part: slice) -> list[slice]:
        """How `x[part]` is cut for one call of message or update: by layer or by cache size."""
        if per_layer:
            return self.spans
        size = part.stop - part.start
        chunk = _CHUNK if self.x.device.type == "cpu" else max(size, 1)
        return [slice(i, min(i + chunk, size)) for i in range(0, size, chunk)]


def build_buckets(
    param_groups: Sequence[dict[str, Any]], bucket_bytes: int, parts: int = 1
) -> list[Bucket]:
    """Buckets of at most `bucket_bytes` by group, dtype and device, in order of arrival.

    Backward reaches the last parameters first, so buckets and what is in them run backwards.
    """
    buckets: list[tuple[int, Bucket]] = []
    position = 0
    for index, group in enumerate(param_groups):
        names = group.get("param_names") or [
            f"parameter {position + i}" for i in range(len(group["params"]))
        ]
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i, p in enumerate(group["params"]):
            if p.requires_grad:
                alike.setdefault((p.dtype, p.device), []).append(i)
        for members in alike.values():
            for chosen in _fill(group["params"], members[::-1], bucket_bytes):
                bucket = _flatten(
                    index,
                    [group["params"][i] for i in chosen],
                    [names[i] for i in chosen],
                    parts,
                )
                buckets.append((position + chosen[0], bucket))
        position += len(group["params"])
    return [bucket for _, bucket in sorted(buckets, key=lambda pair: -pair[0])]


def _fill(params: Sequence[Tensor], members: list[int], bucket_bytes: int) -> list[list[int]]:
    filled: list[list[int]] = []
    room = 0
    for i in members:
        size = params[i].numel() * params[i].element_size()
        if not filled or size > room:
            filled.append([])
            room = bucket_bytes
        filled[-1].append(i)
        room -= size
    return filled


@torch.no_grad()
def _flatten(group: int, params: list[Tensor], names: list[str], parts: int) -> Bucket:
    size = sum(p.numel() for p in params)
    padded = -(-size // parts) * parts
    x = params[0].new_zeros(padded)
    g = torch.zeros_like(x)
    bucket = Bucket(group, params, names, x, g, [], [])
    start = 0
    for p in params:
        span = slice(start, start + p.numel())
        start = span.stop
        bucket.spans.append(span)
        bucket.x_views.append(shaped_like(x[span], p))
        bucket.g_views.append(shaped_like(g[span], p))
        bucket.x_views[-1].copy_(p)
        p.data = bucket.x_views[-1]
    for i in range(len(params)):
        bucket.adopt_gradient(i)
    return bucket


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
