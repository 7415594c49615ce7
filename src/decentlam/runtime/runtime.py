"""The way of a step, top to bottom: gradients arrive, messages leave, mixes come back, parameters
are updated. `on_gradient` runs in backward, `step` and `finish` when the script calls them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from decentlam.algorithms import Algorithm, Reach, Step
from decentlam.errors import ExchangeError, NonFiniteError, StaleMessageError
from decentlam.exchange.base import Exchange
from decentlam.exchange.network import Network
from decentlam.exchange.none import NoExchange
from decentlam.options import Options
from decentlam.runtime.bucket import Bucket
from decentlam.runtime.evaluation import Evaluation
from decentlam.runtime.finite import DeferredLook
from decentlam.runtime.forward import Forward
from decentlam.runtime.freshness import hyper_of
from decentlam.runtime.gradients import WholeGradient
from decentlam.runtime.groups import ParamGroup, advance, skip, step_of
from decentlam.runtime.mistakes import EqualMessages, WrapperCheck
from decentlam.runtime.overlap import OverlapChoice
from decentlam.runtime.round import Phase, Round
from decentlam.runtime.shard import Plan
from decentlam.runtime.statistics import StepStatistics
from decentlam.runtime.worker import Worker
from decentlam.topology import Topology

ALONE = NoExchange()
log = logging.getLogger(__name__)


@dataclass
class Ending:
    """A step whose messages are all formed, and whose updates are still to come."""

    step: int
    plans: list[Plan]  # by bucket
    bytes_sent: int
    skipped: bool
    waited_seconds: float = 0.0


class Runtime:
    """One node of a run: owns its rounds, its exchanges and the order in which things happen.

    `groups` are the optimizer's, which schedulers change; the runtime reads them and counts steps.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        algorithm: Algorithm,
        network: Network,
        topology: Topology,
        exchanges: Mapping[Reach, Exchange],
        buffers: Sequence[Tensor],
        rounds: Sequence[Round],
        options: Options,
        overlap: OverlapChoice,
        statistics: StepStatistics,
        forward: Forward | None = None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.algorithm = algorithm  # what runs; may be a stable form of the user's
        self.network = network
        self.topology = topology
        self.exchanges = exchanges
        self.rounds = rounds
        self.overlap = overlap
        self.statistics = statistics
        self._evaluation = Evaluation()
        self.options = options  # what was left to choose is chosen
        self._groups, self._buffers = groups, buffers
        self._notify = notify  # before a step's first message
        self._forward = forward
        self._thread = Worker()
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        self._synchronizing = True  # not inside no_sync()
        self._first = True  # no whole gradient was prepared yet
        self._open = False  # between the first message of a step and its end
        self._ending: Ending | None = None
        # Only with elastic=True: what ended the exchange with the others, and the first step that
        # is taken with them again.
        self.failure: ExchangeError | None = None
        self._in_step = False
        self._refused: str | None = None  # why a message was not sent
        self.alone_buckets: list[int] = []  # of the step in which it ended
        self.alone_until = 0
        self._sends_x = not algorithm.needs_gradient and _sends_x(algorithm)
        self._wrapper, self._equal = WrapperCheck(), EqualMessages()
        self._finite = DeferredLook()
        if network.num_processes > 1:
            self._wrapper.watch(p for round in rounds for p in round.bucket.params)
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(self, round, i))
            for round in rounds
            for i, p in enumerate(round.bucket.params)
        ]

    @property
    def buckets(self) -> list[Bucket]:
        return [round.bucket for round in self.rounds]

    @property
    def index(self) -> int:
        """The number of the step that is under way or comes next."""
        index: int = self._groups[0]["step"]
        return index

    @property
    def exchange(self) -> Exchange:
        """What mixes the messages of this step."""
        return self._exchange_at(self.index)

    def _exchange_at(self, index: int) -> Exchange:
        if self.failure is not None or index < self.alone_until:
            return ALONE
        return self.exchanges[self.algorithm.reach(index)]

    @property
    def _sends_in_backward(self) -> bool:
        """False also when this step sends nothing: gradients may then change until step()."""
        return self.overlap.mode not in ("none", "early") and not self.exchange.silent

    @property
    def _worker(self) -> Worker | None:
        """Who posts and forms messages that the training need not wait for."""
        if not self.algorithm.needs_gradient:
            return self._thread if self._advances else None
        return self._thread if self.overlap.mode != "none" and self._may_leave_to_thread else None

    @property
    def _may_leave_to_thread(self) -> bool:
        return self.network.intra_node_group is None and self.exchange.threaded

    @property
    def _advances(self) -> bool:
        """Whether a message that left early is made new and sent again in backward. A step that may
        be given up or left out waits for step()."""
        plain = not self.options.elastic and self.options.patience_seconds is None
        beside = self.overlap.mode == "backward" and self._may_leave_to_thread
        return self._sends_x and plain and beside

    @property
    def _checks_finite(self) -> bool:
        return self.options.nonfinite != "ignore"

    def _plan(self, round: Round) -> Plan:
        group = self._groups[round.bucket.group]
        return Plan(self.algorithm.with_hyper(group), step_of(group, round.skipped))

    # Backward --------------------------------------------------------------------------------

    def on_gradient(self, round: Round, i: int) -> None:
        """The gradient of parameter i of a bucket has arrived."""
        if self._forward is not None:
            self._forward.check_read(round.bucket, i)  # before anything here reads it
            self.finish()
        if not round.bucket.holds(i) and not round.bucket.owns(i):
            return  # another optimizer was built with it; this one is no longer used
        self.check_training("call backward()")
        self._reclaim(round, i)
        sends = self._synchronizing and self._sends_in_backward
        if sends and round.phase is not Phase.COLLECTING:
            round.wait_sent(self._worker)  # what went wrong there is the better error
            raise StaleMessageError(
                f"a second backward reached {round.bucket.names[i]} before step(), but its "
                "message is on the way. Accumulate gradients inside `with opt.no_sync():` "
                "(all backwards but the last), or use overlap='none'."
            )
        round.bucket.adopt_gradient(i)
        if self.overlap.watching and self._synchronizing:
            self.overlap.watch(round.fresh, i, self._hypers())
        if sends:
            round.collect(i)
            try:
                self._send_ready()
            except ExchangeError as error:
                self._give_up(error)

    def _reclaim(self, round: Round, i: int) -> None:
        """Goes on with a parameter that was moved to other memory, if it is as it was."""
        if round.bucket.holds(i):
            return
        changed = round.bucket.reclaim(i)
        if changed and (round.phase is not Phase.COLLECTING or round.sent_early):
            raise StaleMessageError(
                f"{round.bucket.names[i]} was replaced while its message was on the way; change "
                "parameters between step() and backward"
            )

    def _reclaim_all(self) -> None:
        for round in self.rounds:
            for i in range(len(round.bucket.params)):
                self._reclaim(round, i)

    @torch.no_grad()
    def _send_ready(self) -> None:
        """Starts the buckets that have all gradients, in bucket order: NCCL hangs otherwise."""
        for round in self.rounds:
            if round.phase is Phase.COLLECTING:
                if not round.collected():
                    return
                self._complete(round)

    def _complete(self, round: Round, skip: bool = False, absent: bool = False) -> None:
        """The gradient of a bucket is there: sends whatever can be sent, in bucket order."""
        self._open_step(absent)
        round.complete(skip, self.index)
        round.fresh.note_hyper(hyper_of(self._groups[round.bucket.group]))
        for waiting in self.rounds:
            if waiting.phase is Phase.SENT:
                continue
            following = self.rounds[waiting.number + 1 : waiting.number + 2]
            phase = following[0].phase if following else None
            if waiting.phase is not Phase.COMPLETE or not waiting.summed(phase):
                return
            self._send(waiting)
        self._send_next()

    def _send_next(self) -> None:
        """All buckets of this step are on their way: now come those that were made of it."""
        worker = self._worker
        if worker is not None and all(round.phase is Phase.SENT for round in self.rounds):
            for round in self.rounds:
                round.send_next(worker)

    def _open_step(self, absent: bool) -> None:
        """Once per step, before the first message: all receives are posted."""
        if self._open:
            return
        if self._notify is not None and not absent:  # who is absent has joined already
            self._notify()
        self._open = True
        self.statistics.begin()
        exchange, index = self.exchange, self.index
        exchange.begin(index)
        messages = {
            round.number: exchange.message(round.number, self.algorithm.payloads(index))
            for round in self.rounds
            if not round.sent_early and not exchange.silent
        }

        def receive() -> None:
            for number, message in messages.items():
                assert message is not None
                exchange.receive(number, message, index)

        worker = self._worker
        if worker is not None and messages:
            worker.submit(receive)  # what goes wrong there fails the sends that follow it
        else:
            receive()

    def _send(self, round: Round) -> None:
        plan, worker = self._plan(round), self._worker
        following = self._exchange_at(self.index + 1)
        advances = self._advances and following.threaded and not self._equal.looking
        if advances and worker is not None and round.can_advance:
            round.advance(following, plan, self._checks_finite, worker)
        else:
            round.send(self.exchange, plan, self._checks_finite, worker)

    def _hypers(self) -> list[dict[str, float]]:
        return [hyper_of(group) for group in self._groups]

    # Step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        absent: bool = False,
        found_inf: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """One step; `absent` is a node that ran out of data and only answers its neighbors.

        `found_inf` and `scale` are what a GradScaler found and multiplied the loss with.
        """
        if not self._synchronizing:
            raise RuntimeError("step() inside no_sync(); leave the context before stepping")
        self.check_training("call step()")
        if self._refused is not None:
            raise NonFiniteError(
                f"{self._refused} The neighbors wait for the message of that step, so this process "
                "cannot go on: start again from a checkpoint."
            )
        self.finish()
        self._check_parameters(absent)
        if self.overlap.watching:
            fresh = [round.fresh for round in self.rounds]
            self.overlap.judge(fresh, self._hypers(), scaled=found_inf is not None)
        skipped = absent
        try:
            skipped = absent or self._prepare_gradients(found_inf, scale)
            self._run_step(skipped, absent)
        except NonFiniteError as error:
            self._refused = str(error)
            raise
        except ExchangeError as error:
            self._give_up(error)
            self._run_step(skipped, absent)

    def _run_step(self, skipped: bool, absent: bool) -> None:
        """Takes the step, or what is left of it."""
        if self._ending is not None:
            self._finish_step()
            return
        for round in self.rounds:
            if round.phase is Phase.COLLECTING:
                self._complete(round, skipped, absent)
            hyper = hyper_of(self._groups[round.bucket.group])
            round.check_fresh(hyper, self.algorithm.needs_gradient or self._advances)
        for round in self.rounds:
            if round.phase is Phase.COMPLETE:
                self._send(round)
        waited = sum(round.wait_sent(self._worker) for round in self.rounds)
        self._update(skipped, waited)

    def _check_parameters(self, absent: bool) -> None:
        """Refuses what would otherwise train nothing, or something else than it seems to."""
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    "a parameter that was frozen when the optimizer was built now has a gradient; "
                    "build the optimizer after unfreezing it, or leave it out at first and pass it "
                    "to add_param_group when it is unfrozen"
                )
        self._reclaim_all()
        params = [p for round in self.rounds for p in round.bucket.params]
        if params and not (absent or self._open) and all(p.grad is None for p in params):
            raise RuntimeError(
                "step() without any gradient: no parameter of this optimizer got one since "
                "zero_grad(). Call backward() first. If the model's parameters were replaced (by "
                "load_state_dict(assign=True) or a new module), build the optimizer anew; a node "
                "without data goes on inside torch.distributed.algorithms.Join, or with zero "
                "gradients."
            )
        self._wrapper.check()

    def _prepare_gradients(self, found_inf: Tensor | None, scale: Tensor | None) -> bool:
        """Makes the whole gradient ready; True if this step leaves it out."""
        if self._sends_in_backward:
            if found_inf is not None:
                raise StaleMessageError(
                    "GradScaler with overlap: the messages left before it was known whether a "
                    "gradient overflowed. Build the optimizer with overlap='none', or use "
                    "bfloat16, which needs no scaler."
                )
            return False
        if not self.rounds:  # every parameter is frozen
            return False
        for bucket in self.buckets:
            bucket.gather_gradients()
        found = [g for bucket in self.buckets for g in bucket.gradients()]
        options, timeout = self.options, timedelta(seconds=self.options.wait_seconds)
        first, self._first = self._first, False
        whole = WholeGradient(found, self.network, self.index, timeout, first)
        if not whole.unscale(found_inf, scale):
            return True
        if options.nonfinite == "skip" and not whole.finite():
            return True
        if options.max_grad_norm is not None:
            whole.clip(options.max_grad_norm)
        return False

    def _update(self, skipped: bool, waited_seconds: float) -> None:
        """Updates all buckets, or leaves that to the next forward."""
        index, sent = self.index, sum(round.bytes_sent for round in self.rounds)
        plans = [self._plan(round) for round in self.rounds]
        worker, later = self._worker, self._forward
        # From here on the step counts as taken, and `finish` completes it, also after Ctrl-C.
        self._ending = Ending(index, plans, sent, skipped, waited_seconds)
        self._finite.note(index, [round.finite for round in self.rounds])
        advance(self._groups, self.algorithm.reach(index) is Reach.EVERYONE)
        self._open = False
        if later is None or not later.postpone(self, self.rounds, plans, worker):
            self._finish_step()
        if self.overlap.step_ended() and self.network.rank == 0:
            log.info("overlap=%r from here on: %s", self.overlap.mode, self.overlap.reason)

    def finish(self) -> None:
        """Completes the last step: every message has arrived and left, every parameter is new."""
        self._finite.look(self.network.node)
        ending, later = self._ending, self._forward
        if ending is None:
            return
        if later is not None:
            later.wait()
            if later.failed:  # it was raised where the value was asked for
                self._abandon()
                return
            ending.waited_seconds += later.waited_seconds
        self._finish_step()
        if later is not None:
            later.release(self)

    @torch.no_grad()
    def _finish_step(self) -> None:
        """Updates what is still to be, and waits until the messages have left."""
        ending = self._ending
        assert ending is not None
        early = self.overlap.mode != "none" and not self.algorithm.needs_gradient
        try:
            for round, plan in zip(self.rounds, ending.plans, strict=True):
                if round.phase is Phase.COLLECTING:  # done before Ctrl-C
                    continue
                self._look_at_first_messages(round, plan)
                ending.waited_seconds += round.update(plan)
                if early and not round.advanced:
                    round.finish()  # the next message travels while other buckets are updated
                    ahead = Step(ending.step + 1, plan.step.lr)
                    self._send_early(round, Plan(plan.algorithm, ahead))
            for round in self.rounds:
                if round.phase is Phase.UPDATED:
                    round.finish()
        except Exception as error:
            if not (self.options.elastic and isinstance(error, ExchangeError)):
                self._ending = None
            raise
        exchange = self._exchange_at(ending.step)
        exchange.end()
        self._ending = None
        self.statistics.end(
            ending.step,
            ending.waited_seconds,
            ending.bytes_sent,
            ending.skipped,
            exchange.left_out,
            exchange.ahead,
        )
        skip(self._groups, exchange.ahead)

    def _send_early(self, round: Round, plan: Plan) -> None:
        """A neighbor may have taken its last step and be gone: the next step, if there is one, asks
        it again and fails."""
        try:
            round.send_early(self._exchange_at(plan.step.index), plan, self._checks_finite)
        except ExchangeError:
            if self.options.elastic:
                raise

    def _look_at_first_messages(self, round: Round, plan: Plan) -> None:
        if not self._equal.looking or plan.step.lr == 0 or round.skipped:
            return
        if round is max(self.rounds, key=lambda each: len(each.shard.x)):  # it tells most
            self._equal.note(round.mixed_with_the_same(plan), self.network.node)

    @property
    def finished_alone(self) -> bool:
        """Whether what ended the exchange with others did so in the midst of a step."""
        return self.failure is not None and self._in_step

    def _give_up(self, error: ExchangeError) -> None:
        """A neighbor that is gone ends the step, or with elastic=True the exchange with others."""
        if not self.options.elastic:
            self._abandon()
            raise error
        log.warning("a step is finished without neighbors: %s", error)
        self.cut_off(error)
        self._in_step = True

    def cut_off(self, error: ExchangeError) -> None:
        """What is left of this step is done alone; then the members must change."""
        self.failure, self._in_step = error, False
        ending = self._ending is not None
        done = (Phase.UPDATED, Phase.COLLECTING) if ending else (Phase.UPDATED,)
        self.alone_buckets = [r.number for r in self.rounds if r.phase not in done]
        self._thread.stop()
        self._thread = Worker()
        for round in self.rounds:
            round.cut_off()

    def _abandon(self) -> None:
        """Nothing of the step that is under way is used any more."""
        self._ending, self._open = None, False
        if self._forward is not None:
            self._forward.release(self)
        self._thread.stop()
        self._thread = Worker()
        for round in self.rounds:
            round.settle()
            round.abandon()

    # Between steps ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates gradients; nothing is sent."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def check_between_steps(self, what: str) -> None:
        """Completes the last step; refuses if the next one has begun, and in evaluation."""
        self.check_training(what)
        if self._open:
            raise RuntimeError(f"cannot {what} between backward and step(); call step() first")
        self.finish()
        self._reclaim_all()

    def check_state(self, what: str) -> None:
        """Completes the last step; refuses where backward has already made state of the next."""
        self.finish()
        if any(round.advanced for round in self.rounds):
            raise RuntimeError(
                f"cannot {what} between backward and step(), where AWC-DmSGD with "
                "overlap='backward' has updated its momentum already; call step() first"
            )

    def check_training(self, what: str) -> None:
        """Refuses in evaluation."""
        self._evaluation.check(what)

    def evaluate(self, model: nn.Module | None) -> None:
        """Makes the parameters the mean of all nodes, until `train`; on every process."""
        if not self._evaluation.active:
            self.check_between_steps("average the model")
            self._evaluation.enter([bucket.x for bucket in self.buckets], model, self.network)

    def train(self) -> None:
        """Gives the node its own parameters back."""
        if self._evaluation.active:
            self._reclaim_all()  # a trainer may have moved them meanwhile
            self._evaluation.leave()

    @property
    def evaluating(self) -> bool:
        """Whether the parameters are the mean of all nodes just now."""
        return self._evaluation.active

    def own_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the node's own parameters although it is in evaluation; communicates nothing."""
        self._reclaim_all()
        return self._evaluation.interrupted()

    def recall_messages(self) -> None:
        """Lets messages that left before their gradient arrive, unused: x is about to change."""
        for round in self.rounds:
            round.recall()

    def forget(self) -> None:
        """The next messages are what they would be if the run began here; on all nodes."""
        for exchange in self.exchanges.values():
            if exchange.remembers:
                self.recall_messages()
                exchange.forget()

    def close(self) -> None:
        """Leaves the parameters to another runtime. A neighbor's death may be why."""
        with contextlib.suppress(ExchangeError):
            self.recall_messages()
        self._wrapper.stop()
        for handle in self._hooks:
            handle.remove()
        self._thread.stop()
        for exchange in self.exchanges.values():
            exchange.close()

    def catch_up(self) -> None:
        """With patience_seconds, on all nodes: who is behind goes on where the furthest is."""
        if self.options.patience_seconds is not None:
            skip(self._groups, max(self.network.gather(self.index)) - self.index)

    def use_groups(self, groups: list[ParamGroup]) -> None:
        """The same param groups in another list."""
        self._groups = groups

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this process holds for training, by kind."""
        held = [exchange.memory_bytes() for exchange in self.exchanges.values()]
        return {
            "parameters": sum(bucket.x.nbytes for bucket in self.buckets),
            "gradients": sum(round.gradient_bytes() for round in self.rounds),
            "state": sum(t.nbytes for round in self.rounds for t in round.shard.state.values()),
            "messages": sum(b.nbytes for b in self._buffers) + sum(k["messages"] for k in held),
            "received": sum(k["received"] for k in held),
        }


def _sends_x(algorithm: Algorithm) -> bool:
    """Whether a message is x itself."""
    x = torch.zeros(1)
    return algorithm.message(x, x, algorithm.init(x), Step(0, 0.0)) is x


def _hook(runtime: Runtime, round: Round, i: int) -> Callable[[Tensor], None]:
    """Weak, because the parameter keeps it: an optimizer that nobody uses is gone."""
    its_runtime, its_round = weakref.ref(runtime), weakref.ref(round)

    def on_gradient(p: Tensor) -> Any:
        runtime, round = its_runtime(), its_round()
        if runtime is not None and round is not None:
            runtime.on_gradient(round, i)

    return on_gradient
