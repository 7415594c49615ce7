"""One bucket's way through a step: gradient in, message out, mix back, update."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Step
from decentlam.errors import StaleMessageError
from decentlam.exchange.clerk import Clerk, Job
from decentlam.exchange.network import Network
from decentlam.exchange.process_group import Round, Terms, explained
from decentlam.gradients import all_finite
from decentlam.layout import Bucket, shaped_like


class Flight:
    """Owns the message buffer and the algorithm's state of a bucket.

    In a node of several processes each of them owns one part of the bucket: gradients are summed
    into the parts, the part is exchanged and updated, and the parts are gathered again.
    """

    def __init__(
        self, slot: int, bucket: Bucket, algorithm: Algorithm, network: Network, timeout: timedelta
    ) -> None:
        self.slot = slot  # the bucket's number
        self.bucket = bucket
        self.network = network
        self.timeout = timeout
        self.algorithm = algorithm
        size = len(bucket.x) // network.processes_per_node
        self.part = slice(network.lane * size, (network.lane + 1) * size)
        self.x = bucket.x[self.part]
        self._sum: Tensor | None = None  # over the node: NCCL reduces its part, gloo the whole
        if network.node_group is not None:
            self._sum = torch.empty_like(self.x if network.batched else bucket.g)
        self.state = algorithm.init(self.x)
        self.pieces = bucket.pieces(algorithm.layerwise, self.part)
        self.adaptive = [not algorithm.layerwise or p.ndim > 1 for p in bucket.params]
        self._cut = [
            (self.x[s], {name: t[s] for name, t in self.state.items()}) for _, _, s in self.pieces
        ]
        self._z: Tensor | None = None
        self.outbox: Tensor | None = None  # where neighbors read the message, if they can
        self._gathering: Round | None = None
        self._kept: list[tuple[slice, Tensor, dict[str, Tensor]]] = []
        self.round: Round | None = None
        self.arrived: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Ready for the next step's gradients."""
        self.arrived.clear()
        self.started = False  # the gradient is complete
        self.sent = False  # the message is formed and on its way, or the clerk is at it
        self.early = False  # the message left before the gradient was known
        self.skipped = False
        self.reducing: Round | None = None  # the sum over the processes of this node
        self.departing: Job | None = None  # in which the message is formed, by another thread
        self.updating: Job | None = None
        self.plan: tuple[Algorithm, Step] | None = None  # of the update that is still to come
        self.hyper: dict[str, float] = {}
        self._gradients: list[Tensor] = []  # by piece
        self._seen: tuple[list[Tensor | None], int] = ([], -1)
        self._departed: int | None = None
        self._noted: dict[int, tuple[Tensor, int]] = {}
        self._kept = []

    # Gradient --------------------------------------------------------------------------------

    def begin(self, skip: bool, index: int) -> None:
        """The gradient is complete: from here on it must not change."""
        self.started, self.skipped = True, skip
        if self.network.num_processes == 1:
            self._keep_unused()
        self.bucket.gather_gradients()
        if skip:
            for g in self.bucket.gradients():
                g.zero_()
        self._seen = self._gradient_versions()
        if self._sum is None:
            self._cut_gradient(self.bucket.gradients())
        elif self.network.batched:
            reduce = dist.reduce_scatter_tensor
            self.reducing = self._inside(index, reduce, self._sum, self.bucket.g)
        else:  # gloo's reduce_scatter is an all_reduce too, but one that ends only in wait()
            self._sum.copy_(self.bucket.g)
            self.reducing = self._inside(index, dist.all_reduce, self._sum)

    def _cut_gradient(self, gradients: list[Tensor]) -> None:
        self._gradients = [gradients[k][inside] for k, inside, _ in self.pieces]

    def _inside(self, index: int, collective: Callable[..., Any], *tensors: Tensor) -> Round:
        """Starts a collective of the processes of this node."""
        place = f"node {self.network.node}, step {index}, bucket {self.slot}"
        peer = "another process of its node"
        with explained(place, peer, self.timeout):
            work = collective(*tensors, group=self.network.node_group, async_op=True)
        return Round([], place, self.timeout, [(peer, work)])

    def sum_in_node(self, tensor: Tensor, index: int) -> None:
        """Sums a tensor over the processes of this node, in place."""
        self._inside(index, dist.all_reduce, tensor).wait()

    def complete_gradient(self) -> None:
        """In a node of several processes: the mean gradient of this process's part."""
        if self.reducing is not None:
            assert self._sum is not None
            self.reducing.wait()
            self.reducing = None
            part = self._sum if self.network.batched else self._sum[self.part]
            self._cut_gradient([part.div_(self.network.processes_per_node)])

    def check_fresh(self, hyper: dict[str, float]) -> None:
        """A message formed from another gradient or lr than step() sees must not be used."""
        if self.parameters_changed():
            raise StaleMessageError(
                "a parameter changed while its message was on the way (by load_state_dict or an "
                "assignment between backward and step(), or with AWC-DmSGD after step()). Change "
                "parameters between step() and backward, and with AWC-DmSGD use overlap=False."
            )
        needs_gradient = self.algorithm.needs_gradient
        if needs_gradient and self.hyper != hyper:
            raise StaleMessageError(
                "lr, momentum or weight decay changed between backward and step(): the message "
                f"left with {self.hyper}, the group now has {hyper}. Change them after step(), as "
                "schedulers do, or use overlap=False."
            )
        in_flight = needs_gradient or self.network.node_group is not None
        if in_flight and self.gradient_changed():
            raise StaleMessageError(
                "a gradient changed between backward and step(), but its message had left "
                "already. To clip, use max_grad_norm=... with overlap=False; for any other change "
                "use overlap=False."
            )

    def note_gradient(self, i: int) -> bool:
        """Remembers a gradient as backward left it; False if it was there already."""
        grad = self.bucket.params[i].grad
        assert grad is not None
        again = i in self._noted
        self._noted[i] = (grad, grad._version)
        return not again

    def gradient_touched(self) -> bool:
        """Whether a gradient is no longer as noted."""
        for i, (grad, version) in self._noted.items():
            if self.bucket.params[i].grad is not grad or grad._version != version:
                return True
        return False

    def gradient_changed(self) -> bool:
        now, version = self._gradient_versions()
        then, before = self._seen
        return version != before or any(a is not b for a, b in zip(now, then, strict=True))

    def _gradient_versions(self) -> tuple[list[Tensor | None], int]:
        grads = [p.grad for p in self.bucket.params]
        return grads, sum(g._version for g in grads if g is not None)

    def parameters_changed(self) -> bool:
        """Whether somebody else wrote to a parameter since its message was to be formed."""
        return self._departed is not None and self._departed != self._parameter_versions()

    def _parameter_versions(self) -> int:
        return sum(p._version for p in self.bucket.params)  # ours are writes to x, not to p

    def recall(self) -> Round:
        """The round of a message that left early; the message counts as never sent."""
        assert self.early and self.round is not None
        self.early, self._departed = False, None
        return self.round

    def nonfinite_gradients(self) -> list[str]:
        if all(all_finite(g) for g in self._gradients):
            return []
        return self._nonfinite_names(torch.cat(self._gradients)[None])

    # Message ---------------------------------------------------------------------------------

    def message(self, index: int) -> Tensor:
        """The buffer of this step's message, (payloads, size)."""
        payloads = self.algorithm.payloads(index)
        if self.outbox is not None:
            return self.outbox[:payloads]
        if self._z is None or len(self._z) < payloads:
            self._z = self.x.new_empty((payloads, len(self.x)))
        return self._z[:payloads]

    def message_bytes(self, index: int) -> int:
        return self.algorithm.payloads(index) * self.x.nbytes

    def held_gradient_bytes(self) -> int:
        return self.bucket.gradient_bytes() + (0 if self._sum is None else self._sum.nbytes)

    def held_message_bytes(self) -> int:
        return 0 if self._z is None else self._z.nbytes

    def note_parameters(self) -> None:
        """From here on they must not change until the update."""
        self._departed = self._parameter_versions()

    def form_message(self, algorithm: Algorithm, step: Step, check: bool) -> list[str]:
        """Fills the message buffer; returns the names of parameters that are not finite."""
        z = self.message(step.index)
        gradients = self._gradients
        if not algorithm.needs_gradient:  # it may not be there yet; x stands in, unread
            gradients = [x for x, _ in self._cut]
            step = dataclasses.replace(step, weight_decay=0.0)
        finite = True
        for (_, _, s), (x, state), g in zip(self.pieces, self._cut, gradients, strict=True):
            rows = [row[s] for row in z]
            here = dataclasses.replace(step, out=rows[0] if len(rows) == 1 else None)
            formed = algorithm.message(x, _decayed(g, x, step), state, here)
            for row, payload in zip(rows, _as_tuple(formed), strict=True):
                if payload is not row:
                    row.copy_(payload)
                finite = finite and (not check or math.isfinite(row.sum().item()))
        return [] if finite else self._nonfinite_names(z)

    def _nonfinite_names(self, z: Tensor) -> list[str]:
        """Parameters with a NaN or infinity in their stretch of z, (payloads, size)."""
        bad = torch.zeros(len(self.bucket.x), dtype=torch.bool)
        bad[self.part] = (~torch.isfinite(z)).any(dim=0).cpu()
        return [
            name
            for name, span in zip(self.bucket.names, self.bucket.spans, strict=True)
            if bad[span].any()
        ]

    # Update ----------------------------------------------------------------------------------

    def update(self, algorithm: Algorithm, terms: Terms, step: Step) -> None:
        """x and state from the mix; the terms are summed piece by piece, in the cache."""
        plain = dataclasses.replace(step, adaptive=False)
        cut = zip(self.pieces, self._cut, self._gradients, strict=True)
        for i, ((_, _, s), (x, state), g) in enumerate(cut):
            g = _decayed(g, x, step)
            mixed = _weighted_sum(terms, s) if terms else algorithm.message(x, g, state, step)
            adaptive = not algorithm.layerwise or self.adaptive[i]
            algorithm.update(x, g, mixed, state, step if adaptive else plain)
        if self.network.node_group is not None:
            gather = dist.all_gather_into_tensor
            self._gathering = self._inside(step.index, gather, self.bucket.x, self.x)
        for span, x, state in self._kept:
            self.x[span] = x
            for name, value in state.items():
                self.state[name][span] = value

    def prepare(self, algorithm: Algorithm, step: Step) -> None:
        """Says what the update will be, and from which gradients."""
        self.plan = (algorithm, step)
        self._seen = self._gradient_versions()

    def settle(self) -> float:
        """Waits for the mix and updates as planned, if that is still to come; seconds waited."""
        begun = time.perf_counter()
        if self.updating is not None:
            self.updating.wait()
            self.updating = None
            return time.perf_counter() - begun
        if self.plan is None:
            return 0.0
        assert self.round is not None
        terms = self.round.wait()
        waited = time.perf_counter() - begun
        self._update_from(terms)
        return waited

    def settle_by(self, clerk: Clerk) -> None:
        """Lets the clerk do it."""
        plan, round = self.plan, self.round
        assert plan is not None and round is not None

        def settle() -> None:
            terms = round.wait()
            if self.plan is plan:  # nobody gave the step up meanwhile
                self._update_from(terms)

        self.updating = clerk.hand(settle)

    def _update_from(self, terms: Terms) -> None:
        assert self.plan is not None
        (algorithm, step), self.plan = self.plan, None
        self._check_kept()
        self.update(algorithm, terms, step)
        self._check_kept()  # it may have changed meanwhile, by another thread
        self._gradients, self._seen = [], ([], 0)  # the next forward may need the memory

    def _check_kept(self) -> None:
        grads, version = self._seen
        if version != sum(g._version for g in grads if g is not None):
            raise StaleMessageError(
                "a gradient was changed after step(), while its update waited for messages "
                "(overlap='forward'). Use zero_grad() of the optimizer, or overlap=True."
            )

    def land(self) -> None:
        """Leaves nothing under way: a process may end, or the message change, after a step."""
        assert self.round is not None
        self.round.finish()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _keep_unused(self) -> None:
        """A node alone treats a parameter without gradient as torch.optim does: untouched."""
        self._kept = [
            (
                span,
                self.x[span].clone(),
                {name: t[span].clone() for name, t in self.state.items()},
            )
            for p, span in zip(self.bucket.params, self.bucket.spans, strict=True)
            if p.grad is None
        ]

    # State -----------------------------------------------------------------------------------

    def state_views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The state as torch.optim keeps it, by parameter; a part belongs to the first one."""
        if self.network.processes_per_node > 1:
            yield self.bucket.params[0], dict(self.state)
            yield from ((p, {}) for p in self.bucket.params[1:])
            return
        for p, span in zip(self.bucket.params, self.bucket.spans, strict=True):
            yield p, {name: shaped_like(t[span], p) for name, t in self.state.items()}

    def load_state(self, saved: dict[Tensor, dict[str, Tensor]]) -> None:
        """Takes over what was saved; what was not is as at the start."""
        for name, fresh in self.algorithm.init(self.x).items():
            self.state[name].copy_(fresh)
        for p, views in self.state_views():
            for name, view in views.items():
                value = saved[p].get(name)
                if value is None:
                    continue
                if value.shape != view.shape:
                    raise ValueError(
                        f"state {name!r} has shape {tuple(value.shape)}, here it is "
                        f"{tuple(view.shape)}; it was saved with another bucket_bytes or "
                        "processes_per_node. Use the same, or decentlam.load_checkpoint."
                    )
                view.copy_(value)


def _decayed(g: Tensor, x: Tensor, step: Step) -> Tensor:
    return torch.add(g, x, alpha=step.weight_decay) if step.weight_decay else g


def _as_tuple(message: Message) -> tuple[Tensor, ...]:
    return message if isinstance(message, tuple) else (message,)


def _weighted_sum(terms: Terms, piece: slice) -> Message:
    rows = tuple(_sum([(w, t[k, piece]) for w, t in terms]) for k in range(len(terms[0][1])))
    return rows if len(rows) > 1 else rows[0]


def _sum(terms: list[tuple[float, Tensor]]) -> Tensor:
    (weight, first), rest = terms[0], terms[1:]
    if len(rest) == 1 and abs(weight + rest[0][0] - 1.0) < 1e-15:
        return torch.lerp(first, rest[0][1], rest[0][0])  # one operation instead of two
    if weight == 1.0 and rest:
        total, rest = torch.add(first, rest[0][1], alpha=rest[0][0]), rest[1:]
    else:
        total = first if weight == 1.0 else first * weight
    for weight, term in rest:
        total.add_(term, alpha=weight)
    return total
