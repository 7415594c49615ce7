"""The state of a bucket by parameter, the form in which torch and checkpoints keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.runtime.bucket import Bucket, shaped_like
from decentlam.runtime.sharded import like, local

Saved = Mapping[Tensor, Mapping[str, Any]]


def state_views(bucket: Bucket) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter with views of its state, as torch.optim keeps it.

    In a node of several processes the state of a shard belongs to the bucket's first parameter.
    """
    if bucket.network.processes_per_node > 1:
        yield bucket.params[0], dict(bucket.state)
        yield from ((p, {}) for p in bucket.params[1:])
    else:
        yield from _by_parameter(bucket, bucket.state)


def whole_state(bucket: Bucket) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Return the node's state by parameter; all processes of the node call this together."""
    whole, group = bucket.state, bucket.network.intra_node_group
    if group is not None:
        whole = {name: torch.empty_like(bucket.x) for name in bucket.state}
        with bucket.network.errors():
            for name, part in bucket.state.items():
                dist.all_gather_into_tensor(whole[name], part, group=group)
    return _by_parameter(bucket, whole)


def load_whole_state(bucket: Bucket, saved: Saved) -> None:
    """Take over the state of a node, in whatever buckets and shards it was."""
    whole = bucket.init(bucket.x)
    for p, views in _by_parameter(bucket, whole):
        for name in views.keys() & saved.get(p, {}).keys():
            local(views[name]).copy_(local(saved[p][name]))
    for name, values in whole.items():
        bucket.state[name].copy_(values[bucket.shard])


def check_state(bucket: Bucket, saved: Saved) -> None:
    """Refuse state of other shapes."""
    for p, views in state_views(bucket):
        for name, view in views.items():
            value = saved.get(p, {}).get(name)
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(f"state {name!r} is no tensor but {type(value).__name__}")
            if value is not None and local(value).shape != local(view).shape:
                raise ValueError(
                    f"state {name!r} has shape {tuple(local(value).shape)}, here it is "
                    f"{tuple(local(view).shape)}. Is it of the same model? With processes_per_node "
                    "above 1, it and bucket_bytes must be the same, too; "
                    "decentlam.load_checkpoint needs neither."
                )


def load_state(bucket: Bucket, saved: Saved) -> None:
    """Take over what was saved; what was not starts as in a run that begins here."""
    check_state(bucket, saved)
    for name, fresh in bucket.init(bucket.shard_x).items():
        bucket.state[name].copy_(fresh)
    for p, views in state_views(bucket):
        for name, view in views.items():
            value = saved.get(p, {}).get(name)
            if value is not None:
                local(view).copy_(local(value))


def _by_parameter(
    bucket: Bucket, flat: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for whole, p, span in zip(bucket.wholes, bucket.params, bucket.spans, strict=True):
        yield whole, {name: like(whole, shaped_like(t[span], p)) for name, t in flat.items()}
