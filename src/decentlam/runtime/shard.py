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

from decentlam.algorithms import Algorithm, Message, Step, compiled
from decentlam.algorithms.kernels import CHUNK
from decentlam.exchange.base import Terms, combine
from decentlam.exchange.network import Network
from decentlam.runtime.bucket import Bucket, shaped_like

_SEEN = 8  # elements that a step must move for messages of 16 bits to tell whether it is the same
# Of a parameter: which one, where it is, and the values there.
Unmoved = list[tuple[Tensor, slice, Tensor, dict[str, Tensor]]]


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
        self._sizes = [len(x) for x, _ in self._cut]
        self._on_cpu = self.x.device.type == "cpu"  # a GPU's allocator knows which stream uses what
        self._adaptive = [not algorithm.layerwise or p.ndim > 1 for p in bucket.params]

    # The recursion ------------------------------------------------------------------------------

    def cut(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The flat gradients of the bucket, by piece."""
        return [gradients[k][inside] for k, inside, _ in self._pieces]

    def form(self, message: Tensor, gradients: Sequence[Tensor], plan: Plan, look: bool) -> bool:
        """Fills the message, (payloads, size); False if `look` finds a value that is not finite.
        It looks at each piece while that is in the cache."""
        algorithm, step = plan.algorithm, plan.step
        if not algorithm.needs_gradient:  # it may not be there yet; x stands in, unread
            gradients = [x for x, _ in self._cut]
            step = dataclasses.replace(step, weight_decay=0.0)
        finite = compiled.form(algorithm, message, self.x, gradients, self.state, step)
        if finite is not None:
            return finite or not look
        rows, finite = self._rows(message), True
        (decayed,) = self._scratch(1) if step.weight_decay and self._on_cpu else (None,)
        for i, ((x, state), g) in enumerate(zip(self._cut, gradients, strict=True)):
            out = rows[0][i] if len(rows) == 1 else None
            formed = algorithm.message(x, _decayed(g, x, step, decayed), state, step.at(out))
            for row, payload in zip(rows, _payloads(formed), strict=True):
                if payload is not row[i]:
                    row[i].copy_(payload)
                finite = finite and (not look or math.isfinite(row[i].sum().item()))
        return finite

    def update(
        self,
        terms: Terms,
        gradients: Sequence[Tensor],
        plan: Plan,
        sent: Tensor | None = None,
        into: Tensor | None = None,
        look: bool = False,
    ) -> bool:
        """Makes x and state new; without terms the own message is the mix. `sent` is the own
        message if it is still as it was formed. With `into`, (size,), which may be the own message,
        x stays as it is and the new one is made there; False if `look` finds a value in it that is
        not finite."""
        algorithm, step = plan.algorithm, plan.step
        if into is None:
            here = step.at(sent=sent)
            if compiled.update(algorithm, terms, self.x, gradients, self.state, here):
                return True
        plain = dataclasses.replace(step, adaptive=False) if algorithm.layerwise else step
        weights, mixing = [w for w, _ in terms], [self._rows(t) for _, t in terms]
        own = None if sent is None or len(sent) > 1 else self._rows(sent)[0]
        new = [x for x, _ in self._cut] if into is None else into.split(self._sizes)
        in_place = algorithm.replaces_x and (own is not None or not algorithm.reads_sent)
        mixes = len(mixing[0]) - in_place if mixing else 0  # that need memory of their own
        decays = bool(step.weight_decay) and (algorithm.update_reads_g or not terms)
        scratch = self._scratch(mixes + algorithm.reads_sent + (decays and self._on_cpu))
        decayed = scratch.pop() if decays and self._on_cpu else None
        finite = True
        for i, ((x, state), g) in enumerate(zip(self._cut, gradients, strict=True)):
            if decays:
                g = _decayed(g, x, step, decayed)
            free = [row.narrow(0, 0, self._sizes[i]) for row in scratch]
            if terms:
                outs = [new[i], *free] if in_place else free
                mixed = _mixed(weights, [[row[i] for row in rows] for rows in mixing], outs)
            else:
                mixed = algorithm.message(x, g, state, step)
            if new[i] is not x and not in_place:
                new[i].copy_(x)
            adaptive = not algorithm.layerwise or self._adaptive[i]
            out = free[-1] if algorithm.reads_sent else None
            here = (step if adaptive else plain).at(out, None if own is None else own[i])
            algorithm.update(new[i], g, mixed, state, here)
            finite = finite and (not look or math.isfinite(new[i].sum().item()))
        return finite

    def _rows(self, message: Tensor) -> list[Sequence[Tensor]]:
        """The payloads of a message, each cut into pieces."""
        return [row.split(self._sizes) for row in message.unbind()]

    def _scratch(self, rows: int) -> list[Tensor]:
        """Memory for so many pieces at once."""
        return _scratch(rows, max(self._sizes, default=0), self.x)

    def mixed_with_the_same(
        self, terms: Terms, gradients: Sequence[Tensor], plan: Plan
    ) -> bool | None:
        """Whether all others that the message was averaged with sent the very same one; None if
        that cannot be told."""
        if not terms or (len(terms) == 1 and terms[0][0] == 1.0):  # nobody else's
            return None
        if not any(bool(g.any()) for g in gradients):
            return None
        if len(terms) > 1:
            mine = terms[0][1]
            rounded = next((t.dtype for _, t in terms[1:] if t.dtype is not mine.dtype), None)
            # Of small steps nothing is seen in 16 bits.
            if rounded is not None and plan.algorithm.needs_gradient:
                seen = mine[0].to(rounded) != self.x.to(rounded)
                if int(seen.sum()) < _SEEN:
                    return None
            return all(torch.equal(mine.to(t.dtype), t) for _, t in terms[1:])
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
                found.append((p, inside, self.x[inside].clone(), state))
        return found

    def restore(self, unmoved: Unmoved) -> None:
        for _, inside, x, state in unmoved:
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

    def check_state(self, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuses state of other shapes."""
        for p, views in self.state_views():
            for name, view in views.items():
                value = saved.get(p, {}).get(name)
                if value is not None and not isinstance(value, Tensor):
                    raise ValueError(f"state {name!r} is no tensor but {type(value).__name__}")
                if value is not None and value.shape != view.shape:
                    raise ValueError(
                        f"state {name!r} has shape {tuple(value.shape)}, here it is "
                        f"{tuple(view.shape)}. Is it of the same model? With processes_per_node "
                        "above 1, it and bucket_bytes must be the same, too; "
                        "decentlam.load_checkpoint needs neither."
                    )

    def load_state(self, saved: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Takes over what was saved; what was not is as at the start of a run from here."""
        self.check_state(saved)
        for name, fresh in self._init(self.x).items():
            self.state[name].copy_(fresh)
        for p, views in self.state_views():
            for name, view in views.items():
                value = saved.get(p, {}).get(name)
                if value is not None:
                    view.copy_(value)

    def _by_parameter(
        self, flat: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for p, span in zip(self._bucket.params, self._bucket.spans, strict=True):
            yield p, {name: shaped_like(t[span], p) for name, t in flat.items()}


def _decayed(g: Tensor, x: Tensor, step: Step, memory: Tensor | None = None) -> Tensor:
    """The gradient with weight decay, in `memory` if there is some."""
    out = None if memory is None else memory.narrow(0, 0, len(x))
    return torch.add(g, x, alpha=step.weight_decay, out=out) if step.weight_decay else g


def _payloads(message: Message) -> tuple[Tensor, ...]:
    return message if isinstance(message, tuple) else (message,)


def _mixed(weights: list[float], pieces: list[list[Tensor]], outs: list[Tensor]) -> Message:
    """The mix of one piece, of which `pieces` has the payloads of each term; `outs` may be more."""
    mixed = [
        combine(list(zip(weights, payloads, strict=True)), out=out)
        for payloads, out in zip(zip(*pieces, strict=True), outs, strict=False)
    ]
    return tuple(mixed) if len(mixed) > 1 else mixed[0]


_memory = threading.local()  # the training's thread and the worker may update at once


def _scratch(rows: int, size: int, like: Tensor) -> list[Tensor]:
    """Memory for a while, the same at every call of a thread: fresh memory costs more than what is
    computed in it. A layer that is larger than pieces are gets its own each time."""
    if like.device.type == "cpu" and size > CHUNK:
        return [like.new_empty(size) for _ in range(rows)]
    held: dict[Any, Tensor] = vars(_memory).setdefault("held", {})
    for row in range(rows):
        found = held.get((row, like.dtype, like.device))
        if found is None or len(found) < size:
            with torch.inference_mode(False):  # it outlives an evaluation that needs it first
                held[row, like.dtype, like.device] = like.new_empty(size)
    return [held[row, like.dtype, like.device] for row in range(rows)]
