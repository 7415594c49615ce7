"""The way of a step, top to bottom: gradients arrive, messages leave, mixes come back, parameters
are updated. `on_gradient` runs in backward, `step` when the script calls it.

A step is atomic: all mixes are there before the first parameter changes. A step that failed has
changed nothing, its gradients are still there, and it can be taken again, alone if need be.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentlam.algorithms import Algorithm, Reach
from decentlam.errors import ExchangeError, NonFiniteError, StaleMessageError
from decentlam.exchange.base import Exchange, NoExchange
from decentlam.network import waiting
from decentlam.network.network import Network
from decentlam.options import Options
from decentlam.runtime.bucket import Bucket, Plan, inside_node
from decentlam.runtime.checks import Checks, finite_flag
from decentlam.runtime.evaluation import Evaluation
from decentlam.runtime.gradients import WholeGradient
from decentlam.runtime.overlap import OverlapChoice
from decentlam.runtime.param_groups import ParamGroup, advance, step_of
from decentlam.runtime.sharded import find_modules, local, reshard
from decentlam.topology import Topology

log = logging.getLogger(__name__)


@dataclass
class StepStatistics:
    """The cost of the last finished step, and totals."""

    step: int = -1
    wait_seconds: float = 0.0  # for which training waited for messages
    exchange_seconds: float = 0.0  # from the first message sent to the last one received
    bytes_sent: int = 0
    skipped: bool = False  # the gradient was left out (overflow, non-finite, no data)
    alone: bool = False  # an elastic run: the exchange failed, and the step was finished without it
    total_wait_seconds: float = 0.0
    total_bytes_sent: int = 0
    skipped_steps: int = 0
    _begun: float = 0.0

    @property
    def overlap(self) -> float:
        """The share of the exchange that was hidden behind other work, 0 to 1."""
        if self.exchange_seconds <= 0:
            return 1.0
        return max(0.0, 1.0 - self.wait_seconds / self.exchange_seconds)

    def begin(self) -> None:
        """Note that the first message of a step is about to leave."""
        self._begun = time.perf_counter()

    def end(self, step: int, waited_since: float, bytes_sent: int, skipped: bool) -> None:
        """Note what a step cost."""
        self.step, self.bytes_sent, self.skipped = step, bytes_sent, skipped
        now = time.perf_counter()
        self.wait_seconds, self.exchange_seconds = now - waited_since, now - self._begun
        self.total_wait_seconds += self.wait_seconds
        self.total_bytes_sent += bytes_sent
        self.skipped_steps += skipped


class Runtime:
    """One node of a run: owns its buckets, its exchanges and the order in which things happen.

    `groups` are the optimizer's, which schedulers change; the runtime reads them and counts steps.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        algorithm: Algorithm,
        network: Network,
        topology: Topology,
        exchanges: Mapping[Reach, Exchange],
        buckets: Sequence[Bucket],
        options: Options,
        overlap: OverlapChoice,
        statistics: StepStatistics,
        before_message: weakref.WeakMethod[Callable[[], None]] | None = None,
    ) -> None:
        self.algorithm = algorithm  # what runs; may be a stable form of the user's
        self.network, self.topology, self.options = network, topology, options
        self.exchanges, self.buckets, self.overlap = exchanges, buckets, overlap
        self.statistics = statistics
        self._groups = groups
        self._before_message = before_message  # runs before a step's first message
        self._evaluation = Evaluation()
        frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        self._checks = Checks(network, buckets, frozen, first=statistics.step < 0)
        self._synchronizing = True  # not inside no_sync()
        self._open = False  # between the first message of a step and its end
        self._begun = False  # the exchange of this step: its receives are posted
        self._alone = False  # this step is taken without the others
        self._skipped: bool | None = None  # whether this step leaves its gradient out, once known
        self._failure: Exception | None = None  # of a message that left before step()
        self._refused: str | None = None  # why a message was not sent
        self._mixed = False  # all mixes are there: parameters are updated
        self._several = network.intra_node_group is not None  # processes in this node
        self._sharded = network.shard_group is not None
        self._modules = find_modules(p for b in buckets for p in b.wholes) if self._sharded else []
        self._first = self._several or self._sharded  # no whole gradient was prepared yet
        self._whole_gradient = options.whole_gradient or self._sharded
        self._shards = [shard for bucket in buckets for shard in bucket.shards]
        self._looks = options.nonfinite != "ignore"
        self._flags = self._looks and network.is_nccl  # looks one step later
        self._hooks = [
            p.register_post_accumulate_grad_hook(_hook(self, bucket, i))
            for bucket in buckets
            for i, p in enumerate(bucket.wholes)
        ]

    @property
    def index(self) -> int:
        """The number of the step that is under way or comes next."""
        return int(self._groups[0]["step"])

    @property
    def rates(self) -> list[float]:
        """The learning rate of every param group."""
        return [float(group["lr"]) for group in self._groups]

    @property
    def position(self) -> int:
        """A number that grows when a step begins, and when it ends."""
        return 2 * self.index + self._open

    def description(self, method: Algorithm, unit: str) -> str:
        """Return a line on the run: method, nodes, peers and bytes, and which node this is."""
        network, name, reach = self.network, type(method).__name__, self.algorithm.reach(0)
        where = f"node {network.node} of {network.num_nodes} on {socket.gethostname()}"
        if network.num_nodes == 1:
            return f"{name} on one node, without communication; {where}"
        listeners, cycle = self.topology.listeners, range(self.topology.period or 8)
        count = max(len(listeners(network.node, k)) for k in cycle)
        whom = {
            Reach.NEIGHBORS: "one peer" if count == 1 else f"{count} peers",
            Reach.EVERYONE: "an all-reduce",
            Reach.NOBODY: "nobody",
        }[reach]
        short = self.options.message_dtype if reach is Reach.NEIGHBORS else None
        size = reach.messages_sent(network.num_nodes, count) * sum(
            bucket.message_size(self.algorithm, 0) * (short or bucket.x.dtype).itemsize
            for bucket in self.buckets
        )
        sent = f"{whom} and {size / 1e6:.3g} MB per {unit}"
        return f"{name} on {network.num_nodes} nodes, {sent}; {where}"

    @property
    def exchange(self) -> Exchange:
        """The exchange that mixes the messages of this step."""
        return _ALONE if self._alone else self.exchanges[self.algorithm.reach(self.index)]

    # Backward -----------------------------------------------------------------------------------

    def on_gradient(self, bucket: Bucket, i: int) -> None:
        """Take the gradient of parameter i; with overlap, send the buckets that are complete."""
        if not bucket.holds(i):
            if not bucket.owns(i):
                return  # another optimizer was built with it; this one is no longer used
            bucket.reclaim(i)
        if self._evaluation.active:
            self.check_training("call backward()")
        if not self._synchronizing:
            return
        if self.overlap.undecided:
            self.overlap.watch(bucket.params[i], self._groups)
        if self._sends_in_backward() and self._failure is None:
            if bucket.gathered:
                raise StaleMessageError(
                    f"a second backward reached {bucket.names[i]} before step(), but its "
                    "message is on the way. Accumulate gradients inside `with opt.no_sync():` "
                    "(all backwards but the last), or use overlap='none'."
                )
            bucket.arrived.add(i)
            if len(bucket.arrived) == len(bucket.params) or self._several:
                try:
                    self._send_complete()
                except (ExchangeError, NonFiniteError) as error:
                    self._failure = error  # step() raises it

    def _sends_in_backward(self) -> bool:
        """Return False also when this step sends nothing: gradients may change until step()."""
        overlaps = self.overlap.mode == "backward" and self.algorithm.needs_gradient
        return overlaps and not self.exchange.silent

    @torch.no_grad()
    def _send_complete(self) -> None:
        """Send the buckets that have all gradients, in bucket order: NCCL hangs otherwise."""
        for bucket in self.buckets:
            if not bucket.gathered:
                if len(bucket.arrived) < len(bucket.params):
                    break
                self._gather(bucket)
            if not self._several:
                self._send(bucket)
        if self._several:  # every sum begins as early as it can, whatever the one before it does
            gathered = [bucket.gathered for bucket in self.buckets]
            for bucket, next_is_gathered in zip(self.buckets, [*gathered[1:], False], strict=True):
                if not bucket.gathered or not bucket.summed(next_is_gathered):
                    break
                self._send(bucket)

    def _gather(self, bucket: Bucket, absent: bool = False) -> None:
        """Take the gradient of a bucket, which must not change from here on."""
        if not self._open:
            before = self._before_message() if self._before_message and not absent else None
            if before is not None:  # who is absent has joined already
                before()
            self._open = True
            self.statistics.begin()
            self._begin_exchange()
        bucket.gather(self.index, bool(self._skipped))
        self._note(bucket)

    def _begin_exchange(self) -> None:
        if not self._begun:
            self._begun = True
            sizes = [bucket.message_size(self.algorithm, self.index) for bucket in self.buckets]
            self.exchange.begin(self.index, sizes)

    def _note(self, bucket: Bucket) -> None:
        """Note what the message of a bucket is made of: rates, gradients and parameters."""
        bucket.plan = self._plan(bucket)
        bucket.versions = self._checks.versions(bucket)

    def _plan(self, bucket: Bucket) -> Plan:
        group = self._groups[bucket.group]
        return self.algorithm.with_hyper(group), step_of(group, bool(self._skipped), bucket.norm)

    def _send(self, bucket: Bucket) -> None:
        """Form the message of a bucket and hand it to the exchange, unless it was sent before."""
        exchange = self.exchange
        if bucket.pending is not None or exchange.silent:
            return
        if (self._several or self._flags) and bucket.gathered:
            bucket.finish_sum()
            if self._flags:
                self._checks.leave_out(bucket)
        message = exchange.message(bucket.number, bucket.message_size(self.algorithm, self.index))
        finite = bucket.form(message, look=self._looks and not self._flags)
        if not finite:
            self._checks.refuse(bucket, self.index, message)
        if self._flags:
            bucket.finite = finite_flag([message], bucket.finite)
        bucket.pending = exchange.send(bucket.number, message, self.index)

    @torch.no_grad()
    def step(
        self,
        absent: bool = False,
        found_inf: Tensor | None = None,
        scale: Tensor | None = None,
        alone: bool = False,
    ) -> None:
        """Take one step.

        Args:
            absent: This node ran out of data and only answers its neighbors.
            found_inf: What a GradScaler found.
            scale: What a GradScaler multiplied the loss with.
            alone: Take the step that has just failed again, without the others.
        """
        if not self._synchronizing or self._evaluation.active or self._refused is not None:
            self._refuse_step()
        self.finish()
        self._checks.before(absent, self._open)
        if self.overlap.undecided:
            self.overlap.judge(self._groups, scaled=found_inf is not None)
        if not alone:
            self._skipped = absent or None
        self._alone = self.statistics.alone = alone
        try:
            self._exchange_all(absent, found_inf, scale)
        except NonFiniteError as error:
            self._refused = str(error)
            raise
        except ExchangeError:
            waiting.end()
            self._abandon()
            raise
        self.finish()

    @torch.no_grad()
    def begin(self, absent: bool = False) -> None:
        """Send the messages of the next step now. Parameters may change until `step` uses them; the
        algorithm, which reads no gradient, then has what was sent in its state."""
        self.finish()
        self._checks.before(absent, self._open)
        self._skipped = absent
        try:
            for bucket in self.buckets:
                self._gather(bucket, absent)
            for bucket in self.buckets:
                self._send(bucket)
                bucket.versions = None
        except NonFiniteError as error:
            self._refused = str(error)
            raise
        except ExchangeError as error:
            self._failure = error  # step() raises it

    def _refuse_step(self) -> None:
        if not self._synchronizing:
            raise RuntimeError("step() inside no_sync(); leave the context before stepping")
        self.check_training("call step()")
        raise NonFiniteError(
            f"{self._refused} The neighbors wait for the message of that step, so this process "
            "cannot go on: start again from a checkpoint."
        )

    def _exchange_all(self, absent: bool, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Send what was not sent, and wait for all mixes; until then nothing changes."""
        if self._failure is not None:  # of a message that left in backward
            if self._sharded and isinstance(self._failure, NonFiniteError):
                self._agree_with_shards(self._failure)
            raise self._failure
        if self._skipped is None:
            self._skipped = self._prepare_gradients(found_inf, scale)
        for bucket in self.buckets:
            if bucket.versions is not None:
                self._checks.fresh(bucket, self._plan(bucket))
            if not bucket.gathered:
                self._gather(bucket, absent)
        unsent = self.exchange.silent or not self.algorithm.needs_gradient
        for bucket in self.buckets:
            if unsent:
                self._use_unsent(bucket)
            self._send(bucket)
        begun, sent = time.perf_counter(), 0
        waiting.begin(f"step {self.index}", self._awaited)
        for pending in [bucket.pending for bucket in self.buckets if bucket.pending is not None]:
            pending.wait()
            sent += pending.bytes_sent
        waiting.end()
        if self._checks.watching:
            self._checks.after(self._skipped)
        self.statistics.end(self.index, begun, sent, self._skipped)
        self._mixed = True

    def _awaited(self) -> list[str]:
        """Return who has not answered yet in this step."""
        pending = [bucket.pending for bucket in self.buckets if bucket.pending is not None]
        return [peer for each in pending for peer, _ in each.works]

    def _use_unsent(self, bucket: Bucket) -> None:
        """Wait for, and look at, a gradient that no message of this step has."""
        bucket.finish_sum()
        # One node alone has nobody to keep it from, as in torch.optim.
        if self._looks and self.network.num_nodes > 1:
            if self._flags:
                self._checks.leave_out(bucket)
            else:
                self._checks.gradient(bucket, self.index)

    def _prepare_gradients(self, found_inf: Tensor | None, scale: Tensor | None) -> bool:
        """Make the whole gradient ready; return True if this step leaves it out."""
        if not (self._first or self._whole_gradient or found_inf is not None):
            return False
        if self._sharded:
            self.fetch()
            self._agree_with_shards(None)
        if self._sends_in_backward():
            if found_inf is not None:
                raise StaleMessageError(
                    "GradScaler with overlap: the messages left before it was known whether a "
                    "gradient overflowed. Build the optimizer with overlap='none', or use "
                    "bfloat16, which needs no scaler."
                )
            return False
        first, self._first = self._first, False
        if not self.buckets:
            return False
        options, params = self.options, [p for bucket in self.buckets for p in bucket.params]
        timeout = timedelta(seconds=options.wait_seconds)
        whole = WholeGradient(params, self.network, self.index, timeout, first)
        if not whole.unscale(found_inf, scale):
            return True
        if options.nonfinite == "skip" and not whole.finite():
            return True
        if options.max_grad_norm is not None:
            whole.clip(options.max_grad_norm)
        return False

    @torch.no_grad()
    def finish(self) -> None:
        """Update every bucket from its mix; a step that Ctrl-C has interrupted goes on here."""
        if not self._mixed:
            return
        index = self.index
        for bucket in self.buckets:
            if not bucket.updated:
                bucket.update()
        if self._several or self._sharded:
            self._give_back(index)
        if self._flags:
            self._checks.defer(index)
        self.exchange.end()
        advance(self._groups, self.algorithm.reach(index) is Reach.EVERYONE, bool(self._skipped))
        self._mixed, self._alone, self._skipped = False, False, None
        self._abandon()
        if self.overlap.mode == "backward" and not self.algorithm.needs_gradient:
            self._send_early()
        if self.overlap.undecided and self.overlap.step_ended() and self.network.rank == 0:
            log.info("overlap=%r from here on: %s", self.overlap.mode, self.overlap.reason)

    def _send_early(self) -> None:
        """Send the messages of the next step, which need no gradient, while it is computed."""
        if self.exchange.silent:
            return
        try:
            self._begin_exchange()
            for bucket in self.buckets:
                self._note(bucket)
                self._send(bucket)
        except ExchangeError as error:
            # A neighbor may have taken its last step and be gone; the next step tells, if there
            # is one.
            self._failure = error

    def _abandon(self) -> None:
        """Forget what is under way; parameters and gradients stay as they are."""
        self._open = self._begun = False
        self._failure = None
        for bucket in self.buckets:
            bucket.abandon()

    # Shards ---------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Take values and gradients of the shards as the script and FSDP have left them."""
        for shard in self._shards:
            shard.fetch()

    def _agree_with_shards(self, bad: Exception | None) -> None:
        """Refuse the step on all processes of this node if one of them must: a NaN in one shard is
        a NaN of the node, and the others would wait for that process."""
        if bad is None and self._looks and self.options.nonfinite == "raise":
            bad = self._checks.shards_are_finite(self.index)
        found = torch.tensor(float(bad is not None), device=self.network.device)
        timeout = timedelta(seconds=self.options.wait_seconds)
        inside_node(self.network, timeout, self.index, 0, dist.all_reduce, found).wait()
        if bad is not None:
            raise bad
        if found.item():
            raise NonFiniteError(
                f"node {self.network.node}, step {self.index}: another process of this node, which "
                "has another shard, refused the step; its error says why."
            )

    def _give_back(self, index: int) -> None:
        """Let all processes of this node have what each of them has updated."""
        for shard in self._shards:
            shard.store()
        if self._several:
            for gathering in [bucket.begin_gather(index) for bucket in self.buckets]:
                gathering.wait()

    def reshard(self) -> None:
        """Let FSDP see that shards have changed, and show parameters as shards again."""
        reshard(self._modules)

    # Between steps ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates gradients; nothing is sent."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def check_between_steps(self, what: str) -> None:
        """Refuse if the next step has begun, and in evaluation."""
        self.check_training(what)
        if self._open and not self._mixed:
            raise RuntimeError(f"cannot {what} between backward and step(); call step() first")
        self.finish()
        self._checks.look()
        self._checks.reclaim()

    def check_training(self, what: str) -> None:
        """Refuse what needs the node's own parameters in evaluation."""
        if self._evaluation.active:
            raise RuntimeError(
                f"cannot {what} in evaluation: the parameters are the average of all nodes since "
                "optimizer.eval() or averaged(). Call optimizer.train() on every process first."
            )

    def evaluate(self, model: nn.Module | None) -> None:
        """Make the parameters the mean of all nodes, until `train`; every process calls it."""
        if not self._evaluation.active:
            self.check_between_steps("average the model")
            self.reshard()  # a forward may have gathered parameters
            self._evaluation.enter(self.memory, model, self.network, self.rates)
            self.reshard()

    def train(self) -> None:
        """Give the node its own parameters back."""
        if self._evaluation.active:
            self.reshard()
            self._checks.reclaim()  # a trainer may have moved them meanwhile
            self._evaluation.leave()
            self.reshard()

    @property
    def memory(self) -> list[Tensor]:
        """The memory of all parameters: flat, or shard by shard."""
        if self._sharded:
            return [local(shard.whole) for shard in self._shards]
        return [bucket.x for bucket in self.buckets]

    @property
    def evaluating(self) -> bool:
        """True while the parameters are the mean of all nodes."""
        return self._evaluation.active

    def own_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the node has its own parameters although it is in evaluation."""
        self.reshard()
        self._checks.reclaim()
        return self._evaluation.interrupted()

    def recall_messages(self) -> None:
        """Let messages that left before step() arrive, unused: x is about to change."""
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        self._abandon()

    def wrap_exchange(self, wrap: Callable[[Exchange], Exchange]) -> None:
        """Put `wrap(exchange)` in the place of the exchange with neighbors, between steps."""
        if (inner := self.exchanges.get(Reach.NEIGHBORS)) is not None:
            self.exchanges = {**self.exchanges, Reach.NEIGHBORS: wrap(inner)}

    def close(self) -> None:
        """Leave the parameters to another runtime. A neighbor's death may be why."""
        with contextlib.suppress(ExchangeError):
            self.recall_messages()
        for handle in self._hooks:
            handle.remove()

    def use_groups(self, groups: list[ParamGroup]) -> None:
        """Go on with the same param groups in another list."""
        self._groups = groups


_ALONE = NoExchange()


def _hook(runtime: Runtime, bucket: Bucket, i: int) -> Callable[[Tensor], None]:
    """Return a weak hook, because the parameter keeps it: an optimizer that nobody uses is gone."""
    its_runtime, its_bucket = weakref.ref(runtime), weakref.ref(bucket)

    def on_gradient(p: Tensor) -> Any:
        runtime, bucket = its_runtime(), its_bucket()
        if runtime is not None and bucket is not None:
            runtime.on_gradient(bucket, i)

    def on_shard(p: Tensor) -> Any:
        bucket = its_bucket()
        if bucket is not None:
            bucket.shards[i].fetch()
            on_gradient(p)

    return on_shard if bucket.shards else on_gradient
