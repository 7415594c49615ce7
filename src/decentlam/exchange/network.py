"""Which process is which node: the one place that knows ranks and groups, replaceable whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Network:
    """The processes of a run, `processes_per_node` of them in each node."""

    group: dist.ProcessGroup | None  # None: one process, nothing to talk to
    rank: int
    num_processes: int
    processes_per_node: int = 1
    node_group: dist.ProcessGroup | None = None  # the processes of this node
    lane_group: dist.ProcessGroup | None = None  # this place of every node, for exact averages

    @property
    def num_nodes(self) -> int:
        return self.num_processes // self.processes_per_node

    @property
    def node(self) -> int:
        return self.rank // self.processes_per_node

    @property
    def lane(self) -> int:
        """This process's place inside its node."""
        return self.rank % self.processes_per_node

    @property
    def batched(self) -> bool:
        """Whether sends and receives must be posted as one batch (NCCL)."""
        return self.group is not None and "nccl" in dist.get_backend(self.group)

    def gather(self, value: Any) -> list[Any]:
        """What every process has, in rank order; asked of all of them together."""
        everyone: list[Any] = [value] * self.num_processes
        if self.group is not None:
            dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def place(self, node: int) -> int:
        """The rank, inside the group, of the process in this lane of `node`."""
        return node * self.processes_per_node + self.lane

    def peer(self, node: int) -> int:
        """The global rank of the process in this lane of `node`."""
        assert self.group is not None
        return dist.get_global_rank(self.group, self.place(node))


ALONE = Network(group=None, rank=0, num_processes=1)


def connect(
    group: dist.ProcessGroup | None = None, processes_per_node: int = 1, exact: bool = False
) -> Network:
    """The network of the given (default: the whole) process group, or one node if there is none.

    `exact` prepares a group of its own for exact averages. In the given group they could meet a
    collective of the script: one node may start a bucket in backward, another in step().
    """
    if isinstance(processes_per_node, bool) or not isinstance(processes_per_node, int):
        raise TypeError(f"processes_per_node must be a whole number, got {processes_per_node!r}")
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
    if processes_per_node == 1 and not (exact and size > 1):
        return Network(group, rank, size)
    ranks = [dist.get_global_rank(group, i) for i in range(size)]
    node, lane = divmod(rank, processes_per_node)
    inside = ranks[node * processes_per_node : (node + 1) * processes_per_node]
    across = ranks[lane::processes_per_node]
    lane_group = _new_group(across)
    node_group = _new_group(inside) if processes_per_node > 1 else None
    return Network(group, rank, size, processes_per_node, node_group, lane_group)


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def communication_device(network: Network, fallback: torch.device) -> torch.device:
    """Where small control tensors must live for the group's backend."""
    return fallback if network.batched else torch.device("cpu")
