"""One node per process: a torch.optim.Optimizer whose messages travel while backward runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from decentlam import evaluation, late
from decentlam.agreement import check_agreement, facts_of
from decentlam.algorithms import Algorithm, Reach, Step, check_compatible, lr_ratio
from decentlam.cost.automatic import automatic
from decentlam.errors import ExchangeError, NonFiniteError, StaleMessageError
from decentlam.exchange.network import Network, communication_device, connect
from decentlam.exchange.process_group import NoExchange, ProcessGroupExchange, Round
from decentlam.flight import Flight
from decentlam.launch import init_if_launched
from decentlam.layout import Bucket, build_buckets
from decentlam.options import Options
from decentlam.pace import Mode, Pace
from decentlam.preparation import prepare
from decentlam.simulate import check_lr
from decentlam.stability import choose
from decentlam.statistics import StepStatistics
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

_tags = itertools.count(1)  # keeps optimizers apart, and from the script's own messages (tag 0)
_TAGS_EACH = 1 << 14
_LONGEST_PERIOD = 10_000  # steps within which an algorithm that ever averages exactly does so


class DecentralizedOptimizer(Optimizer, Joinable):
    """Runs any `Algorithm` on the processes of a torch.distributed group, one node each.

    Parameters live in flat buckets. A bucket's message is formed and sent as soon as backward has
    its gradients; `step()` waits for the neighbors' and updates. With `overlap=False` everything
    happens in `step()`, which clipping, GradScaler and skipping non-finite gradients need.
    The method classes (`DecentLaM`, `DmSGD`, ...) are this class with their algorithm filled in.
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step: neighbors need answers

    def __init__(
        self,
        params: ParamsT,
        algorithm: Algorithm,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        topology: str | Topology = "symmetric-exponential",
        overlap: Mode = "auto",
        bucket_bytes: int = 4 * 2**20,
        max_grad_norm: float | None = None,
        nonfinite: str = "raise",
        processes_per_node: int = 1,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        stable: str = "refuse",
    ) -> None:
        check_lr(lr)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay!r}")
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        if hasattr(algorithm, "beta"):
            defaults["momentum"] = algorithm.beta
            defaults["nesterov"] = getattr(algorithm, "nesterov", False)
        self._options = Options(
            topology,
            overlap,
            bucket_bytes,
            max_grad_norm,
            nonfinite,
            processes_per_node,
            timeout_seconds,
            stable,
        )
        self._algorithm = self._method = algorithm
        self._ready = False
        super().__init__(params, defaults)
        Joinable.__init__(self)
        self._attach(process_group, agree=True)

    # Setting up ------------------------------------------------------------------------------

    def _attach(self, process_group: dist.ProcessGroup | None, agree: bool) -> None:
        """Joins the network, lays the parameters out and hooks into backward."""
        options = self._options
        self._algorithm = self._method
        init_if_launched(next(p.device for g in self.param_groups for p in g["params"]))
        self._tag = next(_tags) * _TAGS_EACH
        for group in self.param_groups:
            self._prepare_group(group)
        if agree:  # before groups are formed and tensors sent, where a difference is a hang
            check_agreement(
                connect(process_group),
                facts_of(self._method, self._options, self.param_groups, self._tag),
            )
        # The exact average of all processes is that of all nodes: PmSGD needs no hierarchy.
        per_node = 1 if _always_everyone(self._method) else options.processes_per_node
        self.network = connect(process_group, per_node, _sometimes_everyone(self._method))
        self._statistics = StepStatistics()
        self._synchronizing = True
        self._round_open = False
        self._expected_early = False
        self._hyper_seen: list[dict[str, float]] = []
        self._ending: tuple[int, int, bool] | None = None  # of a step that is still to complete
        self._waited = 0.0
        self._settling = threading.RLock()  # anybody may touch a parameter, from any thread
        self._buckets: list[Bucket] = []
        self._flights: list[Flight] = []
        self._hooks: list[Any] = []
        if options.topology == "auto":
            self._options = dataclasses.replace(options, topology=self._choose_topology())
        self.use_network(self.network, self._options.topology)
        if agree:
            chosen = {"stable form": f"{self._algorithm!r} on {self.topology!r}"}
            check_agreement(self.network, chosen)
        self._build()
        if agree:
            self._start_equal(self._buckets)
        self._ready = True

    def _choose_topology(self) -> str:
        """Measures the links; on every process together."""
        if self.network.num_nodes == 1 or _always_everyone(self._method):
            return "ring"  # nobody mixes on it
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        name, reason = automatic(
            self.network,
            self._method,
            sum(p.nbytes for p in params),
            overlap=self._options.overlap,
            bucket_bytes=self._options.bucket_bytes,
            stable=self._options.stable,
            timeout_seconds=self._options.timeout_seconds,
            device=communication_device(self.network, params[0].device),
        )
        if self.network.rank == 0:
            log.info("topology='auto': %s", reason)
        return name

    def _alone(self, algorithm: Algorithm) -> Algorithm:
        """What runs when there is only one node."""
        return algorithm

    def _build(self) -> None:
        """Buckets and flights of all groups; state that is there already is kept."""
        for handle in self._hooks:
            handle.remove()
        parts = self.network.processes_per_node
        timeout = timedelta(seconds=self._options.timeout_seconds)
        self._buckets = build_buckets(
            self.param_groups, self._options.bucket_bytes, parts, gather=self._method.layerwise
        )
        self._flights = [
            Flight(i, b, self._algorithm_of(self.param_groups[b.group]), self.network, timeout)
            for i, b in enumerate(self._buckets)
        ]
        self._hooks = []
        for flight in self._flights:
            flight.load_state({p: self.state.get(p, {}) for p in flight.bucket.params})
            self._publish_state(flight)
            for i, p in enumerate(flight.bucket.params):
                hook = self._make_hook(flight, i)
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))
        self._frozen = [
            p for group in self.param_groups for p in group["params"] if not p.requires_grad
        ]

    def use_network(self, network: Network, topology: str | Topology) -> None:
        """Goes on with another network or topology; only between steps, on every node."""
        self._check_quiet("change the network")
        topology = resolve(topology, network.num_nodes)
        check_compatible(self._method, topology)
        algorithm, topology, note = choose(self._method, topology, self._options.stable)
        if note is not None and network.rank == 0:
            log.warning("%s", note)
        if network.processes_per_node != self.network.processes_per_node:
            raise ValueError(
                f"the new network has {network.processes_per_node} processes per node, the old one "
                f"{self.network.processes_per_node}; build a new optimizer to change that"
            )
        with contextlib.suppress(ExchangeError):  # a neighbor's death may be why it changes
            self._finish_rounds()
        whole = network.num_nodes == 1 or self._options.whole_gradient
        self._pace = Pace(False if whole else self._options.overlap)
        self.network, self.topology = network, topology
        before = self._algorithm
        self._algorithm = algorithm if network.num_nodes > 1 else self._alone(self._method)
        self.exchange: NoExchange | ProcessGroupExchange = (
            NoExchange()
            if network.num_nodes == 1
            else ProcessGroupExchange(network, topology, self._options.timeout_seconds, self._tag)
        )
        for flight in self._flights:
            flight.network = network
        if self._flights and self._algorithm != before:
            self._build()

    @torch.no_grad()
    def _start_equal(self, buckets: list[Bucket]) -> None:
        """Gives all processes the parameters of process 0."""
        if self.network.group is not None:
            source = dist.get_global_rank(self.network.group, 0)
            for x in [*(b.x for b in buckets), *(p.data for p in self._frozen)]:
                dist.broadcast(x, source, group=self.network.group)

    def _prepare_group(self, group: dict[str, Any]) -> None:
        """What the recursion remembers of a group besides its tensors; saved with it."""
        for name in ("step", "previous_lr", "sync_lr"):
            group.setdefault(name, 0 if name == "step" else None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._ready:
            super().add_param_group(param_group)
            return
        self._check_quiet("add a param group")
        self._finish_rounds()
        super().add_param_group(param_group)
        self.param_groups[-1]["step"] = self.param_groups[0]["step"]
        self._prepare_group(self.param_groups[-1])
        check_agreement(
            self.network, facts_of(self._method, self._options, self.param_groups, self._tag)
        )
        self._build()
        self._start_equal([b for b in self._buckets if b.group == len(self.param_groups) - 1])

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
                "functions (TorchScript, a CUDA graph). Use overlap=True."
            )
        self.finish()

    def _on_gradient(self, flight: Flight, i: int) -> None:
        flight.bucket.adopt_gradient(i)
        if self._pace.undecided and not self._pace.mode and self._synchronizing:
            self._watch(flight, i)
        if not (self._synchronizing and self._sends_in_backward):
            return
        if flight.started:
            raise StaleMessageError(
                f"a second backward reached {flight.bucket.names[i]} before step(), but its "
                "message is on the way. Accumulate gradients inside `with opt.no_sync():` "
                "(all backwards but the last), or use overlap=False."
            )
        flight.arrived.add(i)
        self._start_ready()

    def _watch(self, flight: Flight, i: int) -> None:
        """Notes the gradient as backward left it: overlap must not be tried if that changes."""
        if not flight.note_gradient(i):
            self._pace.decide(False, "gradients are accumulated over several backwards")
        if not self._hyper_seen:
            self._hyper_seen = [self._hyper(group) for group in self.param_groups]

    def _judge(self) -> None:
        """Decides against overlap if the script changes what the messages are made of."""
        if any(flight.gradient_touched() for flight in self._flights):
            self._pace.decide(False, "gradients change between backward and step()")
        elif self._hyper_seen not in ([], [self._hyper(group) for group in self.param_groups]):
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
        """Not if the message needs no gradient: the next one leaves at once, with the new x."""
        return self._pace.mode == "forward" and self._algorithm.needs_gradient

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
        flight.hyper = self._hyper(self.param_groups[flight.bucket.group])
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
        if not self._expected_early:
            self._expect(self._flights)

    def _expect(self, flights: list[Flight]) -> None:
        index = self.param_groups[0]["step"]
        reach = self._algorithm.reach(index)
        if not self.exchange.silent(reach):
            messages = {flight.slot: flight.message(index) for flight in flights}
            self.exchange.expect(messages, index, reach)

    def _send(self, flight: Flight) -> None:
        """Forms the message of one bucket from its gradient and hands it to the exchange."""
        if flight.sent:
            return
        group = self.param_groups[flight.bucket.group]
        step = self._step_of(group, flight.skipped)
        flight.complete_gradient()
        if self._options.nonfinite != "ignore" and not self._algorithm.needs_gradient:
            self._check_finite(flight.nonfinite_gradients(), step)
        if not flight.early:
            self._depart(flight, step)
        flight.sent = True

    def _depart(self, flight: Flight, step: Step) -> None:
        """Forms the message and sends it, if it is finite."""
        algorithm = self._algorithm_of(self.param_groups[flight.bucket.group])
        reach = algorithm.reach(step.index)
        if self.exchange.silent(reach):
            flight.round = Round.silent()
            return
        bad = flight.form_message(algorithm, step, check=self._options.nonfinite != "ignore")
        self._check_finite(bad, step)
        message = flight.message(step.index)
        by_need = self._ends_in_forward
        flight.round = self.exchange.start(flight.slot, message, step.index, reach, by_need)

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
            flight.check_fresh(self._hyper(self.param_groups[flight.bucket.group]))
        for flight in self._flights:
            self._send(flight)
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
        """Updates all buckets, or lets whoever touches a parameter do it."""
        index = self.param_groups[0]["step"]
        reach = self._algorithm.reach(index)
        sent = sum(flight.message_bytes(index) for flight in self._flights)
        self._ending = (index, self.exchange.bytes_sent(sent, index, reach), skipped)
        for flight in self._flights:
            group = self.param_groups[flight.bucket.group]
            flight.plan = (self._algorithm_of(group), self._step_of(group, flight.skipped))
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
        apart = self.network.node_group is None  # its processes must gather in the same order
        for flight in self._flights:
            finish = functools.partial(self._settle, flight) if apart else self.finish
            if not late.postpone(flight.bucket.params, finish):
                return False
        late.watch(self)
        return True

    def _settle(self, flight: Flight) -> None:
        """The late update of one bucket."""
        with self._settling, torch.no_grad():
            try:
                self._waited += flight.settle()
            except ExchangeError:
                self._release()  # what they were before the step: it can still be saved
                raise
            late.release(flight.bucket.params)

    def _release(self) -> None:
        for flight in self._flights:
            late.release(flight.bucket.params)

    def finish(self) -> None:
        """Completes the last step: every message has arrived and left, every parameter is new.

        Only `overlap="forward"` (and "auto", which may choose it) leaves anything to complete, and
        whoever touches a parameter completes it. Call this at the end of a run that goes on to
        destroy the process group without having looked at the model.
        """
        if self._ending is None:
            return
        self._complete()

    def _complete(self, then: Callable[[Flight], None] | None = None) -> None:
        """Updates what is still to be; `then` sends a bucket on while the next ones wait."""
        assert self._ending is not None
        with self._settling, torch.no_grad():
            (index, sent, skipped), self._ending = self._ending, None
            late.forget(self)
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
            finally:
                self._release()
            self._statistics.end(index, self._waited, sent, skipped)
            self._waited = 0.0

    def _choose_pace(self) -> None:
        if self._pace.step_ended() and self.network.rank == 0:
            log.info("overlap=%r from here on: %s", self._pace.mode, self._pace.reason)

    def _start_early(self, flight: Flight) -> None:
        """The message needs no gradient: it travels during the next forward and backward."""
        self._expect([flight])
        self._depart(flight, self._step_of(self.param_groups[flight.bucket.group]))
        flight.early = True

    # What message and update are called with ----------------------------------------------------

    def _algorithm_of(self, group: dict[str, Any]) -> Algorithm:
        """The algorithm with this group's momentum, which schedulers may change."""
        if "momentum" not in group:
            return self._algorithm
        changes = {"beta": group["momentum"]}
        if hasattr(self._algorithm, "nesterov"):
            changes["nesterov"] = group["nesterov"]
        if all(getattr(self._algorithm, k) == v for k, v in changes.items()):
            return self._algorithm
        return dataclasses.replace(self._algorithm, **changes)  # type: ignore[type-var]

    def _step_of(self, group: dict[str, Any], skip: bool = False) -> Step:
        lr = check_lr(group["lr"])
        return Step(
            index=group["step"],
            lr=lr,
            lr_ratio=lr_ratio(lr, group["previous_lr"]),
            sync_lr_ratio=lr_ratio(lr, group["sync_lr"]),
            weight_decay=0.0 if skip else group["weight_decay"],
        )

    def _hyper(self, group: dict[str, Any]) -> dict[str, float]:
        names = ("lr", "weight_decay", "momentum", "nesterov")
        return {name: float(group[name]) for name in names if name in group}

    # Accumulation, evaluation, statistics -------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates gradients; nothing is sent."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @contextlib.contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, parameters and the model's floating buffers are their mean over all nodes.

        Every process must enter. Afterwards everything is restored to the bit.
        """
        self._check_quiet("average the model")
        with evaluation.averaged([b.x for b in self._buckets], model, self.network):
            yield

    def merge(self, model: nn.Module | None = None) -> None:
        """Sets every node to the exact mean of all, parameters and buffers: the end of a run."""
        self._check_quiet("merge the nodes")
        self._finish_rounds()
        evaluation.average_([b.x for b in self._buckets], model, self.network)

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes' parameters from their average."""
        self._check_quiet("measure the consensus distance")
        return evaluation.consensus_distance([b.x for b in self._buckets], self.network)

    @property
    def statistics(self) -> StepStatistics:
        """What the last step cost: time waited, bytes sent, share of the exchange hidden."""
        return self._statistics

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this process holds for training, by kind."""
        return {
            "parameters": sum(b.x.nbytes for b in self._buckets),
            "gradients": sum(f.held_gradient_bytes() for f in self._flights),
            "state": sum(t.nbytes for f in self._flights for t in f.state.values()),
            "messages": sum(f.held_message_bytes() for f in self._flights),
            "received": self.exchange.memory_bytes(),
        }

    def _check_quiet(self, what: str) -> None:
        if getattr(self, "_round_open", False):
            raise RuntimeError(f"cannot {what} between backward and step(); call step() first")
        if getattr(self, "_ending", None) is not None:
            self.finish()

    # State -----------------------------------------------------------------------------------

    def _publish_state(self, flight: Flight) -> None:
        """Shows the flat state as per-parameter views, the form torch saves and loads."""
        for p, views in flight.state_views():
            self.state[p] = views

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._ending is None or not set_to_none:
            self.finish()
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # asks for nothing, so that the parameter may stay late

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_quiet("load a state")
        self._finish_rounds()
        super().load_state_dict(state_dict)
        for flight in self._flights:
            flight.load_state({p: self.state.get(p, {}) for p in flight.bucket.params})
            self._publish_state(flight)

    def _finish_rounds(self) -> None:
        """Lets messages that left before their gradient arrive, unused: x is about to change."""
        self._expected_early = False
        for round in [flight.recall() for flight in self._flights if flight.early]:
            round.wait()
            round.finish()

    def __getstate__(self) -> dict[str, Any]:
        self.finish()
        return {
            **super().__getstate__(),
            "_options": self._options,
            "_method": self._method,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = "_options" in state  # unpickled or deep-copied, not load_state_dict
        self._ready = False if fresh else self._ready
        super().__setstate__(state)
        if fresh:
            Joinable.__init__(self)
            self._attach(None, agree=False)

    # Uneven inputs (torch.distributed.algorithms.Join) -------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.network.processes_per_node > 1:
            raise ValueError(
                "Join works with one process per node; with processes_per_node="
                f"{self.network.processes_per_node} give every process the same number of batches"
            )
        return _AnswerNeighbors(self)

    @property
    def join_device(self) -> torch.device:
        return communication_device(self.network, self._buckets[0].x.device)

    @property
    def join_process_group(self) -> Any:
        return self.network.group


class _AnswerNeighbors(JoinHook):
    """A node without data goes on mixing, with a zero gradient, until all have finished."""

    def __init__(self, optimizer: DecentralizedOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._step(absent=True)
        self.optimizer.finish()  # nobody will look at the parameters


def _always_everyone(algorithm: Algorithm) -> bool:
    return all(algorithm.reach(k) is Reach.EVERYONE for k in (0, 1))


def _sometimes_everyone(algorithm: Algorithm) -> bool:
    return any(algorithm.reach(k) is Reach.EVERYONE for k in range(_LONGEST_PERIOD))
