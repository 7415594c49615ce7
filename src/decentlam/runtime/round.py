"""One bucket's way through a step: gradient in, message out, mix back, update.

    COLLECTING --complete--> COMPLETE --send--> SENT --update--> UPDATED --finish--> COLLECTING

A message that needs no gradient (AWC-DmSGD) is sent early, while its bucket is still COLLECTING;
`send` then has nothing left to do. `abandon` leads back to COLLECTING from anywhere.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Algorithm, Message, Step
from decentlam.algorithms.kernels import CHUNK
from decentlam.errors import NonFiniteError
from decentlam.exchange.base import Exchange, Pending, Terms, combine, exchange_errors
from decentlam.exchange.network import Network
from decentlam.runtime.bucket import Bucket, shaped_like
from decentlam.runtime.freshness import Freshness
from decentlam.runtime.gradients import all_finite
from decentlam.runtime.worker import Worker


class Phase(Enum):
    COLLECTING = "collecting"  # gradients arrive
    COMPLETE = "complete"  # all gradients are there; in a node of several processes, being summed
    SENT = "sent"  # the message is on its way, or the worker is about to send it
    UPDATED = "updated"  # parameters and state are new; messages may still be leaving


@dataclasses.dataclass(frozen=True)
class Plan:
    """With what a message is formed and an update is made."""

    algorithm: Algorithm
    step: Step


class Round:
    """Owns the phase and the algorithm's state of a bucket.

    In a node of several processes each of them owns one part of the bucket: gradients are summed
    into the parts, the part is exchanged and updated, and the parts are gathered again.
    """

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        algorithm: Algorithm,
        network: Network,
        timeout: timedelta,
    ) -> None:
        self.number = number
        self.bucket = bucket
        self.fresh = Freshness(bucket.params)
        self._network, self._timeout = network, timeout
        size = len(bucket.x) // network.processes_per_node
        self.part = slice(network.local_rank * size, (network.local_rank + 1) * size)
        self.x = bucket.x[self.part]
        self._sum: Tensor | None = None  # over the node: NCCL reduces its part, gloo the whole
        if network.intra_node_group is not None:
            self._sum = torch.empty_like(self.x if network.is_nccl else bucket.g)
        self.state = algorithm.init(self.x)
        self._init = algorithm.init
        self._pieces = bucket.pieces(algorithm.layerwise, self.part)
        self._adaptive = [not algorithm.layerwise or p.ndim > 1 for p in bucket.params]
        self._cut = [
            (self.x[s], {name: t[s] for name, t in self.state.items()}) for _, _, s in self._pieces
        ]
        self._gathering: Pending | None = None
        self.abandon()

    def abandon(self) -> None:
        """Forgets the step: ready for the next one's gradients."""
        self._phase = Phase.COLLECTING
        self._arrived: set[int] = set()
        self._skipped = False
        self._reducing: Pending | None = None  # the sum over the processes of this node
        self._gradients: list[Tensor] = []  # by piece
        self._sending: Future[None] | None = None  # the worker's job that sends the message
        self._pending: Pending | None = None
        self._kept: list[tuple[slice, Tensor, dict[str, Tensor]]] = []
        self._finite: Tensor | None = None  # NCCL: what nobody has looked at yet
        self.fresh.reset()

    def cut_off(self) -> None:
        """The others are not waited for any more: what is left of the step is done alone."""
        self._sending = None
        left = self._phase in (Phase.SENT, Phase.UPDATED)
        self._pending = Pending() if left else None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def skipped(self) -> bool:
        """Whether this step leaves the gradient out."""
        return self._skipped

    @property
    def finite(self) -> Tensor | None:
        """With NCCL: whether gradient and message are finite, as a tensor on the device. A look at
        it would wait for the GPU; see `decentlam.runtime.gradients.DeferredLook`."""
        return self._finite

    @property
    def sent_early(self) -> bool:
        return self._phase is Phase.COLLECTING and self._pending is not None

    def _move(self, before: Phase, after: Phase) -> None:
        assert self._phase is before, f"bucket {self.number} is {self._phase}, not {before}"
        self._phase = after

    # Gradient --------------------------------------------------------------------------------

    def collect(self, i: int) -> None:
        """The gradient of parameter i has arrived."""
        self._arrived.add(i)

    def collected(self) -> bool:
        return len(self._arrived) == len(self.bucket.params)

    def complete(self, skip: bool, step: int) -> None:
        """The gradient is complete: from here on it must not change."""
        self._move(Phase.COLLECTING, Phase.COMPLETE)
        self._skipped = skip
        self._keep_unmoved()
        self.bucket.gather_gradients()
        if skip:
            for g in self.bucket.gradients():
                g.zero_()
        self.fresh.note_gradients()
        if self._sum is None:
            self._cut_gradient(self.bucket.gradients())
        elif self._network.is_nccl:
            reduce = dist.reduce_scatter_tensor
            self._reducing = self._inside(step, reduce, self._sum, self.bucket.g)
        else:  # gloo's reduce_scatter is an all_reduce too, but one that ends only in wait()
            self._sum.copy_(self.bucket.g)
            self._reducing = self._inside(step, dist.all_reduce, self._sum)

    def summed(self, following: Phase | None) -> bool:
        """Whether the sum over the node is there. Backward must not wait for it: the script may
        have a collective of its own before step(), and a process of the node be in it already.

        `following` is the phase of the next bucket. On a GPU only the GPU waits, and not even that
        if another bucket came in between.
        """
        if self._reducing is None:
            return True
        if self._network.is_nccl:
            return following is not None and following is not Phase.COLLECTING
        return self._reducing.arrived()

    def _cut_gradient(self, gradients: list[Tensor]) -> None:
        self._gradients = [gradients[k][inside] for k, inside, _ in self._pieces]

    def _inside(self, step: int, collective: Callable[..., Any], *tensors: Tensor) -> Pending:
        """Starts a collective of the processes of this node."""
        where, peer = self._network.where(step, self.number), "another process of its node"
        with exchange_errors(where, peer, self._timeout):
            work = collective(*tensors, group=self._network.intra_node_group, async_op=True)
        return Pending(where, self._timeout, self._network.is_nccl, receives=[(peer, work)])

    def sum_in_node(self, tensor: Tensor, step: int) -> None:
        """Sums a tensor over the processes of this node, in place."""
        self._inside(step, dist.all_reduce, tensor).wait()

    def _finish_sum(self) -> None:
        """In a node of several processes: the mean gradient of this process's part."""
        if self._reducing is not None:
            assert self._sum is not None
            self._reducing.wait()
            self._reducing = None
            part = self._sum if self._network.is_nccl else self._sum[self.part]
            self._cut_gradient([part.div_(self._network.processes_per_node)])

    def check_fresh(self, hyper: dict[str, float], needs_gradient: bool) -> None:
        """A message formed from another gradient or lr than step() sees must not be used."""
        self.fresh.check_parameters()
        if needs_gradient:
            self.fresh.check_hyper(hyper)
        if needs_gradient or self._network.intra_node_group is not None:
            self.fresh.check_gradients()
        else:  # nothing was made of it yet: it may even have been replaced
            self.bucket.gather_gradients()
            self._cut_gradient(self.bucket.gradients())

    # Message ---------------------------------------------------------------------------------

    def send(self, exchange: Exchange, plan: Plan, check: bool, worker: Worker | None) -> None:
        """Forms the message from the gradient and hands it to the exchange."""
        self._finish_sum()
        if check and self._network.is_nccl:
            self._leave_out_nonfinite()
        elif check and not plan.algorithm.needs_gradient:
            self._check_finite(self._nonfinite_gradients(), plan.step)
        if self._pending is None:
            self._start(exchange, plan, check, worker)
        self._move(Phase.COMPLETE, Phase.SENT)

    def send_early(self, exchange: Exchange, plan: Plan, check: bool) -> None:
        """The message needs no gradient: it travels while the gradient is computed."""
        assert self._phase is Phase.COLLECTING and self._pending is None
        message = exchange.message(self.number, plan.algorithm.payloads(plan.step.index))
        if message is not None:
            exchange.receive(self.number, message, plan.step.index)
        self._start(exchange, plan, check, None)

    def _start(self, exchange: Exchange, plan: Plan, check: bool, worker: Worker | None) -> None:
        if exchange.silent:
            self._pending = Pending()
            return
        index = plan.step.index
        message = exchange.message(self.number, plan.algorithm.payloads(index))
        assert message is not None
        self.fresh.note_parameters()

        def form_and_send() -> None:
            self._check_finite(self._form(message, plan, check), plan.step)
            self._pending = exchange.send(self.number, message, index)

        if worker is None:
            form_and_send()
        else:
            self._sending = worker.submit(form_and_send)

    def wait_sent(self, worker: Worker | None) -> None:
        """Blocks until the message is formed and handed over; raises what went wrong there."""
        if self._sending is not None:
            assert worker is not None
            worker.wait(self._sending)
            self._sending = None

    def recall(self) -> None:
        """A message that left early arrives and is not used: parameters are about to change."""
        if self.sent_early:
            assert self._pending is not None
            pending, self._pending = self._pending, None
            self.fresh.forget_parameters()
            pending.wait()
            pending.finish()

    def _form(self, message: Tensor, plan: Plan, check: bool) -> list[str]:
        """Fills the message buffer; returns the names of parameters that are not finite."""
        algorithm, step, gradients = plan.algorithm, plan.step, self._gradients
        if not algorithm.needs_gradient:  # it may not be there yet; x stands in, unread
            gradients = [x for x, _ in self._cut]
            step = dataclasses.replace(step, weight_decay=0.0)
        finite, looks = True, check and not self._network.is_nccl
        for (_, _, s), (x, state), g in zip(self._pieces, self._cut, gradients, strict=True):
            rows = [row[s] for row in message]
            here = dataclasses.replace(step, out=rows[0]) if len(rows) == 1 else step
            formed = algorithm.message(x, _decayed(g, x, step), state, here)
            payloads = formed if isinstance(formed, tuple) else (formed,)
            for row, payload in zip(rows, payloads, strict=True):
                if payload is not row:
                    row.copy_(payload)
                finite = finite and (not looks or math.isfinite(row.sum().item()))
        if check and not looks:
            self._note_finite([message])
        return [] if finite else self._nonfinite_names(message)

    def _leave_out_nonfinite(self) -> None:
        """A gradient that is not finite counts as zero, so that no neighbor gets it, and nobody
        waits for the GPU to know."""
        self._note_finite(self._gradients)
        assert self._finite is not None
        for g in self._gradients:
            g.data.masked_fill_(~self._finite, 0.0)  # .data: not a change by the script

    def _note_finite(self, tensors: Sequence[Tensor]) -> None:
        largest = [torch.linalg.vector_norm(t, ord=math.inf) for t in tensors]
        finite = torch.stack(largest).isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite

    def _check_finite(self, bad: list[str], step: Step) -> None:
        if bad:
            raise NonFiniteError(
                f"node {self._network.node}, step {step.index}: {', '.join(bad)} became NaN or "
                "infinite; nothing of it was sent. Lower lr, or pass nonfinite='skip' with "
                "overlap='none' to leave such gradients out."
            )

    def _nonfinite_gradients(self) -> list[str]:
        if all(all_finite(g) for g in self._gradients):
            return []
        return self._nonfinite_names(torch.cat(self._gradients)[None])

    def _nonfinite_names(self, z: Tensor) -> list[str]:
        """Parameters with a NaN or infinity in their stretch of z, (payloads, size)."""
        bad = torch.zeros(len(self.bucket.x), dtype=torch.bool)
        bad[self.part] = (~torch.isfinite(z)).any(dim=0).cpu()
        spans = zip(self.bucket.names, self.bucket.spans, strict=True)
        return [name for name, span in spans if bad[span].any()]

    # Update ----------------------------------------------------------------------------------

    def update(self, plan: Plan) -> float:
        """Waits for the mix, makes x and state new; seconds waited. Does nothing if it was done."""
        if self._phase is Phase.UPDATED:
            return 0.0
        assert self._pending is not None
        begun = time.perf_counter()
        terms = self._pending.wait()
        waited = time.perf_counter() - begun
        if self._phase is Phase.SENT:  # nobody gave the step up meanwhile
            self._update(terms, plan)
            self._move(Phase.SENT, Phase.UPDATED)
        return waited

    def _update(self, terms: Terms, plan: Plan) -> None:
        """The terms are summed piece by piece, each in the same memory."""
        algorithm, step = plan.algorithm, plan.step
        plain = dataclasses.replace(step, adaptive=False)
        cut = zip(self._pieces, self._cut, self._gradients, strict=True)
        for i, ((_, _, s), (x, state), g) in enumerate(cut):
            g = _decayed(g, x, step)
            mixed = _mixed(terms, s) if terms else algorithm.message(x, g, state, step)
            adaptive = not algorithm.layerwise or self._adaptive[i]
            algorithm.update(x, g, mixed, state, step if adaptive else plain)
        for span, x, state in self._kept:
            self.x[span] = x
            for name, value in state.items():
                self.state[name][span] = value
        if self._network.intra_node_group is not None:
            gather = dist.all_gather_into_tensor
            self._gathering = self._inside(step.index, gather, self.bucket.x, self.x)
        self._gradients = []  # the next forward may need the memory

    def finish(self) -> None:
        """Leaves nothing under way: a process may end, or the message change, after a step."""
        assert self._phase is Phase.UPDATED and self._pending is not None
        self._pending.finish()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        self.abandon()

    def mixed_with_the_same(self, plan: Plan) -> bool | None:
        """Whether all others that this message was averaged with sent the very same one; None if
        that cannot be told."""
        assert self._pending is not None
        terms = self._pending.wait()
        if not terms or not any(bool(g.any()) for g in self._gradients):
            return None
        if len(terms) > 1:
            return all(torch.equal(terms[0][1].to(t.dtype), t) for _, t in terms[1:])
        (_, _, s), (x, state), g = self._pieces[0], self._cut[0], self._gradients[0]
        own = plan.algorithm.message(x, _decayed(g, x, plan.step), state, plan.step)
        return isinstance(own, Tensor) and torch.allclose(own, combine(terms)[0, s], 1e-5, 0.0)

    def _keep_unmoved(self) -> None:
        """Remembers parameters that this step must not move: those that were frozen, and on one
        node alone, as in torch.optim, those without a gradient."""
        alone = self._network.num_processes == 1
        size, first = len(self.x), self.part.start
        self._kept = []
        for p, span in zip(self.bucket.params, self.bucket.spans, strict=True):
            if (alone and p.grad is None) or not p.requires_grad:
                inside = slice(*(min(max(k - first, 0), size) for k in (span.start, span.stop)))
                state = {name: t[inside].clone() for name, t in self.state.items()}
                self._kept.append((inside, self.x[inside].clone(), state))

    # State -----------------------------------------------------------------------------------

    def gradient_bytes(self) -> int:
        return self.bucket.gradient_bytes() + (0 if self._sum is None else self._sum.nbytes)

    def state_views(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The state as torch.optim keeps it, by parameter; a part belongs to the first one."""
        if self._network.processes_per_node > 1:
            yield self.bucket.params[0], dict(self.state)
            yield from ((p, {}) for p in self.bucket.params[1:])
            return
        for p, span in zip(self.bucket.params, self.bucket.spans, strict=True):
            yield p, {name: shaped_like(t[span], p) for name, t in self.state.items()}

    def whole_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The state of the node by parameter; together with the other processes of the node."""
        whole = self.state
        if self._network.intra_node_group is not None:
            whole = {name: torch.empty_like(self.bucket.x) for name in self.state}
            for name, part in self.state.items():
                with self._network.errors():
                    group = self._network.intra_node_group
                    dist.all_gather_into_tensor(whole[name], part, group=group)
        for p, span in zip(self.bucket.params, self.bucket.spans, strict=True):
            yield p, {name: shaped_like(t[span], p) for name, t in whole.items()}

    def load_whole_state(self, saved: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Takes over the state of a node, by parameter, in whatever buckets and parts it was."""
        for name, whole in self._init(self.bucket.x).items():
            for p, span in zip(self.bucket.params, self.bucket.spans, strict=True):
                if name in saved.get(p, {}):
                    shaped_like(whole[span], p).copy_(saved[p][name])
            self.state[name].copy_(whole[self.part])

    def load_state(self, saved: dict[Tensor, dict[str, Tensor]]) -> None:
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
