"""`save_checkpoint` and `load_checkpoint`: the whole run, called by every process."""

from __future__ import annotations

import logging
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decentlam.checkpoint import directory, state
from decentlam.checkpoint.all_processes import on_all_processes
from decentlam.checkpoint.saving import Saving, settle
from decentlam.errors import CheckpointError
from decentlam.local_steps import LocalSteps
from decentlam.network.network import Network
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.runtime.agreement import check_agreement

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """The result of `load_checkpoint`."""

    step: int  # steps the saved run had taken
    num_nodes: int  # of the saved run
    processes_per_node: int  # of the saved run
    averaged: bool  # the layout is another one now, so every node starts from the nodes' average


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: DecentralizedOptimizer | LocalSteps,
    keep: int = 2,
    background: bool = False,
    **others: Any,
) -> Saving:
    """Save the whole run in the directory `path`. Every process must call it, between steps.

    Each process writes its own files: model, optimizer, others and torch's random state. The
    checkpoint counts only when all are complete. If a process fails to write, all raise the error,
    and the previous checkpoint stays.

    Args:
        path: A directory that all hosts see.
        model: The module that has all trained parameters.
        optimizer: A decentlam optimizer.
        keep: The number of checkpoints to keep in `path`, including the new one.
        background: Copy everything, return, and write in a thread while training continues. Call
            `wait()` on the returned object before the run ends.
        others: Objects with `state_dict` and `load_state_dict`, such as a scheduler, a GradScaler
            or a ResumableLoader, and random generators of torch, numpy and Python. None is
            skipped.
    """
    averaging, others = _parts(optimizer, others)
    network, target = averaging.network.everyone, directory.local(path)
    network.meet("save a checkpoint", averaging.runtime.rates)
    settle()
    objects = state.Objects(model, averaging, _given(others))

    def take() -> state.Content:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be a whole number of 1 or more, got {keep!r}")
        return state.take(objects)

    content = on_all_processes(network, take)
    steps = max(network.gather(optimizer.steps))  # they differ where LocalSteps goes by time
    meta = {**_describe(averaging), "step": steps, "saved": sorted(objects.others)}
    check_agreement(network, {"checkpoint path": os.path.abspath(path), "keep": keep, **meta})
    content["state"] = state.whole_state(objects)
    return Saving(network, target, meta, content, keep, bool(background))


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: DecentralizedOptimizer | LocalSteps,
    **others: Any,
) -> Resumed:
    """Load the latest checkpoint in `path`, or the one at `path`. Every process must call it.

    With the same number of nodes and processes per node the run continues as if it had never
    stopped, on the CPU bitwise. With another number every node starts from the average of all saved
    nodes, including momentum, and random states are left alone. Pass `name=None` to skip one of the
    other objects that were saved.

    Only these checkpoints can resume a run. `torch.save(model.state_dict(), ...)` on rank 0 saves
    one node's own model.
    """
    averaging, others = _parts(optimizer, others)
    network, target = averaging.network.everyone, directory.local(path)
    network.meet("load a checkpoint")
    settle()
    check_agreement(network, {"checkpoint path": os.path.abspath(path), "loaded": sorted(others)})
    objects = state.Objects(model, averaging, _given(others))

    def read() -> tuple[state.Content, Resumed]:
        place = directory.locate(target)
        meta = directory.read_meta(place, 0)
        _check_meta(place, meta, averaging, others)
        layout = meta["num_nodes"], meta["processes_per_node"]
        content, averaged = _read(place, meta, objects, network)
        state.check(objects, content)
        return content, Resumed(meta["step"], *layout, averaged)

    content, found = on_all_processes(network, read)
    layout = found.num_nodes, found.processes_per_node
    rng = not found.averaged and layout == (network.num_nodes, network.processes_per_node)
    # The others first: what they refuse is not known before, and they can have their states back.
    before = on_all_processes(network, lambda: state.copied(state.take_others(objects)))
    try:
        on_all_processes(network, lambda: state.put_others(objects, content["others"]))
    except BaseException:
        state.put_others(objects, before)
        raise
    on_all_processes(network, lambda: state.put(objects, content, rng))
    if found.averaged and network.rank == 0:
        log.warning(
            "%s was saved by %d nodes of %d processes; now every node starts from their average",
            *(path, found.num_nodes, found.processes_per_node),
        )
    return found


def _parts(
    optimizer: DecentralizedOptimizer | LocalSteps, others: dict[str, Any]
) -> tuple[DecentralizedOptimizer, dict[str, Any]]:
    """Return the optimizer that averages, and what else is saved: one inside of it, too."""
    if isinstance(optimizer, LocalSteps):
        return optimizer.averaging, {**others, "inner optimizer": optimizer.between_averages()}
    if isinstance(optimizer, DecentralizedOptimizer):
        return optimizer, others
    raise TypeError(f"checkpoints are for decentlam's optimizers, got {optimizer!r}")


def _given(others: dict[str, Any]) -> dict[str, Any]:
    return {name: thing for name, thing in others.items() if thing is not None}


def _read(
    place: Path, meta: directory.Meta, objects: state.Objects, network: Network
) -> tuple[state.Content, bool]:
    """Return the content of this process, from files that were all written by the save `meta` is
    of, and whether it is the average of all nodes."""
    nodes, several = meta["num_nodes"], meta["processes_per_node"]
    sharded = objects.optimizer.network.shard_group is not None

    def content_of(rank: int) -> state.Content:
        its_meta, content = directory.read(place, rank)
        if any(its_meta.get(name) != meta[name] for name in meta if name not in ("rank", "sha256")):
            raise CheckpointError(f"{place} is damaged: process {rank}'s files are of another save")
        return content

    def node(number: int) -> state.Content:
        ranks = range(number * several, (number + 1) * several)
        return state.joined(list(map(content_of, ranks)))

    if (nodes, several) == (network.num_nodes, network.processes_per_node):
        own = content_of(network.rank)
        if sharded is bool(own.get("cuts")):
            return own, False
    number = nodes * several
    try:
        cut = bool(content_of(0).get("cuts"))
        alike = nodes == network.num_nodes and (cut or several == 1) and (cut or sharded)
        if alike:
            content = node(network.node) if cut else content_of(network.node)
        elif cut:
            content = state.average(map(node, range(nodes)), nodes)
        else:
            content = state.average(map(content_of, range(number)), number)
        return state.cut_for(objects, content) if sharded else content, not alike
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the nodes in {place} cannot be averaged: {error}") from error


def _describe(optimizer: DecentralizedOptimizer) -> dict[str, Any]:
    return {
        "method": type(optimizer.method).__name__,
        "algorithm": repr(optimizer.method),
        "runs": repr(optimizer.algorithm),  # the method, or a stable form of it
        "step": optimizer.steps,
        "num_nodes": optimizer.network.num_nodes,
        "processes_per_node": optimizer.network.everyone.processes_per_node,
        "versions": {
            "decentlam": sys.modules["decentlam"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _check_meta(
    place: Path, meta: directory.Meta, optimizer: DecentralizedOptimizer, others: dict[str, Any]
) -> None:
    words, saved = [meta.get(name) for name in ("method", "algorithm", "runs")], meta.get("saved")
    if not isinstance(saved, list) or not all(isinstance(word, str) for word in [*words, *saved]):
        raise CheckpointError(f"{place} is damaged or foreign: it does not say what was saved")
    here = _describe(optimizer)
    if meta["method"] != here["method"]:
        raise ValueError(
            f"the checkpoint is of a {meta['method']} run, this is {here['method']}: their "
            "states mean different things. Build the same optimizer, or load the model alone."
        )
    silent = [name for name in meta["saved"] if name not in others]
    if silent:
        raise ValueError(
            f"the checkpoint also holds {', '.join(silent)}; pass it to continue that run, or pass "
            f"{silent[0]}=None to leave it out"
        )
    several = min(meta["num_nodes"], here["num_nodes"]) > 1
    for name, text in (("algorithm", "by"), ("runs", "while this ran:")):
        counts = optimizer.network.rank == 0 and (several or name == "algorithm")
        if counts and meta[name] != here[name]:
            log.warning("the checkpoint was saved %s %s, here: %s", text, meta[name], here[name])
