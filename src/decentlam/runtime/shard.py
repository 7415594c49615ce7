"""The memory of a bucket that this process updates, and the two calls of the algorithm on it.

One process per node updates whole buckets. In a node of several processes each of them has one
shard of every bucket, exchanges it with the same shard of other nodes, and updates it.

The algorithm is called piece by piece: a layer if it works on layers, else as much as stays in the
cache. The terms of a mix are summed inside of that, so that each received byte is read once.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Step
from decentlam.algorithms.kernels import CHUNK
from decentlam.exchange.base import Terms, combine
from decentlam.exchange.network import Network
from decentlam.runtime.bucket import Bucket, shaped_like

Unmoved = list[tuple[slice, Tensor, dict[str, Tensor]]]  # where, and the values there


@dataclasses.dataclass(frozen=True)
class Plan:
    """With what a message is formed and an update is made."""

    algorithm: Algorithm
    step: Step


class Shard:
    """Owns the algorithm's state. Gradients come as `cut` returns them, one for each piece."""

    def __init__(self, bucket: Bucket, algorithm: Algorithm, network: Network) -> None:
        self._bucket, self._network, self._init = bucket, network, algorithm.init
        size = len(bucket.x) // network.processes_per_node
        self.place = slice(network.local_rank * size, (network.local_rank + 1) * size)
        self.x = bucket.x[self.place]
        self.state = algorithm.init(self.x)
        self._pieces = bucket.pieces(algorithm.layerwise, self.place)
        self._cut = [
            (self.x[s], {name: t[s] for name, t in self.state.items()}) for _, _, s in self._pieces
        ]
        self._adaptive = [not algorithm.layerwise or p.ndim > 1 for p in bucket.params]

    # The recursion ------------------------------------------------------------------------------

    def cut(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The flat gradients of the bucket, by piece."""
        return [gradients[k][inside] for k, inside, _ in self._pieces]

    def is_message(self, plan: Plan) -> bool:
        """Whether the message is x itself, as that of AWC-DmSGD is, and can be sent from there."""
        if plan.algorithm.needs_gradient:
            return False
        x, state = self.x[:1], {name: t[:1] for name, t in self.state.items()}
        return plan.algorithm.message(x, x, state, plan.step) is x

    def form(self, message: Tensor, gradients: Sequence[Tensor], plan: Plan, look: bool) -> bool:
        """Fills the message, (payloads, size); False if `look` finds a value that is not finite."""
        algorithm, step = plan.algorithm, plan.step
        if not algorithm.needs_gradient:  # it may not be there yet; x stands in, unread
            gradients = [x for x, _ in self._cut]
            step = dataclasses.replace(step, weight_decay=0.0)
        finite = True
        for (_, _, s), (x, state), g in zip(self._pieces, self._cut, gradients, strict=True):
            rows = [row[s] for row in message]
            here = dataclasses.replace(step, out=rows[0]) if len(rows) == 1 else step
            formed = algorithm.message(x, _decayed(g, x, step), state, here)
            payloads = formed if isinstance(formed, tuple) else (formed,)
            for row, payload in zip(rows, payloads, strict=True):
                if payload is not row:
                    row.copy_(payload)
                finite = finite and (not look or math.isfinite(row.sum().item()))
        return finite

    def update(self, terms: Terms, gradients: Sequence[Tensor], plan: Plan) -> None:
        """Makes x and state new; without terms the own message is the mix."""
        algorithm, step = plan.algorithm, plan.step
        plain = dataclasses.replace(step, adaptive=False)
        cut = zip(self._pieces, self._cut, gradients, strict=True)
        for i, ((_, _, s), (x, state), g) in enumerate(cut):
            g = _decayed(g, x, step)
            mixed = _mixed(terms, s) if terms else algorithm.message(x, g, state, step)
            adaptive = not algorithm.layerwise or self._adaptive[i]
            algorithm.update(x, g, mixed, state, step if adaptive else plain)

    def mixed_with_the_same(
        self, terms: Terms, gradients: Sequence[Tensor], plan: Plan
    ) -> bool | None:
        """Whether all others that the message was averaged with sent the very same one; None if
        that cannot be told."""
        if not terms or not any(bool(g.any()) for g in gradients):
            return None
        if len(terms) > 1:
            return all(torch.equal(terms[0][1].to(t.dtype), t) for _, t in terms[1:])
        (_, _, s), (x, state), g = self._pieces[0], self._cut[0], gradients[0]
        own = plan.algorithm.message(x, _decayed(g, x, plan.step), state, plan.step)
        return isinstance(own, Tensor) and torch.allclose(own, combine(terms)[0, s], 1e-5, 0.0)

    def nonfinite_names(self, values: Tensor) -> list[str]:
        """Parameters with a NaN or infinity in their stretch of `values`, (payloads, size)."""
        bad = torch.zeros(len(self._bucket.x), dtype=torch.bool)
        bad[self.place] = (~torch.isfinite(values)).any(dim=0).cpu()
        spans = zip(self._bucket.names, self._bucket.spans, strict=True)
        return [name for name, span in spans if bad[span].any()]

    # Parameters that a step must not move -------------------------------------------------------

    def unmoved(self) -> Unmoved:
        """What a step must leave as it is: parameters that were frozen, and on one node alone, as
        in torch.optim, those without a gradient."""
        alone, found = self._network.num_processes == 1, []
        size, first = len(self.x), self.place.start
        for p, span in zip(self._bucket.params, self._bucket.spans, strict=True):
            if (alone and p.grad is None) or not p.requires_grad:
                inside = slice(*(min(max(k - first, 0), size) for k in (span.start, span.stop)))
                state = {name: t[inside].clone() for name, t in self.state.items()}
                found.append((inside, self.x[inside].clone(), state))
        return found

    def restore(self, unmoved: Unmoved) -> None:
        for inside, x, state in unmoved:
            self.x[inside] = x
            for name, value in state.items():
                self.state[name][inside] = value

    # State by parameter, the form in which it is saved ------------------------------------------

    def state_views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The state as torch.optim keeps it; that of a part belongs to the first parameter."""
        if self._network.processes_per_node > 1:
            yield self._bucket.params[0], dict(self.state)
            yield from ((p, {}) for p in self._bucket.params[1:])
        else:
            yield from self._by_parameter(self.state)

    def whole_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The state of the node; together with the other processes of the node."""
        whole, group = self.state, self._network.intra_node_group
        if group is not None:
            whole = {name: torch.empty_like(self._bucket.x) for name in self.state}
            with self._network.errors():
                for name, part in self.state.items():
                    dist.all_gather_into_tensor(whole[name], part, group=group)
        return self._by_parameter(whole)

    def load_whole_state(self, saved: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Takes over the state of a node, in whatever buckets and shards it was."""
        whole = self._init(self._bucket.x)
        for p, views in self._by_parameter(whole):
            for name in views.keys() & saved.get(p, {}).keys():
                views[name].copy_(saved[p][name])
        for name, values in whole.items():
            self.state[name].copy_(values[self.place])

    def load_state(self, saved: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Takes over what was saved; what was not is as at the start of a run from here."""
        for name, fresh in self._init(self.x).items():
            self.state[name].copy_(fresh)
        for p, views in self.state_views():
            for name, view in views.items():
                value = saved.get(p, {}).get(name)
                if value is None:
                    continue
                if value.shape != view.shape:
                    raise ValueError(
                        f"state {name!r} has shape {tuple(value.shape)}, here it is "
                        f"{tuple(view.shape)}; it was saved with another bucket_bytes or "
                        "processes_per_node. Use the same, or decentlam.load_checkpoint."
                    )
                view.copy_(value)

    def _by_parameter(
        self, flat: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for p, span in zip(self._bucket.params, self._bucket.spans, strict=True):
            yield p, {name: shaped_like(t[span], p) for name, t in flat.items()}


def _decayed(g: Tensor, x: Tensor, step: Step) -> Tensor:
    return torch.add(g, x, alpha=step.weight_decay) if step.weight_decay else g


def _mixed(terms: Terms, piece: slice) -> Message:
    """The mix of one piece, in memory that the next one uses again."""
    rows = []
    for k, own in enumerate(terms[0][1][:, piece]):
        rows.append(combine([(w, t[k, piece]) for w, t in terms], out=_scratch(k, own)))
    return tuple(rows) if len(rows) > 1 else rows[0]


_memory = threading.local()  # the training's thread and the worker may update at once


def _scratch(row: int, like: Tensor) -> Tensor | None:
    """Memory for a piece like this, the same at every call of a thread: fresh memory costs more
    than what is computed in it. None for a layer that is larger than pieces are."""
    if like.device.type == "cpu" and len(like) > CHUNK:
        return None
    held: dict[Any, Tensor] = vars(_memory).setdefault("held", {})
    key = row, like.dtype, like.device
    if key not in held or len(held[key]) < len(like):
        with torch.inference_mode(False):  # it outlives an evaluation that comes to need it first
            held[key] = torch.empty_like(like)
    return held[key][: len(like)]
