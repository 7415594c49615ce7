"""Nodes whose model is sharded: the part of a DTensor parameter that this process trains.

FSDP2 keeps references to the memory of its shards, so they stay where they are. The optimizer
trains a copy in its own flat memory: `fetch` before a step, `store` after it.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import shown


def is_sharded(p: object) -> bool:
    """Return True for a DTensor; without importing what a run without shards does not need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(p, module.DTensor)


def local(p: Any) -> Tensor:
    """Return the memory of a parameter or state in this process: of a DTensor, its shard."""
    found: Tensor = p.detach().to_local() if is_sharded(p) else p
    return found


def like(p: Any, part: Tensor) -> Tensor:
    """Return `part`, in the shape of this process's shard of p, as a DTensor with p's placements;
    as it is if p is no DTensor."""
    if not is_sharded(p):
        return part
    kind, how = sys.modules["torch.distributed.tensor"].DTensor, (p.device_mesh, p.placements)
    # Of a part in the midst of other memory torch would make a DTensor that cannot be copied.
    whole = kind.from_local(
        torch.empty_like(part), *how, run_check=False, shape=p.shape, stride=p.stride()
    )
    whole._local_tensor = part
    return cast(Tensor, whole)


def extent(p: Any, span: slice) -> slice:
    """Return where all of p would lie in flat memory of which its shard has this span."""
    if not is_sharded(p) or p.placements[0].dim != 0:
        return span
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, (row, *_) = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    start = span.start - row * (p.numel() // p.shape[0])
    return slice(start, start + p.numel())


class Shard:
    """The shard of one DTensor parameter, and the plain tensor that is trained in its place."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.part = local(whole).clone().requires_grad_(whole.requires_grad)
        self._version = whole._version
        self._gradient: tuple[int, int] | None = None  # the one that `part` has

    @torch.no_grad()
    def fetch(self) -> None:
        """Take value and gradient as the script and FSDP have left them."""
        whole, part, grad = self.whole, self.part, self.whole.grad
        values = local(whole)
        on_cpu = part.device.type == "cpu"  # a look at the values costs little there
        if self._version != whole._version or (on_cpu and not torch.equal(part, values)):
            part.copy_(values)
            self._version = whole._version
        part.requires_grad_(whole.requires_grad)
        gradient = None if grad is None else (id(grad), grad._version)
        if gradient != self._gradient or part.grad is None:
            part.grad, self._gradient = None if grad is None else local(grad), gradient

    @torch.no_grad()
    def store(self) -> None:
        """Give the value back, and let go of the gradient."""
        local(self.whole).copy_(self.part)
        self.part.grad = self._gradient = None


def shard_group(
    named: Iterable[tuple[str, Tensor]], network_ranks: Sequence[int]
) -> dist.ProcessGroup | None:
    """Return the processes that have the other shards of this node, None if nothing is sharded.

    `network_ranks` are the processes of the group that averages. Refuse what would be averaged
    twice, or by nobody.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    sharded: list[tuple[str, Any]] = [(name, p) for name, p in trained if is_sharded(p)]
    if not sharded:
        return None
    if plain := [name for name, p in trained if not is_sharded(p)]:
        raise ValueError(
            f"{plain[0]} is no DTensor, but {sharded[0][0]} is: the processes of a node have "
            "gradients of their own for it, which nobody averages. Let fully_shard have it, too, "
            "or freeze it"
        )
    first, mesh = sharded[0][0], sharded[0][1].device_mesh
    if others := [name for name, p in sharded if p.device_mesh != mesh]:
        raise ValueError(
            f"{others[0]} is sharded over another mesh than {first}, as with expert parallelism, "
            "which is not supported; shard all parameters over one mesh"
        )
    ranks = mesh.mesh.flatten().tolist()
    if len(shared := sorted(set(ranks) & set(network_ranks))) > 1:
        raise ValueError(
            f"the processes {shared} are to average, but they have different shards of one model. "
            'Pass the mesh of those that have the same shard: mesh=mesh["replicate"]'
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def check_placements(name: str, p: Any) -> None:
    """Refuse a DTensor that is not cut by `fully_shard` over one dimension."""
    if not is_sharded(p):
        return
    kinds = ", ".join(map(str, p.placements))
    if p.device_mesh.ndim > 1 and p.placements[0].is_replicate():
        raise ValueError(
            f"{name} is placed ({kinds}): fully_shard with a mesh of two dimensions (HSDP) "
            "averages gradients over the first of them, and so would this optimizer. Pass "
            'fully_shard(model, mesh=mesh["shard"]), and mesh=mesh["replicate"] here'
        )
    if p.device_mesh.ndim > 1 or not p.placements[0].is_shard():
        raise ValueError(
            f"{name} is placed ({kinds}) on a mesh of {p.device_mesh.ndim} dimension(s): tensor "
            "parallelism is not supported. Use fully_shard over a mesh of one dimension alone"
        )


def group_of(mesh: Any, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the processes that average: those of a one-dimensional mesh, or of the group."""
    if mesh is None:
        return process_group
    if process_group is not None:
        raise ValueError("mesh and process_group mean the same; pass one of them")
    ndim = getattr(mesh, "ndim", None)
    if not hasattr(mesh, "get_group") or not isinstance(ndim, int):
        raise TypeError(
            'mesh must be a DeviceMesh of one dimension, such as mesh["replicate"], got '
            f"{shown(mesh)}"
        )
    if ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, that of the nodes, but this one has {ndim}: "
            f'{mesh.mesh_dim_names}. Take a part of it, such as mesh["replicate"]'
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def described(p: Any) -> str:
    """Return how a parameter is sharded, for agreement between nodes; nothing if it is not."""
    if not is_sharded(p):
        return ""
    mesh = p.device_mesh
    kinds = ", ".join(map(str, p.placements))
    return f" ({kinds} over {mesh.size()} processes)"


def number_of_shard(params: Iterable[Any]) -> int:
    """Return which shard of a node's model this process has, 0 if it has all of it."""
    return next((p.device_mesh.get_local_rank() for p in params if is_sharded(p)), 0)


def find_modules(params: Iterable[Tensor]) -> list[weakref.ref[Any]]:
    """Return the modules of FSDP that have these parameters. Nothing else leads from one to the
    other, and whoever changes the values of shards must tell FSDP, which may have gathered them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    ours = {id(p) for p in params}
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    return [
        weakref.ref(thing)
        for thing in gc.get_objects()  # once, when an optimizer is built
        if issubclass(type(thing), fsdp.FSDPModule) and ours & set(map(id, thing.parameters()))
    ]


def reshard(modules: Iterable[weakref.ref[Any]]) -> None:
    """Let FSDP forget what it has gathered: the next forward sees the shards as they are."""
    for reference in modules:
        module = reference()
        if module is not None:
            module.reshard()


def norm_over(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Return the norm of a layer of which every process of the node has a shard."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def cut(whole: Tensor, p: Any) -> Tensor:
    """Return this process's shard of a whole tensor that is to be placed like p."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole.contiguous()


def cuts_of(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimension along which each DTensor is cut, by name."""
    return {name: t.placements[0].dim for name, t in tensors.items() if is_sharded(t)}
