"""From options to a runtime: agree with the others, connect, lay out buckets, pick exchanges."""

from __future__ import annotations

import dataclasses
import logging
import weakref
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
    most_payloads,
    reaches,
)
from decentlam.analysis.stability import choose
from decentlam.exchange.allreduce import AllReduce
from decentlam.exchange.base import Exchange, NoExchange
from decentlam.exchange.neighbors import Neighbors
from decentlam.exchange.rounded import Rounded
from decentlam.exchange.shared_memory import share_memory
from decentlam.network import heartbeat
from decentlam.network.network import Network, connect
from decentlam.options import Options, Overlap
from decentlam.runtime.agreement import check_agreement, check_order
from decentlam.runtime.bucket import Bucket, build_buckets
from decentlam.runtime.overlap import OverlapChoice
from decentlam.runtime.param_groups import ParamGroup, named_parameters
from decentlam.runtime.runtime import Runtime, StepStatistics
from decentlam.runtime.sharded import check_placements, local, shard_group
from decentlam.runtime.state import load_state
from decentlam.topology import Topology, resolve

log = logging.getLogger(__name__)

TAGS_EACH = 1 << 14  # keep optimizers apart, and from the script's own messages (tag 0)
FIRST_TAG = TAGS_EACH  # of the one optimizer that an elastic run has
_built = 1  # the number of the last optimizer

State = Mapping[Tensor, Mapping[str, Any]]


def next_tag() -> int:
    """Return the first tag of the messages of a copy, which asks nobody."""
    global _built
    _built += 1
    return _built * TAGS_EACH


def agreed_tag(network: Network) -> int:
    """Return the first tag of the messages of a new optimizer, the same on all processes: one of
    them may have copied an optimizer alone, or failed to build one."""
    global _built
    _built = max(network.gather(_built + 1))
    return _built * TAGS_EACH


def join(
    groups: Sequence[ParamGroup],
    method: Algorithm,
    options: Options,
    process_group: dist.ProcessGroup | None,
    described: Mapping[str, object],
) -> Network:
    """Return the network of a new optimizer, after all processes have agreed on the run that is
    `described`: where groups are formed and tensors are sent, a difference would be a hang."""
    device = check_parameters(groups)
    plain = connect(process_group, device=device)
    ranks = [] if plain.group is None else dist.get_process_group_ranks(plain.group)
    shards = shard_group(named_parameters(groups), ranks)
    if shards is not None and options.processes_per_node > 1:
        raise ValueError(
            "processes_per_node is for models that are not sharded; with DTensors leave it out, "
            "and pass the mesh of the nodes"
        )
    if Reach.NEIGHBORS in reaches(method):
        check_device(plain)
    heartbeat.use_limit(options.heartbeat_seconds)
    check_agreement(plain, described)
    check_order(plain, groups)
    if shards is not None:
        inside = connect(shards, device=device)
        check_agreement(inside, {k: v for k, v in described.items() if k != "shard"})
    # The exact average of all processes is that of all nodes: PmSGD needs no hierarchy.
    per_node = 1 if always_everyone(method) else options.processes_per_node
    if method.layerwise and per_node > 1:
        raise ValueError(
            f"{method!r} works on whole layers, but with processes_per_node={per_node} a process "
            "has only parts of them; use processes_per_node=1"
        )
    reached = reaches(method)
    exact, batches = Reach.EVERYONE in reached, Reach.NEIGHBORS in reached
    return connect(process_group, per_node, exact, device, batches, shards)


def check_device(network: Network) -> None:
    """Refuse gloo for parameters on a GPU: it takes an address there for one of its own memory."""
    if network.num_processes > 1 and network.device.type == "cuda" and network.backend == "gloo":
        raise ValueError(
            f"the parameters are on {network.device}, but the process group has gloo, which sends "
            "messages from CPUs only. Form the group with decentlam.init() or init('nccl'), with a "
            "GPU for each process; or train on CPUs, with model.cpu()"
        )


def check_parameters(groups: Sequence[ParamGroup]) -> torch.device:
    """Return where the parameters are; refuse those that cannot be averaged."""
    params = list(named_parameters(groups))
    if not params:
        raise ValueError("there is no parameter to train; pass model.parameters()")
    for name, p in params:
        check_placements(name, p)
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
    together: bool,
    statistics: StepStatistics,
    before_message: weakref.WeakMethod[Callable[[], None]] | None = None,
) -> Runtime:
    """Build the runtime of these param groups on a network; what `state` holds already is kept.

    `together`: all processes call this at once, so that they can agree to share memory.
    """
    bucket_bytes = options.bucket_bytes or usual_bucket_bytes(groups, method, network)
    if network.processes_per_node > 1:  # state belongs to buckets
        options = dataclasses.replace(options, bucket_bytes=bucket_bytes)
    forms = [method.with_hyper(group) for group in groups]
    strongest = max(forms, key=lambda form: getattr(form, "beta", 0.0))
    topology = resolve(options.topology, network.num_nodes)
    check_compatible(strongest, topology)
    algorithm, topology, note = choose(strongest, topology, options.stable)
    if note is not None:
        log.debug("%s", note)
    if options.message_dtype is not None:
        _check_rounding(method, topology)
    if network.num_nodes == 1:
        algorithm = method.alone()
    timeout = timedelta(seconds=options.wait_seconds)
    buckets = build_buckets(groups, bucket_bytes, algorithm, network, timeout)
    for bucket in buckets:
        load_state(bucket, {p: dict(state.get(p, {})) for p in bucket.wholes})
    exchanges = _exchanges(algorithm, network, topology, buckets, options, tag, together, timeout)
    return Runtime(
        groups,
        algorithm,
        network,
        topology,
        exchanges,
        buckets,
        options,
        OverlapChoice(_possible_overlap(algorithm, options, network)),
        statistics,
        before_message if network.group is not None else None,
    )


def usual_bucket_bytes(groups: Sequence[ParamGroup], method: Algorithm, network: Network) -> int:
    """Return a sixteenth of the model: the wire is busy early and the last messages are short.

    From 512 KiB, where calls begin to cost, to 4 MiB, which fills the wire for long enough, or 25
    MiB, as in DDP, with NCCL and for all-reduces. In nodes of several processes the saved state
    follows the buckets, so they do not depend on the backend.
    """
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    large = network.processes_per_node == 1 and (network.is_nccl or always_everyone(method))
    if large:
        return 25 << 20
    size = sum(p.nbytes for p in trained) // network.shards
    return min(max(size // 16, 1 << 19), 1 << 22)


def _possible_overlap(algorithm: Algorithm, options: Options, network: Network) -> Overlap:
    """Return the user's overlap, as far as it can be had here."""
    overlap = options.overlap
    assert isinstance(overlap, str)
    if network.num_nodes == 1 or (options.whole_gradient and algorithm.needs_gradient):
        return "none"
    if overlap == "auto" and not algorithm.needs_gradient:
        return "backward"
    if overlap == "auto" and network.shard_group is not None:
        return "none"
    if overlap == "auto" and (network.is_nccl or network.processes_per_node > 1):
        return "backward" if network.is_nccl else "none"  # all must have the same
    return overlap


@torch.no_grad()
def start_equal(runtime: Runtime, groups: Sequence[ParamGroup], first_group: int = 0) -> None:
    """Give all processes the parameters of process 0, from this group on."""
    group = runtime.network.group
    if group is None:
        return
    source = dist.get_global_rank(group, 0)
    buckets = [bucket for bucket in runtime.buckets if bucket.group >= first_group]
    flat = [bucket.x for bucket in buckets]
    frozen = [
        local(p.data) for g in groups[first_group:] for p in g["params"] if not p.requires_grad
    ]
    dense = [p.contiguous() for p in frozen]  # gloo sends memory as it lies, gaps included
    with runtime.network.errors():
        works = [dist.broadcast(x, source, group=group, async_op=True) for x in [*flat, *dense]]
        for work in works:
            assert work is not None
            work.wait()
    for p, values in zip(frozen, dense, strict=True):
        if values is not p:
            p.copy_(values)
    for bucket in buckets:
        for shard in bucket.shards:
            shard.store()
        load_state(bucket, {})  # a state that begins at x begins at this one
    runtime.reshard()


def _exchanges(
    algorithm: Algorithm,
    network: Network,
    topology: Topology,
    buckets: Sequence[Bucket],
    options: Options,
    tag: int,
    together: bool,
    timeout: timedelta,
) -> dict[Reach, Exchange]:
    """Return how each kind of step mixes."""
    if network.num_nodes == 1:
        return dict.fromkeys(Reach, NoExchange())
    reached = reaches(algorithm)
    exchanges: dict[Reach, Exchange] = {Reach.NOBODY: NoExchange()}
    # Messages that leave before their gradient may be recalled, and are sent.
    shares = options.shared_memory and options.message_dtype is None and algorithm.needs_gradient
    if together and shares and Reach.NEIGHBORS in reached and not network.is_nccl:
        likes = _buffers(buckets, most_payloads(algorithm, Reach.NEIGHBORS))
        shared = share_memory(network, topology, likes, timeout)
        if shared is not None:
            exchanges[Reach.NEIGHBORS] = shared
    missing = reached - set(exchanges)
    payloads = max((most_payloads(algorithm, reach) for reach in missing), default=0)
    buffers = _buffers(buckets, payloads)
    if Reach.EVERYONE in missing:
        exchanges[Reach.EVERYONE] = AllReduce(network, buffers, timeout)
    if Reach.NEIGHBORS in missing:
        neighbors = Neighbors(network, topology, buffers, timeout, tag)
        short = options.message_dtype
        exchanges[Reach.NEIGHBORS] = neighbors
        if short is not None:
            wide = algorithm.averaged_state is not None  # follows the one payload
            whole = [
                len(b.shard_x) if wide else len(z) for b, z in zip(buckets, buffers, strict=True)
            ]
            exchanges[Reach.NEIGHBORS] = Rounded(neighbors, short, whole)
    return exchanges


def _buffers(buckets: Sequence[Bucket], payloads: int) -> list[Tensor]:
    return [b.shard_x.new_empty(b.largest_message(payloads)) for b in buckets if payloads]


def _check_rounding(method: Algorithm, topology: Topology) -> None:
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
