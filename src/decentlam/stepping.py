"""The way of a step: gradients arrive, messages leave, mixes come back, parameters are updated."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from decentlam import late
from decentlam.algorithms import Algorithm, Reach, Step
from decentlam.errors import NonFiniteError, StaleMessageError
from decentlam.exchange.clerk import Clerk, Job
from decentlam.exchange.network import Network
from decentlam.exchange.process_group import NoExchange, ProcessGroupExchange, Round
from decentlam.flight import Flight
from decentlam.groups import algorithm_of, hyper_of, step_of
from decentlam.options import Options
from decentlam.pace import Pace
from decentlam.preparation import prepare
from decentlam.simulate import check_lr
from decentlam.statistics import StepStatistics

log = logging.getLogger(__name__)


class Stepping(Optimizer, Joinable):
    """What `DecentralizedOptimizer` does in backward and in step(); that class sets it up."""

    network: Network
    exchange: NoExchange | ProcessGroupExchange
    _options: Options
    _algorithm: Algorithm
    _flights: list[Flight]
    _frozen: list[Tensor]
    _pace: Pace
    _statistics: StepStatistics
    _settling: threading.RLock  # anybody may touch a parameter, from any thread

    def _quieten(self) -> None:
        """Nothing is under way: as before the first step."""
        self._synchronizing = True  # not inside no_sync()
        self._round_open = False  # between the first message and the end of step()
        self._expected_early = False  # the receives of the next step are posted already
        self._ending: tuple[int, int, bool] | None = None  # of a step that is still to complete
        self._waited = 0.0
        self._hyper_seen: list[dict[str, float]] = []

    # Backward --------------------------------------------------------------------------------

    def _make_hook(self, flight: Flight, i: int) -> Callable[[Tensor], None]:
        """Weak, because the parameter keeps it: an optimizer that nobody uses is gone."""
        mine, its = weakref.ref(self), weakref.ref(flight)

        def on_gradient(p: Tensor) -> None:
            optimizer, flight = mine(), its()
            if optimizer is None or flight is None:
                return
            optimizer._before_gradient(flight, i)
            if flight.bucket.holds(i):
                optimizer._on_gradient(flight, i)

        return on_gradient

    def _before_gradient(self, flight: Flight, i: int) -> None:
        """The step before must be complete before this one begins."""
        if self._ending is None:
            return
        if isinstance(flight.bucket.params[i], late.LateParameter):
            raise StaleMessageError(
                f"{flight.bucket.names[i]} has a gradient, but its value of the step before was "
                "never asked for: forward ran before step(), or outside of torch's Python "
                "functions (a scripted function, an extension, a CUDA graph). Use overlap=True."
            )
        self.finish()

    def _on_gradient(self, flight: Flight, i: int) -> None:
        sends = self._synchronizing and self._sends_in_backward
        if sends and flight.started:
            if flight.departing is not None:
                flight.departing.wait()  # what went wrong there is the better error
            raise StaleMessageError(
                f"a second backward reached {flight.bucket.names[i]} before step(), but its "
                "message is on the way. Accumulate gradients inside `with opt.no_sync():` "
                "(all backwards but the last), or use overlap=False."
            )
        flight.bucket.adopt_gradient(i)
        if self._pace.undecided and not self._pace.mode and self._synchronizing:
            self._watch(flight, i)
        if sends:
            flight.arrived.add(i)
            self._start_ready()

    def _watch(self, flight: Flight, i: int) -> None:
        """Notes the gradient as backward left it: overlap must not be tried if that changes."""
        if not flight.note_gradient(i):
            self._pace.decide(False, "gradients are accumulated over several backwards")
        if not self._hyper_seen:
            self._hyper_seen = [hyper_of(group) for group in self.param_groups]

    def _judge(self) -> None:
        """Decides against overlap if the script changes what the messages are made of."""
        if any(flight.gradient_touched() for flight in self._flights):
            self._pace.decide(False, "gradients change between backward and step()")
        elif self._hyper_seen not in ([], [hyper_of(group) for group in self.param_groups]):
            self._pace.decide(False, "the learning rate changes between backward and step()")
        elif getattr(self, "found_inf", None) is not None:
            self._pace.decide(False, "a GradScaler looks at the whole gradient")
        self._hyper_seen = []

    @property
    def _sends_in_backward(self) -> bool:
        """False also when this step sends nothing: gradients may then change until step()."""
        reach = self._algorithm.reach(self.param_groups[0]["step"])
        return bool(self._pace.mode) and not self.exchange.silent(reach)

    @property
    def _ends_in_forward(self) -> bool:
        """Not if the message needs no gradient: the next one leaves at once, with the new x. Nor
        in a node of several processes: they gather together, but look at parameters one by one."""
        alone = self.network.node_group is None
        return self._pace.mode == "forward" and self._algorithm.needs_gradient and alone

    @torch.no_grad()
    def _start_ready(self) -> None:
        """Starts the buckets that have all gradients, in bucket order: NCCL hangs otherwise."""
        for flight in self._flights:
            if flight.started:
                continue
            if len(flight.arrived) < len(flight.bucket.params):
                return
            self._begin(flight)

    def _begin(self, flight: Flight, skip: bool = False, absent: bool = False) -> None:
        self._open_round(absent)
        flight.begin(skip, self.param_groups[0]["step"])
        flight.hyper = hyper_of(self.param_groups[flight.bucket.group])
        for waiting in self._flights:
            if not waiting.sent:
                if not waiting.started or not self._summed(waiting):
                    return
                self._send(waiting)

    def _summed(self, flight: Flight) -> bool:
        """Whether its sum over the node is there. Backward must not wait for it: the script may
        have a collective of its own before step(), and a process of the node be in it already."""
        if flight.reducing is None:
            return True
        if self.network.batched:  # only the GPU waits, and not if another bucket came in between
            following = self._flights[flight.slot + 1 : flight.slot + 2]
            return any(other.started for other in following)
        return flight.reducing.arrived()

    def _open_round(self, absent: bool) -> None:
        """Once per step, before the first message: tells Join, posts all receives."""
        if self._round_open:
            return
        self._round_open = True
        if self.network.group is not None and not absent:  # who is absent has joined already
            Join.notify_join_context(self)
        self._statistics.begin()
        index = self.param_groups[0]["step"]
        outboxes = self.exchange.open(len(self._flights), index, self._algorithm.reach(index))
        for flight in self._flights:
            flight.outbox = outboxes[flight.slot] if outboxes else None
        if not self._expected_early:
            self._expect(self._flights)

    def _expect(self, flights: list[Flight]) -> None:
        index = self.param_groups[0]["step"]
        reach = self._algorithm.reach(index)
        if not self.exchange.silent(reach):
            messages = {flight.slot: flight.message(index) for flight in flights}
            self._do(lambda: self.exchange.expect(messages, index, reach))

    def _send(self, flight: Flight) -> None:
        """Forms the message of one bucket from its gradient and hands it to the exchange."""
        if flight.sent:
            return
        group = self.param_groups[flight.bucket.group]
        step = step_of(group, flight.skipped)
        flight.complete_gradient()
        if self._options.nonfinite != "ignore" and not self._algorithm.needs_gradient:
            self._check_finite(flight.nonfinite_gradients(), step)
        if not flight.early:
            self._depart(flight, step)
        flight.sent = True

    def _depart(self, flight: Flight, step: Step) -> None:
        """Forms the message and sends it, if it is finite."""
        algorithm = algorithm_of(self._algorithm, self.param_groups[flight.bucket.group])
        reach = algorithm.reach(step.index)
        if self.exchange.silent(reach):
            flight.round = Round.silent()
            return
        message, by_need = flight.message(step.index), self._ends_in_forward
        flight.note_parameters()

        def depart() -> None:
            bad = flight.form_message(algorithm, step, check=self._options.nonfinite != "ignore")
            self._check_finite(bad, step)
            flight.round = self.exchange.start(flight.slot, message, step.index, reach, by_need)

        flight.departing = self._do(depart)

    @property
    def _clerk(self) -> Clerk | None:
        """Who does what the training need not wait for. Not collectives: others may be under way
        in the training thread, and their order must be the same on all processes."""
        reach = self._algorithm.reach(self.param_groups[0]["step"])
        sends = bool(self._pace.mode) and self._algorithm.needs_gradient
        alone = self.network.node_group is None
        return self.exchange.clerk if sends and alone and reach is Reach.NEIGHBORS else None

    def _do(self, work: Callable[[], None]) -> Job | None:
        """Does it at once, or lets the clerk."""
        clerk = self._clerk
        if clerk is not None:
            return clerk.hand(work)
        work()
        return None

    def _check_finite(self, bad: list[str], step: Step) -> None:
        if bad:
            raise NonFiniteError(
                f"node {self.network.node}, step {step.index}: {', '.join(bad)} became NaN or "
                "infinite; nothing of it was sent. Lower lr, or pass nonfinite='skip' with "
                "overlap=False to leave such gradients out."
            )

    # Step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the neighbors' messages and updates; with a closure, evaluates it first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._synchronizing:
            raise RuntimeError("step() inside no_sync(); leave the context before stepping")
        self._step()
        return loss

    @torch.no_grad()
    def _step(self, absent: bool = False) -> None:
        """One step; `absent` is a node that ran out of data and only answers its neighbors."""
        self.finish()
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    "a parameter that was frozen when the optimizer was built now has a gradient; "
                    "build the optimizer after unfreezing it, or pass it to add_param_group"
                )
        for flight in self._flights:
            flight.bucket.check_in_place()
        if self._pace.undecided and not self._pace.mode:
            self._judge()
        skipped = self._prepare_gradients(absent)
        for flight in self._flights:
            if not flight.started:
                self._begin(flight, skipped, absent)
            flight.check_fresh(hyper_of(self.param_groups[flight.bucket.group]))
        for flight in self._flights:
            self._send(flight)
        for flight in self._flights:
            if flight.departing is not None:
                flight.departing.wait()  # or raises what went wrong
        self._update(skipped)

    def _prepare_gradients(self, absent: bool) -> bool:
        """Makes the whole gradient ready; True if this step leaves it out."""
        found_inf = getattr(self, "found_inf", None)  # both set by GradScaler.step
        scale = getattr(self, "grad_scale", None)
        if not self._sends_in_backward:
            return absent or prepare(
                self._flights, self._options, self.param_groups[0]["step"], found_inf, scale
            )
        if found_inf is not None:
            raise StaleMessageError(
                "GradScaler with overlap=True: the messages left before it was known whether a "
                "gradient overflowed. Build the optimizer with overlap=False, or use bfloat16, "
                "which needs no scaler."
            )
        return absent

    def _update(self, skipped: bool) -> None:
        """Updates all buckets, or lets the clerk or whoever touches a parameter do it."""
        index = self.param_groups[0]["step"]
        reach = self._algorithm.reach(index)
        sent = sum(flight.message_bytes(index) for flight in self._flights)
        self._ending = (index, self.exchange.bytes_sent(sent, index, reach), skipped)
        for flight in self._flights:
            group = self.param_groups[flight.bucket.group]
            flight.prepare(algorithm_of(self._algorithm, group), step_of(group, flight.skipped))
        early = bool(self._pace.mode) and not self._algorithm.needs_gradient
        if not early and not (self._ends_in_forward and self._postpone()):
            self.finish()
        for group in self.param_groups:
            group["step"] += 1
            group["previous_lr"] = check_lr(group["lr"])
            if reach is Reach.EVERYONE:
                group["sync_lr"] = group["previous_lr"]
        if early:
            self._complete(self._start_early)
        self._round_open, self._expected_early = False, early
        self._choose_pace()

    def _postpone(self) -> bool:
        """Makes the parameters late; False if they cannot be."""
        with self._settling:
            for flight in self._flights:
                if not late.postpone(flight.bucket.params, functools.partial(self._settle, flight)):
                    return False
            late.watch(self)
            if self._clerk is not None:
                for flight in reversed(self._flights):  # as the next forward needs them
                    flight.settle_by(self._clerk)
        return True

    def _settle(self, flight: Flight) -> None:
        """The late update of one bucket. Its other parameters stay marked until they are asked
        for: one that gets a gradient without that was read behind our back."""
        with self._settling, torch.no_grad():
            try:
                self._waited += flight.settle()
            except Exception:  # what there is can still be saved
                self._end()
                raise

    def _end(self) -> None:
        """Nothing of the last step is still to complete."""
        self._ending = None
        late.forget(self)
        for flight in self._flights:
            late.release(flight.bucket.params)

    def finish(self) -> None:
        """Completes the last step: every message has arrived and left, every parameter is new.

        Only `overlap="forward"` (and "auto", which may choose it) leaves anything to complete, and
        whoever touches a parameter completes that. Call this before the process group is destroyed:
        neighbors may still wait for messages of this process. `decentlam.init` does it by itself.
        """
        with self._settling:
            if self._ending is not None:
                self._complete()

    def _complete(self, then: Callable[[Flight], None] | None = None) -> None:
        """Updates what is still to be; `then` sends a bucket on while the next ones wait."""
        assert self._ending is not None
        index, sent, skipped = self._ending
        with self._settling, torch.no_grad():
            try:
                for flight in self._flights:
                    self._waited += flight.settle()
                    if then is not None:
                        flight.land()
                        flight.reset()
                        then(flight)
                for flight in self._flights if then is None else []:
                    flight.land()
                    flight.reset()
            except BaseException as error:
                if isinstance(error, Exception) or then is not None:
                    self._end()  # but Ctrl-C leaves it to be completed
                raise
            self._end()
            self.exchange.close()
            self._statistics.end(index, self._waited, sent, skipped)
            self._waited = 0.0

    def _choose_pace(self) -> None:
        if self._pace.step_ended() and self.network.rank == 0:
            log.info("overlap=%r from here on: %s", self._pace.mode, self._pace.reason)

    def _start_early(self, flight: Flight) -> None:
        """The message needs no gradient: it travels during the next forward and backward."""
        self._expect([flight])
        self._depart(flight, step_of(self.param_groups[flight.bucket.group]))
        flight.early = True
