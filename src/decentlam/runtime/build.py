"""From options to a runtime: agree with the others, connect, lay out buckets, pick exchanges."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import (
    Algorithm,
    Reach,
    always_everyone,
    check_compatible,
    check_period,
    most_payloads,
    reaches,
)
from decentlam.analysis.cost.automatic import automatic
from decentlam.analysis.cost.links import measure_links, measure_memory
from decentlam.analysis.cost.messages import (
    fitting_ahead_bytes,
    fitting_bucket_bytes,
    fitting_piece_bytes,
    measure_rounding,
    rounding_pays,
)
from decentlam.analysis.cost.values import Link
from decentlam.analysis.stability import choose
from decentlam.exchange.allreduce import AllReduce
from decentlam.exchange.base import Exchange
from decentlam.exchange.codecs import CODECS
from decentlam.exchange.connections import (
    between_processes,
    limit_ahead,
    limit_unsent,
    restore,
)
from decentlam.exchange.differences import Differences, check_differences
from decentlam.exchange.neighbors import GlooWire, NcclWire, Neighbors, Wire
from decentlam.exchange.network import Network, connect
from decentlam.exchange.none import NoExchange
from decentlam.exchange.patience import Patience, check_patience
from decentlam.exchange.rounded import ROUNDED, Rounded
from decentlam.exchange.shared_buffers import map_buffers, on_one_machine
from decentlam.exchange.shared_memory import SharedMemory
from decentlam.launch.group import init_if_launched
from decentlam.membership import watch
from decentlam.options import Options, Overlap, usual_bucket_bytes
from decentlam.runtime.agreement import check_agreement, facts_of
from decentlam.runtime.bucket import build_buckets
from decentlam.runtime.elastic import check_same_run, membership
from decentlam.runtime.forward import PIECE_BYTES, Forward, PriorityWire
from decentlam.runtime.groups import ParamGroup, named_parameters, prepare
from decentlam.runtime.overlap import Mode, OverlapChoice
from decentlam.runtime.round import Round
from decentlam.runtime.runtime import Runtime
from decentlam.runtime.statistics import StepStatistics
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

TAGS_EACH = 1 << 14  # keep optimizers apart, and from the script's own messages (tag 0)
_ELASTIC = 1  # the number of the one optimizer that an elastic run has
_built = _ELASTIC  # the number of the last other one
_GLANCE_SECONDS = 0.5  # for a look at the links, where the topology does not depend on it

State = Mapping[Tensor, Mapping[str, Any]]


def next_tag() -> int:
    """The first tag of the messages of a copy, which asks nobody."""
    global _built
    _built += 1
    return _built * TAGS_EACH


def agreed_tag(network: Network, elastic: bool) -> int:
    """The first tag of the messages of a new optimizer, the same on all processes: one of them may
    have copied an optimizer alone, or failed to build one."""
    if elastic:  # newcomers were not there when the others agreed
        return _ELASTIC * TAGS_EACH
    global _built
    _built = max(network.gather(_built + 1))
    return _built * TAGS_EACH


def join(
    groups: Sequence[ParamGroup],
    method: Algorithm,
    options: Options,
    process_group: dist.ProcessGroup | None,
    buffers: Sequence[Tensor],
) -> Network:
    """The network of a new optimizer, after all processes have agreed on what they mean to run:
    where groups are formed and tensors are sent, a difference would be a hang."""
    device = check_parameters(groups)
    check_period(method)
    init_if_launched(device, options.elastic)
    prepare(groups, method)
    plain = connect(process_group, device=device)
    if options.elastic:
        check_elastic(plain, process_group)
    if Reach.NEIGHBORS in reaches(method):
        check_device(plain)
    watch.use_limit(options.heartbeat_seconds)
    facts = facts_of(method, options, groups)
    facts["buffers"] = [f"{tuple(buffer.shape)} {buffer.dtype}" for buffer in buffers]
    if options.elastic:
        check_same_run(membership(), facts)
        if membership().joins:  # the others agreed long ago
            return plain
    check_agreement(plain, facts)
    # The exact average of all processes is that of all nodes: PmSGD needs no hierarchy.
    per_node = 1 if always_everyone(method) else options.processes_per_node
    if method.layerwise and per_node > 1:
        raise ValueError(
            f"{method!r} works on whole layers, but with processes_per_node={per_node} a process "
            "has only parts of them; use processes_per_node=1"
        )
    reached = reaches(method)
    exact, batches = Reach.EVERYONE in reached, Reach.NEIGHBORS in reached
    return connect(process_group, per_node, exact, device, batches)


def check_elastic(network: Network, process_group: dist.ProcessGroup | None) -> None:
    if process_group is not None:
        raise ValueError("elastic=True is for all processes; leave process_group out")
    if network.is_nccl or network.device.type == "cuda":
        raise ValueError(
            "elastic=True needs the gloo backend and parameters on the CPU, but they are on "
            f"{network.device}; use model.cpu(), or leave elastic out"
        )
    if membership().has_optimizer:
        raise ValueError(
            "this process has an optimizer with elastic=True already, and a run has one: a second "
            "would stay in the process group of members that are gone. Give all parameters to one "
            "optimizer, as param groups, or delete the first"
        )


def check_device(network: Network) -> None:
    """gloo takes an address on a GPU for one of its own memory, and fails in the first step."""
    if network.num_processes > 1 and network.device.type == "cuda" and network.backend == "gloo":
        raise ValueError(
            f"the parameters are on {network.device}, but the process group has gloo, which sends "
            "messages from CPUs only. Form the group with decentlam.init() or init('nccl'), with a "
            "GPU for each process; or train on CPUs, with model.cpu()"
        )


def check_parameters(groups: Sequence[ParamGroup]) -> torch.device:
    """Where the parameters are; refuses those that cannot be averaged."""
    params = list(named_parameters(groups))
    if not params:
        raise ValueError("there is no parameter to train; pass model.parameters()")
    for name, p in params:
        if p.is_complex():
            raise ValueError(
                f"{name} is complex ({p.dtype}), which the methods are not made for; "
                "keep its real and imaginary parts as two parameters (torch.view_as_real)"
            )
    return params[0][1].device


def build(
    groups: list[ParamGroup],
    state: State,
    method: Algorithm,
    options: Options,
    network: Network,
    tag: int,
    *,
    shares: bool,
    link: Link | None,
    statistics: StepStatistics,
    notify: Callable[[], None] | None = None,
) -> Runtime:
    """The runtime of these param groups on a network; what `state` holds already is kept.

    `shares`: all processes call this together, and can read each other's memory. `link` is that
    between the nodes, the same on all of them, if it was measured.
    """
    if options.topology == "auto":
        options = _chosen(groups, method, options, network, shares, link)
    topology = options.topology
    bucket_bytes = options.bucket_bytes or default_bucket_bytes(groups, network, shares)
    if network.processes_per_node > 1:  # state belongs to buckets
        options = dataclasses.replace(options, bucket_bytes=bucket_bytes)
    strongest = method.with_hyper({"momentum": max(g.get("momentum", 0.0) for g in groups)})
    algorithm, topology = stable_form(strongest, resolve(topology, network.num_nodes), options)
    whole = options.message_dtype if options.shortened is None else None
    others = trained_dtypes(groups) - {whole}
    if whole is not None and others:
        raise ValueError(
            f"message_dtype={whole} is for whole messages of such parameters, but there are some "
            f"of {', '.join(map(str, others))}; leave message_dtype out"
        )
    if options.shortened is not None:
        _check_message_dtype(method, options.shortened, network, topology)
    if options.patience_seconds is not None and network.num_nodes > 1:
        check_patience(algorithm, network, topology)
    if network.num_nodes == 1:
        algorithm = method.alone()
    timeout = timedelta(seconds=options.wait_seconds)
    parts = network.processes_per_node
    buckets = build_buckets(groups, bucket_bytes, parts, gather=algorithm.layerwise)
    rounds = []
    for number, bucket in enumerate(buckets):
        its_algorithm = algorithm.with_hyper(groups[bucket.group])
        round = Round(number, bucket, its_algorithm, network, timeout)
        round.shard.load_state({p: dict(state.get(p, {})) for p in bucket.params})
        rounds.append(round)
    overlap = usual_overlap(algorithm, options, network)
    exchanges, buffers = _exchanges(
        algorithm, network, topology, rounds, options, tag, shares, link, overlap
    )
    return Runtime(
        groups,
        algorithm,
        network,
        topology,
        exchanges,
        buffers,
        rounds,
        options,
        OverlapChoice(overlap, least="none" if algorithm.needs_gradient else "early"),
        statistics,
        Forward() if overlap == "forward" else None,
        notify if network.group is not None else None,
    )


def stable_form(
    method: Algorithm, topology: Topology, options: Options
) -> tuple[Algorithm, Topology]:
    """What will run: the method, or a form of it that is stable on these weights."""
    check_compatible(method, topology)
    patient = options.patience_seconds is not None and topology.num_nodes > 1
    asked = method
    if patient and options.stable == "auto" and not method.stands_changing_weights:
        asked = method.steady()[0]
    algorithm, topology, note = choose(asked, topology, options.stable)
    if asked is not method:
        note = note or f"{type(method).__name__} runs as {asked!r}, for edges that come and go"
    if note is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning("%s", note)
    return algorithm, topology


def can_share(
    groups: Sequence[ParamGroup], method: Algorithm, options: Options, network: Network
) -> bool:
    """Whether neighbors can read each other's messages in memory; asked of all together.

    Messages that leave before their gradient may be recalled, and are sent.
    """
    alike = (
        options.shared_memory
        and options.shortened is None
        and options.patience_seconds is None
        and network.num_nodes > 1
        and not network.is_nccl
        and not always_everyone(method)
        and method.needs_gradient
    )
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    return alike and on_one_machine(network, on_cpu)


def measured_link(
    method: Algorithm, options: Options, network: Network, shares: bool
) -> Link | None:
    """The link between the nodes, measured by all processes together, which then let their
    connections take as much as fits it. None where messages do not pass one, where NCCL sends them,
    where latency hides how fast it is, and in an elastic run, which must not pause whenever its
    members change.
    """
    sent = Reach.NEIGHBORS in reaches(method) and network.num_nodes > 1 and not shares
    if not sent or network.is_nccl or options.elastic or on_one_machine(network, able=True):
        return None
    connections = between_processes(network)
    restore(connections)  # an optimizer before this one may have set them
    seconds = 1.0 if options.topology == "auto" else _GLANCE_SECONDS
    link = measure_links(network, seconds, options.timeout_seconds)
    if options.overlap == "forward":
        limit_unsent(connections)
    if not link.certain:  # a limit that is too low would cost more than one that is too high
        return None
    limit_ahead(connections, fitting_ahead_bytes(link, network.processes_per_node))
    return link


def default_bucket_bytes(groups: Sequence[ParamGroup], network: Network, shares: bool) -> int:
    """In nodes of several processes the saved state follows the buckets, wherever it is loaded."""
    free = network.processes_per_node == 1
    return usual_bucket_bytes(_trained_bytes(groups), shares and free, network.is_nccl and free)


def usual_overlap(algorithm: Algorithm, options: Options, network: Network) -> Overlap | Mode:
    """The user's overlap, as far as it can be had here."""
    overlap = options.overlap
    assert isinstance(overlap, str)
    if network.num_nodes == 1 or options.whole_gradient:
        return "none"
    together = network.is_nccl or network.processes_per_node > 1  # all must have the same
    if overlap == "auto" and together and not algorithm.needs_gradient:
        return "early"
    if overlap == "auto" and together:
        return "backward" if network.is_nccl else "none"
    # Not forward if the message needs no gradient: the next one leaves at once, with the new x. Nor
    # in a node of several processes: they gather together, but look at parameters one by one.
    if overlap == "forward" and (not algorithm.needs_gradient or network.processes_per_node > 1):
        return "backward"
    return overlap


@torch.no_grad()
def start_equal(runtime: Runtime, groups: Sequence[ParamGroup], first_group: int = 0) -> None:
    """Gives all processes the parameters of process 0, from this group on."""
    group = runtime.network.group
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    flat = [bucket.x for bucket in runtime.buckets if bucket.group >= first_group]
    frozen = [p.data for g in groups[first_group:] for p in g["params"] if not p.requires_grad]
    dense = [p.contiguous() for p in frozen]  # gloo sends memory as it lies, gaps included
    with runtime.network.errors():
        works = [dist.broadcast(x, source, group=group, async_op=True) for x in [*flat, *dense]]
        for work in works:
            assert work is not None
            work.wait()
    for p, values in zip(frozen, dense, strict=True):
        if values is not p:
            p.copy_(values)
    for round in runtime.rounds:
        if round.bucket.group >= first_group:
            round.shard.load_state({})  # a state that begins at x begins at this one


def _exchanges(
    algorithm: Algorithm,
    network: Network,
    topology: Topology,
    rounds: Sequence[Round],
    options: Options,
    tag: int,
    shares: bool,
    link: Link | None,
    overlap: Overlap | Mode,
) -> tuple[dict[Reach, Exchange], list[Tensor]]:
    """How each kind of step mixes, and the message buffers; together with all processes."""
    if network.num_nodes == 1:
        return dict.fromkeys(Reach, NoExchange()), []
    timeout = timedelta(seconds=options.wait_seconds)
    reached = reaches(algorithm)
    exchanges: dict[Reach, Exchange] = {Reach.NOBODY: NoExchange()}
    if shares and Reach.NEIGHBORS in reached and rounds:
        rows = most_payloads(algorithm, Reach.NEIGHBORS)
        likes = [round.shard.x.new_empty((rows, len(round.shard.x))) for round in rounds]
        shared = map_buffers(network, likes)
        if shared is not None:
            exchanges[Reach.NEIGHBORS] = SharedMemory(network, topology, shared, timeout)
        else:
            log.info("no memory to share; messages are sent through the process group")
    missing = reached - set(exchanges)
    rows = max((most_payloads(algorithm, reach) for reach in missing), default=0)
    buffers = [round.shard.x.new_empty((rows, len(round.shard.x))) for round in rounds if rows]
    if Reach.EVERYONE in missing:
        exchanges[Reach.EVERYONE] = AllReduce(network, buffers, timeout)
    if Reach.NEIGHBORS in missing and options.patience_seconds is not None:
        exchanges[Reach.NEIGHBORS] = Patience(
            network, topology, buffers, timeout, tag, options.patience_seconds
        )
    elif Reach.NEIGHBORS in missing:
        wire = _wire(network, tag, timeout, overlap, link)
        neighbors = Neighbors(network, topology, buffers, timeout, wire)
        exchanges[Reach.NEIGHBORS] = _encoded(neighbors, options.shortened)
    return exchanges, buffers


def _encoded(neighbors: Neighbors, dtype: torch.dtype | None) -> Exchange:
    if dtype is None:
        return neighbors
    if dtype in ROUNDED:
        return Rounded(neighbors, dtype)
    return Differences(neighbors, CODECS[dtype])


def _wire(
    network: Network, tag: int, timeout: timedelta, overlap: Overlap | Mode, link: Link | None
) -> Wire:
    if network.is_nccl:
        return NcclWire(network)
    if overlap != "forward":
        return GlooWire(network, tag)
    return PriorityWire(
        network, tag, timeout, PIECE_BYTES if link is None else fitting_piece_bytes(link)
    )


def _chosen(
    groups: Sequence[ParamGroup],
    method: Algorithm,
    options: Options,
    network: Network,
    shares: bool,
    link: Link | None,
) -> Options:
    """With the topology, and the size and type of messages where nothing was said of them, that
    fit the links as they are measured; on every process together."""
    if network.num_nodes == 1 or always_everyone(method):
        return dataclasses.replace(options, topology="ring")  # nobody mixes on it
    seconds = options.timeout_seconds
    if shares:
        link = measure_memory(network, seconds)
    else:
        link = link or measure_links(network, timeout_seconds=seconds)
        options = with_fitting_messages(groups, method, options, network, link)
    assert isinstance(options.overlap, str)
    name, reason = automatic(
        network,
        method,
        _trained_bytes(groups, options.shortened),
        overlap=options.overlap,
        bucket_bytes=options.bucket_bytes or default_bucket_bytes(groups, network, shares),
        stable=options.stable,
        shared_memory=shares,
        symmetric=options.shortened is not None,
        link=link,
    )
    if network.rank == 0:
        log.info("topology='auto': %s", reason)
    return dataclasses.replace(options, topology=name)


def with_fitting_messages(
    groups: Sequence[ParamGroup],
    method: Algorithm,
    options: Options,
    network: Network,
    link: Link,
) -> Options:
    """16 bits where they pay, for models in float32; a second payload is like a gradient, whose
    small numbers float16 does not have. Sizes only where each process has its node: else the saved
    state would follow what was measured."""
    free = options.message_dtype is None and options.patience_seconds is None
    fits = trained_dtypes(groups) == {torch.float32}
    fits = fits and most_payloads(method, Reach.NEIGHBORS) == 1
    if free and fits and rounding_pays(link, measure_rounding(network)):
        options = dataclasses.replace(options, message_dtype=torch.float16)
        if network.rank == 0:
            log.warning(
                "topology='auto': messages of 16 bits, since the links are slow (%.3g Gbit/s); "
                "message_dtype=torch.float32 keeps them whole",
                8e-9 * link.bytes_per_second,
            )
    if options.bucket_bytes is None and network.processes_per_node == 1:
        size = fitting_bucket_bytes(link, _trained_bytes(groups))
        options = dataclasses.replace(options, bucket_bytes=size)
    return options


def trained_dtypes(groups: Sequence[ParamGroup]) -> set[torch.dtype]:
    return {p.dtype for group in groups for p in group["params"] if p.requires_grad}


def _check_message_dtype(
    method: Algorithm, dtype: torch.dtype, network: Network, topology: Topology
) -> None:
    if always_everyone(method):
        raise ValueError(
            f"message_dtype is for messages to neighbors; {method!r} averages over everyone, "
            "exactly"
        )
    if not topology.symmetric:
        raise ValueError(
            f"message_dtype needs weights that are the same in both directions, {topology!r} has "
            "not; try base-2 or ring"
        )
    if network.num_nodes > 1 and dtype in CODECS:
        check_differences(network, topology)


def _trained_bytes(groups: Sequence[ParamGroup], dtype: torch.dtype | None = None) -> int:
    """Of the parameters that are trained, or of a message of them with this type."""
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    return sum(p.numel() * (dtype or p.dtype).itemsize for p in trained)
