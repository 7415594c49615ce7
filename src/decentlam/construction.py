"""Building an optimizer: the network is joined, parameters laid out, backward hooked into."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from decentlam.agreement import check_agreement, facts_of
from decentlam.algorithms import Algorithm, check_compatible
from decentlam.algorithms.reaches import always_everyone, most_payloads, sometimes_everyone
from decentlam.cost.automatic import automatic
from decentlam.errors import ExchangeError
from decentlam.exchange.differences import DifferenceExchange, check_differences
from decentlam.exchange.network import Network, communication_device, connect
from decentlam.exchange.outboxes import one_machine, open_outboxes
from decentlam.exchange.process_group import NoExchange, ProcessGroupExchange
from decentlam.exchange.shared_memory import SharedMemoryExchange
from decentlam.flight import Flight
from decentlam.groups import algorithm_of
from decentlam.launch import init_if_launched
from decentlam.layout import Bucket, build_buckets
from decentlam.options import usual_bucket_bytes
from decentlam.pace import Mode, Pace
from decentlam.stability import choose
from decentlam.statistics import StepStatistics
from decentlam.stepping import Stepping
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

_tags = itertools.count(1)  # keeps optimizers apart, and from the script's own messages (tag 0)
_TAGS_EACH = 1 << 14


class Construction(Stepping):
    """What `DecentralizedOptimizer` does before the first step, and when the network changes."""

    _method: Algorithm  # as the user named it; what runs may be its stable form
    _ready: bool

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
        per_node = 1 if always_everyone(self._method) else options.processes_per_node
        self.network = connect(process_group, per_node, sometimes_everyone(self._method))
        self._statistics = StepStatistics()
        self._settling = threading.RLock()
        self._quieten()
        self._buckets: list[Bucket] = []
        self._flights: list[Flight] = []
        self._hooks: list[Any] = []
        # A copy or an unpickled optimizer may be one process's own idea: it must not ask others.
        self._shares = agree and self._could_share() and one_machine(self.network, self._on_cpu())
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
        if self.network.num_nodes == 1 or always_everyone(self._method):
            return "ring"  # nobody mixes on it
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        name, reason = automatic(
            self.network,
            self._method,
            sum(p.nbytes for p in params),
            overlap=self._options.overlap,
            bucket_bytes=self._bucket_bytes,
            stable=self._options.stable,
            timeout_seconds=self._options.timeout_seconds,
            device=communication_device(self.network, params[0].device),
            shared_memory=self._shares,
        )
        if self.network.rank == 0:
            log.info("topology='auto': %s", reason)
        return name

    @property
    def _bucket_bytes(self) -> int:
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        size = sum(p.nbytes for p in trained)
        # In nodes of several processes the saved state follows the buckets, wherever it is loaded.
        fewer = self._shares and self.network.processes_per_node == 1
        return self._options.bucket_bytes or usual_bucket_bytes(size, one_machine=fewer)

    def _could_share(self) -> bool:
        """Whether messages are of a kind that neighbors may read in memory: known to be alike on
        all processes. Those that leave before their gradient may be recalled, and are sent."""
        return (
            self._options.shared_memory
            and self._options.message_dtype is None
            and self.network.num_nodes > 1
            and not self.network.batched
            and not always_everyone(self._method)
            and self._method.needs_gradient
        )

    def _on_cpu(self) -> bool:
        return all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])

    def _make_exchange(self) -> NoExchange | ProcessGroupExchange:
        """How this network mixes the buckets there are; on every process together if it shares."""
        if self.network.num_nodes == 1:
            return NoExchange()
        arguments = self.network, self.topology, self._options.timeout_seconds, self._tag
        if self._shares and self._flights:
            rows = most_payloads(self._method)
            likes = [flight.x.new_empty((rows, len(flight.x))) for flight in self._flights]
            outboxes = open_outboxes(self.network, likes)
            if outboxes is not None:
                return SharedMemoryExchange(*arguments, outboxes)
            log.info("no memory to share; messages are sent through the process group")
        if self._options.message_dtype is not None:
            return DifferenceExchange(*arguments, self._options.message_dtype)
        return ProcessGroupExchange(*arguments)

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
            self.param_groups, self._bucket_bytes, parts, gather=self._method.layerwise
        )
        self._flights = [
            Flight(
                i,
                b,
                algorithm_of(self._algorithm, self.param_groups[b.group]),
                self.network,
                timeout,
            )
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
        self.exchange = self._make_exchange()

    def use_network(self, network: Network, topology: str | Topology) -> None:
        """Goes on with another network or topology; only between steps, on every node."""
        self._check_quiet("change the network")
        topology = resolve(topology, network.num_nodes)
        check_compatible(self._method, topology)
        algorithm, topology, note = choose(self._method, topology, self._options.stable)
        if note is not None and network.rank == 0:
            log.warning("%s", note)
        if self._options.message_dtype is not None:
            self._check_message_dtype(network, topology)
        if network.processes_per_node != self.network.processes_per_node:
            raise ValueError(
                f"the new network has {network.processes_per_node} processes per node, the old one "
                f"{self.network.processes_per_node}; build a new optimizer to change that"
            )
        with contextlib.suppress(ExchangeError):  # a neighbor's death may be why it changes
            self._finish_rounds()
        self._pace = Pace(self._first_mode(network))
        self.network, self.topology = network, topology
        before = self._algorithm
        self._algorithm = algorithm if network.num_nodes > 1 else self._alone(self._method)
        for flight in self._flights:
            flight.reset()  # what a neighbor's death left
            flight.network, flight.outbox = network, None
        if self._flights and self._algorithm != before:
            self._build()
        else:
            self.exchange = self._make_exchange()

    def _check_message_dtype(self, network: Network, topology: Topology) -> None:
        if always_everyone(self._method):
            raise ValueError(
                f"message_dtype is for messages to neighbors; {self._method!r} averages over "
                "everyone, exactly"
            )
        if network.num_nodes > 1:
            check_differences(network, topology)

    def _first_mode(self, network: Network) -> Mode:
        """The user's overlap; "auto" only where processes may choose differently (see `pace`)."""
        overlap = self._options.overlap
        if network.num_nodes == 1 or self._options.whole_gradient:
            return False
        if overlap != "auto":
            return overlap
        if network.batched or not self._method.needs_gradient:
            return True
        return False if network.processes_per_node > 1 else "auto"

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

    def _check_quiet(self, what: str) -> None:
        if getattr(self, "_round_open", False):
            raise RuntimeError(f"cannot {what} between backward and step(); call step() first")
        if getattr(self, "_ending", None) is not None:
            self.finish()

    def _finish_rounds(self) -> None:
        """Lets messages that left before their gradient arrive, unused: x is about to change."""
        self._expected_early = False
        for round in [flight.recall() for flight in self._flights if flight.early]:
            round.wait()
            round.finish()

    def _publish_state(self, flight: Flight) -> None:
        """Shows the flat state as per-parameter views, the form torch saves and loads."""
        for p, views in flight.state_views():
            self.state[p] = views
