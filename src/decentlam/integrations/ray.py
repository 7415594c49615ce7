"""Ray Train: checkpoints that hold the node of every worker, kept and restored by Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from decentlam.checkpoint import Resumed, load_checkpoint, save_checkpoint
from decentlam.checkpoint.all_processes import on_process_0
from decentlam.integrations import NodeOptimizer, missing

try:
    import ray.train
    from pyarrow.fs import LocalFileSystem
    from ray.train import Checkpoint, CheckpointUploadMode
except ImportError as error:
    raise missing("ray", error) from error

MODEL = "model.pt"  # in the directory of a checkpoint: the averaged model
_NODES = "nodes"  # beside it: each node's own


def report(
    metrics: dict[str, Any],
    *,
    model: nn.Module,
    optimizer: NodeOptimizer,
    **others: Any,
) -> None:
    """ray.train.report with a checkpoint of the whole run; every worker must call it.

    The checkpoint is a directory with the averaged model, `model.pt`, and in `nodes` each worker's
    own model, momentum and random numbers. Workers write files of their own, straight into the
    run's directory, so nothing is written over and nothing is copied. How many checkpoints stay is
    Ray's CheckpointConfig.

    Args:
        metrics: As for ray.train.report: numbers, no tensors.
        model: The module that has all trained parameters.
        optimizer: Of decentlam.
        others: As for `decentlam.save_checkpoint`: a scheduler, a ResumableLoader, ...
    """
    storage, network = ray.train.get_context().get_storage(), optimizer.network
    name = network.gather(storage.make_default_checkpoint_dir_name())[0]  # has the time in it
    place = run_directory(storage) / name
    with optimizer.averaged(model):
        on_process_0(network, lambda: _save_model(place, model))
    save_checkpoint(place / _NODES, model=model, optimizer=optimizer, **others)
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(place),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is where it belongs
    )


def resume(*, model: nn.Module, optimizer: NodeOptimizer, **others: Any) -> Resumed | None:
    """Goes on from the last checkpoint of the run, if there is one; every worker must call it.

    There is one when Ray has started the workers anew after a failure, and when `fit()` was called
    again with the name and the storage path of a run. Takes the objects that `report` got.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    place = Path(checkpoint.path, _NODES)
    if not place.is_dir():
        raise FileNotFoundError(
            f"{checkpoint.path} has no directory {_NODES!r}, so it was not saved by "
            "decentlam.integrations.ray.report. Load its model yourself, and start a run with "
            "another name."
        )
    return load_checkpoint(place, model=model, optimizer=optimizer, **others)


def run_directory(storage: Any) -> Path:
    """Return the directory in which Ray keeps the run."""
    if not isinstance(storage.storage_filesystem, LocalFileSystem):
        raise ValueError(
            f"{storage.storage_fs_path} is not on a file system; every worker writes files of its "
            "own, so set RunConfig(storage_path=...) to a directory that all hosts share"
        )
    return Path(storage.experiment_fs_path)


def _save_model(place: Path, model: nn.Module) -> None:
    place.mkdir(parents=True)
    torch.save(model.state_dict(), place / MODEL)
