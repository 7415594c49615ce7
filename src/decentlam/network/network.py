"""Which process is which node: the one place that knows ranks and groups, replaceable whole."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from decentlam.errors import ExchangeError
from decentlam.network import heartbeat, waiting

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_LENGTH, _SHORT = 8, 1016  # bytes
_HEAD = _LENGTH + _SHORT


@contextlib.contextmanager
def exchange_errors(where: str, peer: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Turn the backend's error, of a wait or of a post on a closed connection, into ours."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        raise exchange_error(where, peer, timeout, error) from error


def exchange_error(
    where: str, peer: str, timeout: timedelta | None, error: RuntimeError
) -> ExchangeError:
    """Return the error that names who failed, where, and the first cause as far as it is known."""
    cause = heartbeat.explain(peer, math.inf if timeout is None else timeout.total_seconds())
    if cause is None:
        limit = "the group's timeout" if timeout is None else f"{timeout.total_seconds():g} s"
        cause = (
            f"{(str(error).splitlines() or [repr(error)])[0]}\nEither that process died or "
            f"stopped (see its log), or it was slower than {limit}, or it was itself waiting "
            "for another. Every process must call averaged, save_checkpoint and the like: not "
            "behind `if rank == 0`. If long pauses are normal, raise timeout_seconds."
        )
    return ExchangeError(f"{where}: the exchange with {peer} failed: {cause}")


@dataclass(frozen=True, eq=False)
class Network:
    """The processes of a run, `processes_per_node` of them in each node."""

    group: dist.ProcessGroup | None  # None: one process, nothing to talk to
    rank: int
    num_processes: int
    processes_per_node: int = 1
    device: torch.device = CPU  # where messages live
    intra_node_group: dist.ProcessGroup | None = None  # the processes of this node
    inter_node_group: dist.ProcessGroup | None = None  # this local rank of every node, ours alone
    shard_group: dist.ProcessGroup | None = None  # who has the other shards of this node's model
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # for copies of an optimizer

    @property
    def num_nodes(self) -> int:
        return self.num_processes // self.processes_per_node

    @property
    def node(self) -> int:
        return self.rank // self.processes_per_node

    @property
    def local_rank(self) -> int:
        """This process's number inside its node."""
        return self.rank % self.processes_per_node

    @property
    def node_group(self) -> dist.ProcessGroup | None:
        """The processes of this node, if they are several."""
        return self.intra_node_group or self.shard_group

    @property
    def shards(self) -> int:
        """The number of shards that a node's model is cut into."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def exact_group(self) -> dist.ProcessGroup | None:
        """The group of exact averages over nodes, and of NCCL's messages."""
        return self.inter_node_group or self.group

    @cached_property
    def everyone(self) -> Network:
        """All processes of a run whose nodes have shards, node by node; else this network."""
        if self.shard_group is None:
            return self
        shards, number = self.shards, dist.get_rank(self.shard_group)
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (self.node * shards + number, self.num_nodes * shards):
            raise ValueError(
                f"process {rank} of {size} has shard {number} of node {self.node}, but the "
                f"{self.num_nodes} nodes of {shards} shards should be all processes in this order: "
                'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
            )
        return Network(dist.group.WORLD, rank, size, shards, self.device)

    @cached_property
    def backend(self) -> str:
        """The backend that sends messages. A group may have one per kind of device."""
        return "" if self.group is None else _backend(self.group, self.device)

    @cached_property
    def is_nccl(self) -> bool:
        """True if messages are sent by NCCL."""
        return "nccl" in self.backend

    @property
    def control_device(self) -> torch.device:
        """The device on which small tensors that are not messages must live."""
        if self.group is not None and not _backend(self.group, CPU):
            return self.device
        return CPU

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has, in rank order; all of them call it together.

        It travels as JSON, so tuples arrive as lists. torch's all_gather_object would unpickle,
        that is, run, whatever another process sends.
        """
        if self.group is None:
            return [value]
        text = json.dumps(value).encode()
        # What is short, as nearly everything is, goes along with its length.
        heads = self._gathered(len(text).to_bytes(_LENGTH, "little") + text[:_SHORT], _HEAD)
        lengths = [int.from_bytes(head[:_LENGTH], "little") for head in heads]
        longest = max(lengths) - _SHORT
        tails = self._gathered(text[_SHORT:], longest) if longest > 0 else [b""] * len(heads)
        return [
            json.loads((head[_LENGTH:] + tail)[:length])
            for head, tail, length in zip(heads, tails, lengths, strict=True)
        ]

    def _gathered(self, mine: bytes, size: int) -> list[bytes]:
        """Return the bytes of every process, filled up to that many."""
        filled = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        filled = filled.to(self.control_device)
        everyone = [torch.empty_like(filled) for _ in range(self.num_processes)]
        with self.errors():
            dist.all_gather(everyone, filled, group=self.group)
        return [row.cpu().numpy().tobytes() for row in everyone]

    def meet(self, what: str, rates: Sequence[float] = ()) -> None:
        """Refuse, before all processes do something together, if one does something else. Sums of
        what does not belong together would be numbers, and wrong. Learning rates that differ,
        because a script has changed them on some processes only, are logged."""
        try:
            with heartbeat.meeting(), waiting.for_everyone(what):
                everyone = self.gather({"call": what, "rates": [*rates]})
        except ExchangeError as error:
            raise ExchangeError(
                f"{error} This process was to {what}, for which every process must make the same "
                "call: not behind `if rank == 0`."
            ) from error
        said = [each.get("call") if isinstance(each, dict) else None for each in everyone]
        if all(call == what for call in said):
            self._compare([each["rates"] for each in everyone])
            return
        calls: dict[str, list[int]] = {}
        for rank, call in enumerate(said):
            calls.setdefault(call or "call something else", []).append(rank)
        listed = "; ".join(f"{ranks} {call}" for call, ranks in calls.items())
        raise RuntimeError(
            f"all processes must make this call together, but they do different things: processes "
            f"{listed}. Make the same calls on every process, not behind `if rank == 0`."
        )

    def _compare(self, rates: list[list[float]]) -> None:
        others = [rank for rank, its in enumerate(rates) if its != rates[0]]
        if others and self.rank == 0 and self not in _told:
            _told.add(self)
            log.warning(
                "the learning rate is not the same on all processes: %s on process %d, %s on "
                "process 0. Change it on all of them alike: give a scheduler such as "
                "ReduceLROnPlateau the mean over all nodes, and all the same number of steps.",
                rates[others[0]],
                others[0],
                rates[0],
            )

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Around a collective outside of a step: whoever is gone is named."""
        return exchange_errors(f"node {self.node}, between steps", "everyone")

    def rank_of(self, node: int) -> int:
        """The rank, inside the group, of the process of `node` with this local rank."""
        return node * self.processes_per_node + self.local_rank

    def global_rank_of(self, node: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, self.rank_of(node))

    def where(self, step: int, bucket: int) -> str:
        """Return the node, step and bucket, as text for errors."""
        return f"node {self.node}, step {step}, bucket {bucket}"


ALONE = Network(group=None, rank=0, num_processes=1)
_told: weakref.WeakSet[Network] = weakref.WeakSet()  # that their rates differ
_connected: weakref.WeakValueDictionary[str, Network] = weakref.WeakValueDictionary()


def connect(
    group: dist.ProcessGroup | None = None,
    processes_per_node: int = 1,
    exact: bool = False,
    device: torch.device | None = None,
    batches: bool = False,
    shard_group: dist.ProcessGroup | None = None,
) -> Network:
    """The network of the given (default: the whole) process group, or one node if there is none.

    `exact` prepares a group of its own for exact averages, and `batches` for messages to neighbors
    if NCCL sends them. In the given group they could meet a collective of the script: one node may
    start a bucket in backward, another in step(). All processes call this together if a group must
    be formed. `device` is where messages live.

    A group of some processes is used for batches as it is: torch numbers groups, and those that
    only some processes form would put the numbers of all later ones out of step.
    """
    if isinstance(processes_per_node, bool) or not isinstance(processes_per_node, int):
        raise TypeError(f"processes_per_node must be a whole number, got {processes_per_node!r}")
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise ValueError("this process is not part of the given process group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got {group!r}")
    if not (dist.is_available() and dist.is_initialized()):
        if processes_per_node != 1:
            raise ValueError(
                f"processes_per_node={processes_per_node} needs a process group; launch with "
                "torchrun and call decentlam.init() first"
            )
        return ALONE
    group = group or dist.group.WORLD
    assert group is not None
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not part of the given process group")
    if processes_per_node < 1 or size % processes_per_node:
        fitting = [k for k in range(1, size + 1) if size % k == 0]
        raise ValueError(
            f"{size} processes cannot be split into nodes of {processes_per_node}; "
            f"processes_per_node can be one of {fitting}"
        )
    if device is None:
        device = CPU if _backend(group, CPU) else torch.device("cuda", torch.cuda.current_device())
    plain = Network(group, rank, size, device=device, shard_group=shard_group)
    batches = batches and plain.is_nccl and size > 1
    own = (exact and size > 1) or (batches and size == dist.get_world_size())
    if processes_per_node == 1 and not own:
        return _warmed(plain, batches)
    ranks = [dist.get_global_rank(group, i) for i in range(size)]
    node, local_rank = divmod(rank, processes_per_node)
    inside = ranks[node * processes_per_node : (node + 1) * processes_per_node]
    inter_node = _new_group(ranks[local_rank::processes_per_node], plain)
    intra_node = _new_group(inside, plain) if processes_per_node > 1 else None
    network = Network(
        group, rank, size, processes_per_node, device, intra_node, inter_node, shard_group
    )
    return _warmed(network, batches)


def _warmed(network: Network, batches: bool) -> Network:
    """NCCL's first operation in a group needs all of its members, and a batch has only some."""
    if batches:
        with network.errors():
            dist.all_reduce(torch.zeros(1, device=network.device), group=network.exact_group)
    return _remembered(network)


def _remembered(network: Network) -> Network:
    watching = heartbeat.of_default_group()
    if watching is not None:
        whole = network.group is dist.group.WORLD or network.group is None
        concerned = None if whole else dist.get_process_group_ranks(network.group)
        if concerned is not None and network.shard_group is not None:
            concerned = [*concerned, *dist.get_process_group_ranks(network.shard_group)]
        watching.concern(concerned)
        watching.guard(network.group, network.inter_node_group, network.node_group)
        watching.waits_for_nccl |= network.is_nccl
    _connected[network.token] = network
    return network


def saved(network: Network) -> tuple[str, list[int], int]:
    """Return what a copied or pickled optimizer remembers of its network; see `reconnect`."""
    ranks = []
    if network.group is not None:
        ranks = [dist.get_global_rank(network.group, i) for i in range(network.num_processes)]
    return network.token, ranks, network.processes_per_node


def reconnect(remembered: tuple[str, list[int], int], device: torch.device, exact: bool) -> Network:
    """The network of a copied or loaded optimizer, from what this process knows already: it may be
    the only one that makes a copy, and must not wait for others. `exact` averages, and NCCL, need a
    group of their own, which cannot be formed so."""
    token, ranks, processes_per_node = remembered
    if token in _connected:
        return _connected[token]
    world = list(range(dist.get_world_size())) if dist.is_initialized() else []
    if not ranks or not world:
        return ALONE
    plain = connect(device=device)
    own = (exact or plain.is_nccl) and len(world) > 1
    if processes_per_node > 1 or ranks != world or own:
        raise RuntimeError(
            f"this optimizer was saved on processes {ranks}, {processes_per_node} per node; their "
            "process groups cannot be saved with it. Build it anew and use load_state_dict, or "
            "save_checkpoint and load_checkpoint."
        )
    return plain


def can_form_lazily() -> bool:
    """Return True if this torch can form a group of NCCL without splitting the first one."""
    return dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL.Options(), "lazy_init")


def _new_group(ranks: list[int], like: Network) -> dist.ProcessGroup:
    """Form a group of these processes, which alone take part in that."""
    assert like.group is not None
    backend, options, timeout = dist.get_backend_config(like.group), None, None
    if like.is_nccl:  # no other limit holds there
        given = getattr(like.group._get_backend(like.device), "options", None)
        timeout = getattr(given, "_timeout", None)
    if "nccl" in backend and can_form_lazily():
        options = dist.ProcessGroupNCCL.Options()
        options.lazy_init = True  # a group split from the first one would need all processes
    with exchange_errors(f"process {dist.get_rank()}, at construction", "everyone"):
        group = dist.new_group(
            ranks, timeout, backend, pg_options=options, use_local_synchronization=True
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that serves a device: "gloo", "nccl", or "" if none does."""
    kinds = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if part)
    return kinds.get(device.type, "")
