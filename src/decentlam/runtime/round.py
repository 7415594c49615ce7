"""One bucket's way through a step: gradient in, message out, mix back, update.

    COLLECTING --complete--> COMPLETE --send--> SENT --update--> UPDATED --finish--> COLLECTING

A message that needs no gradient (AWC-DmSGD) is sent early, while its bucket is still COLLECTING;
`send` then has nothing left to do, or `advance` goes on to the next step's message at once.
`abandon` leads back to COLLECTING from anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from decentlam.algorithms import Algorithm
from decentlam.errors import ExchangeError
from decentlam.exchange.base import Exchange, Pending
from decentlam.exchange.network import Network
from decentlam.runtime import finite
from decentlam.runtime.bucket import Bucket
from decentlam.runtime.freshness import Freshness
from decentlam.runtime.shard import Plan, Shard, Unmoved
from decentlam.runtime.within_node import WithinNode
from decentlam.runtime.worker import Worker


class Phase(Enum):
    COLLECTING = "collecting"  # gradients arrive
    COMPLETE = "complete"  # all gradients are there; in a node of several processes, being summed
    SENT = "sent"  # the message is on its way, or the worker is about to send it
    UPDATED = "updated"  # parameters and state are new; messages may still be leaving


@dataclass(eq=False)
class Advance:
    """An update that the worker makes where the message is, to be sent as the next message."""

    exchange: Exchange  # of the next step
    message: Tensor
    step: int  # the next one
    made: Callable[[], None] | None = None  # waits for the update; raises what went wrong there
    sent: Callable[[], None] | None = None  # waits until the next message is on its way
    done: bool = False  # the state is that of the next step, and x is in `message`
    pending: Pending | None = None  # the next message


class Round:
    """Owns the phase of a bucket, and what is under way for it."""

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
        self.shard = Shard(bucket, algorithm, network)
        self.fresh = Freshness(bucket.params)
        self._network = network
        self._within: WithinNode | None = None
        if network.intra_node_group is not None:
            self._within = WithinNode(number, bucket, network, timeout)
        self.abandon()

    def abandon(self, following: Pending | None = None) -> None:
        """Forgets the step: ready for the next one's gradients. `following` is the next step's
        message, if that is under way already."""
        self._arrived: set[int] = set()
        self._skipped = False
        self._gradients: list[Tensor] = []  # as the shard cuts them
        self._unmoved: Unmoved = []
        self._sending: Future[None] | None = None  # the worker's job that sends the message
        self._pending: Pending | None = following
        self._sent: Tensor | None = None  # the message that is pending, if nobody writes to it
        self._finite: Tensor | None = None  # NCCL: what nobody has looked at yet
        self._advance: Advance | None = None
        if self._within is not None:
            self._within.abandon()
        self.fresh.reset()
        self._phase = Phase.COLLECTING

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
        it would wait for the GPU; see `decentlam.runtime.finite.DeferredLook`."""
        return self._finite

    @property
    def bytes_sent(self) -> int:
        """Of the message that is under way."""
        return 0 if self._pending is None else self._pending.bytes_sent

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
        self._unmoved = self.shard.unmoved()
        self.bucket.gather_gradients()
        if skip:
            for g in self.bucket.gradients():
                g.zero_()
        self.fresh.note_gradients()
        if self._within is None:
            self._gradients = self.shard.cut(self.bucket.gradients())
        else:
            self._within.begin_sum(step)

    def summed(self, following: Phase | None) -> bool:
        """Whether the node's gradient is there; `following` is the phase of the next bucket."""
        later = following is not None and following is not Phase.COLLECTING
        return self._within is None or self._within.summed(later)

    def check_fresh(self, hyper: dict[str, float], needs_gradient: bool) -> None:
        """A message formed from another gradient or lr than step() sees must not be used."""
        self.fresh.check_parameters()
        if needs_gradient:
            self.fresh.check_hyper(hyper)
        if needs_gradient or self._within is not None:
            self.fresh.check_gradients()
        else:  # nothing was made of it yet: it may even have been replaced
            self.bucket.gather_gradients()
            self._gradients = self.shard.cut(self.bucket.gradients())

    # Message ---------------------------------------------------------------------------------

    def send(self, exchange: Exchange, plan: Plan, check: bool, worker: Worker | None) -> None:
        """Forms the message from the gradient and hands it to the exchange."""
        mean = None if self._within is None else self._within.mean(self.shard.place)
        if mean is not None:
            self._gradients = self.shard.cut([mean])
        if check and self._network.is_nccl:
            self._finite = finite.flag(self._gradients, self._finite)
            finite.leave_out(self._gradients, self._finite)
        elif check and self._looks_at_gradient(exchange, plan):
            self._refuse_gradients(plan)
        if self._pending is None and exchange.silent:
            self._pending = Pending()
        elif self._pending is None:
            message = exchange.message(self.number, plan.algorithm.payloads(plan.step.index))
            self._start(exchange, message, plan, check, worker)
        self._move(Phase.COMPLETE, Phase.SENT)

    def send_early(self, exchange: Exchange, plan: Plan, check: bool) -> None:
        """The message needs no gradient: it travels while the gradient is computed."""
        assert self._phase is Phase.COLLECTING and self._pending is None
        if exchange.silent:
            self._pending = Pending()
            return
        index = plan.step.index
        # A copy, also where the message is x itself: the script may write to x meanwhile.
        message = exchange.message(self.number, plan.algorithm.payloads(index))
        assert message is not None
        exchange.receive(self.number, message, index)
        self._start(exchange, message, plan, check, None)

    @property
    def can_advance(self) -> bool:
        """Whether its message left early, and all of x moves in this step."""
        complete = self._phase is Phase.COMPLETE and self._pending is not None
        return complete and not self._unmoved and self._advance is None

    @property
    def advanced(self) -> bool:
        """Whether its next message is made of this step already, or about to be."""
        return self._advance is not None

    def advance(self, exchange: Exchange, plan: Plan, check: bool, worker: Worker) -> None:
        """The gradient of a message that is x itself, and left early, is there. Beside the rest of
        backward, x of the next step is made where the message is. `send_next` sends it by
        `exchange`, which is that step's, and `update` takes it over."""
        pending, gradients, step = self._pending, self._gradients, plan.step.index + 1
        message = exchange.message(self.number, plan.algorithm.payloads(step))
        assert pending is not None and message is not None
        advance = self._advance = Advance(exchange, message, step)

        def make() -> None:
            if check:
                self._refuse_gradients(plan)
            terms = pending.wait()
            pending.finish()
            if self._pending is not pending:  # the step was given up meanwhile
                return
            good = self.shard.update(terms, gradients, plan, into=message[0], look=check)
            advance.done = True
            if not good:
                finite.refuse(self._network.node, step, self.shard.nonfinite_names(message))

        advance.made = functools.partial(worker.wait, worker.submit(make))
        self._move(Phase.COMPLETE, Phase.SENT)

    def send_next(self, worker: Worker) -> None:
        """What `advance` made becomes the next step's message. When all buckets are made: those of
        a later step would take the wire from those that somebody waits for."""
        advance = self._advance
        if advance is None or advance.sent is not None:
            return

        def send() -> None:
            if self._advance is not advance:  # the step was given up meanwhile
                return
            with contextlib.suppress(ExchangeError):  # the next step asks again, if there is one
                advance.exchange.receive(self.number, advance.message, advance.step)
                advance.pending = advance.exchange.send(self.number, advance.message, advance.step)

        advance.sent = functools.partial(worker.wait, worker.submit(send))

    def _start(
        self,
        exchange: Exchange,
        message: Tensor | None,
        plan: Plan,
        check: bool,
        worker: Worker | None,
    ) -> None:
        assert message is not None
        self.fresh.note_parameters()

        def form_and_send() -> None:
            self._form(message, plan, check)
            self._sent = message if exchange.only_reads else None
            self._pending = exchange.send(self.number, message, plan.step.index)

        if worker is None:
            form_and_send()
        else:
            self._sending = worker.submit(form_and_send)

    def _form(self, message: Tensor, plan: Plan, check: bool) -> None:
        deferred = self._network.is_nccl
        good = self.shard.form(message, self._gradients, plan, look=check and not deferred)
        if check and deferred:
            self._finite = finite.flag([message], self._finite)
        elif not good:  # or a sum that overflowed: then there are no names
            names = self.shard.nonfinite_names(message)
            finite.refuse(self._network.node, plan.step.index, names)

    def _looks_at_gradient(self, exchange: Exchange, plan: Plan) -> bool:
        """Whether no look at a message would find what is not finite in it. One node alone has
        nobody to keep it from, as in torch.optim."""
        unsent = exchange.silent and self._network.num_nodes > 1
        return unsent or not plan.algorithm.needs_gradient

    def _refuse_gradients(self, plan: Plan) -> None:
        """What is not finite must not come into the parameters, which are sent later."""
        if not all(map(finite.all_finite, self._gradients)):
            names = self.shard.nonfinite_names(torch.cat(self._gradients)[None])
            finite.refuse(self._network.node, plan.step.index, names)

    def wait_sent(self, worker: Worker | None) -> float:
        """Blocks until the message is formed and handed over, or the next one is made; raises what
        went wrong there. Seconds waited for the messages of others."""
        if self._sending is not None:
            assert worker is not None
            worker.wait(self._sending)
            self._sending = None
        begun = time.perf_counter()
        if self._advance is not None:
            if self._advance.made is None:
                raise RuntimeError(
                    "Ctrl-C struck in the midst of backward; start from a checkpoint"
                )
            self._advance.made()
        return time.perf_counter() - begun

    def settle(self) -> None:
        """The step is given up: x becomes what the state already is, where the worker came so
        far."""
        if self._phase is Phase.SENT and self._advance is not None and self._advance.done:
            self.shard.x.copy_(self._advance.message[0])
            self._tell_autograd()

    def recall(self) -> None:
        """A message that left early arrives and is not used: parameters are about to change."""
        if self.sent_early:
            assert self._pending is not None
            pending, self._pending, self._sent = self._pending, None, None
            self.fresh.forget_parameters()
            pending.wait()
            pending.finish()

    # Update ----------------------------------------------------------------------------------

    def update(self, plan: Plan) -> float:
        """Waits for the mix, makes x and state new; seconds waited. Does nothing if it was done."""
        if self._phase is Phase.UPDATED:
            return 0.0
        assert self._pending is not None
        if self._advance is not None:  # it was waited for
            self.shard.x.copy_(self._advance.message[0])
            self._updated()
            return 0.0
        begun = time.perf_counter()
        terms = self._pending.wait()
        waited = time.perf_counter() - begun
        if self._phase is Phase.SENT:  # nobody gave the step up meanwhile
            self.shard.update(terms, self._gradients, plan, self._sent)
            self.shard.restore(self._unmoved)
            if self._within is not None:
                self._within.begin_gather(plan.step.index, self.shard.x)
            self._updated()
        return waited

    def _updated(self) -> None:
        self._tell_autograd()
        self._gradients = []  # the next forward may need the memory
        self._move(Phase.SENT, Phase.UPDATED)

    def _tell_autograd(self) -> None:
        """A graph of the old values must not run backward through the new ones: torch then
        refuses. Those that did not move are as they were."""
        unmoved = {id(p) for p, *_ in self._unmoved}
        increment_version([p for p in self.bucket.params if id(p) not in unmoved])

    def finish(self) -> None:
        """Leaves nothing under way: a process may end, or the message change, after a step."""
        assert self._phase is Phase.UPDATED and self._pending is not None
        self._pending.finish()
        if self._within is not None:
            self._within.end_gather()
        following = None
        if self._advance is not None and self._advance.sent is not None:
            self._advance.sent()
            following = self._advance.pending
        self.abandon(following)
        if following is not None:
            self.fresh.note_parameters()

    def mixed_with_the_same(self, plan: Plan) -> bool | None:
        """Whether all others that this message was averaged with sent the very same one; None if
        that cannot be told."""
        assert self._pending is not None
        return self.shard.mixed_with_the_same(self._pending.wait(), self._gradients, plan)

    def gradient_bytes(self) -> int:
        within = 0 if self._within is None else self._within.nbytes()
        return self.bucket.gradient_bytes() + within
