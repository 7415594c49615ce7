"""`save_checkpoint` and `load_checkpoint`: the whole run, called by every process."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decentlam.agreement import check_agreement
from decentlam.checkpoint import directory, state
from decentlam.checkpoint.together import together
from decentlam.exchange.network import Network
from decentlam.optimizer import DecentralizedOptimizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What `load_checkpoint` found."""

    step: int  # steps the saved run had taken
    num_nodes: int  # of the saved run
    processes_per_node: int  # of the saved run
    averaged: bool  # the layout is another one now, so every node starts from the nodes' average


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: DecentralizedOptimizer,
    **others: Any,
) -> None:
    """Writes the whole run into the directory `path`; every process must call it, between steps.

    `others` are objects with a state_dict, such as a scheduler or a GradScaler; None is left out.
    Each process writes a file of its own: model, optimizer, others and torch's random numbers. A
    checkpoint that was at `path` is replaced when the new one is complete, and never earlier. If
    a process fails to write, all raise the error and the old checkpoint stays.
    """
    network = _network(optimizer)
    others = {name: thing for name, thing in others.items() if thing is not None}
    content = together(network, lambda: state.take(model, optimizer, others))
    step = optimizer.param_groups[0]["step"]
    check_agreement(
        network, {"checkpoint path": os.path.abspath(path), "saved": sorted(others), "step": step}
    )
    if network.processes_per_node > 1:
        whole = state.gather_parts(optimizer)
        content["optimizer"]["state"] = whole if network.lane == 0 else {}
    target = Path(os.path.realpath(path))
    try:
        together(network, _on_process_0(network, lambda: directory.begin(target)))
        facts = together(network, lambda: directory.write(target, network.rank, content))
        files = {directory.file_of(r): f for r, f in enumerate(network.gather(facts))}
        meta = {**_describe(optimizer), "saved": sorted(others), "files": files}
        together(network, _on_process_0(network, lambda: directory.commit(target, meta)))
    except Exception:
        _on_process_0(network, lambda: directory.abandon(target))()
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: DecentralizedOptimizer,
    **others: Any,
) -> Resumed:
    """Continues the run saved in `path`; every process must call it, with the objects of the run.

    On the same number of nodes, and of processes per node, the run goes on as if it had never
    stopped; on the CPU to the bit. On another number every node starts from the average of all
    saved nodes, momentum included, and the random numbers are left alone. `name=None` leaves out
    one of the other objects that were saved.
    """
    network = _network(optimizer)
    check_agreement(network, {"checkpoint path": os.path.abspath(path), "loaded": sorted(others)})

    def read() -> tuple[state.Content, Resumed]:
        place = directory.locate(Path(os.path.realpath(path)))
        meta = directory.read_meta(place)
        _check_meta(meta, optimizer, others)
        found = Resumed(
            meta["step"],
            meta["num_nodes"],
            meta["processes_per_node"],
            (meta["num_nodes"], meta["processes_per_node"])
            != (network.num_nodes, network.processes_per_node),
        )
        content = _read(place, meta, network, found.averaged)
        state.check(content, model, optimizer, _given(others))
        return content, found

    content, found = together(network, read)
    together(
        network,
        lambda: state.put(content, model, optimizer, _given(others), rng=not found.averaged),
    )
    if found.averaged and network.rank == 0:
        log.warning(
            "%s was saved by %d nodes of %d processes; each of the %d nodes of %d now starts from "
            "their average, at step %d",
            path,
            found.num_nodes,
            found.processes_per_node,
            network.num_nodes,
            network.processes_per_node,
            found.step,
        )
    return found


def _network(optimizer: DecentralizedOptimizer) -> Network:
    if not isinstance(optimizer, DecentralizedOptimizer):
        raise TypeError(f"checkpoints are for decentlam's optimizers, got {type(optimizer)}")
    return optimizer.network


def _given(others: dict[str, Any]) -> dict[str, Any]:
    return {name: thing for name, thing in others.items() if thing is not None}


def _on_process_0(network: Network, work: Callable[[], None]) -> Callable[[], None]:
    return work if network.rank == 0 else lambda: None


def _read(place: Path, meta: dict[str, Any], network: Network, average: bool) -> state.Content:
    if average:
        ranks = range(meta["num_nodes"] * meta["processes_per_node"])
        return state.average(
            (directory.read(place, meta, rank) for rank in ranks),
            len(ranks),
            meta["processes_per_node"],
        )
    content = directory.read(place, meta, network.rank)
    if network.lane != 0:
        lead = directory.read(place, meta, network.rank - network.lane)
        content["optimizer"]["state"] = lead["optimizer"]["state"]
    return content


def _describe(optimizer: DecentralizedOptimizer) -> dict[str, Any]:
    return {
        "method": _method(optimizer),
        "algorithm": repr(optimizer._method),
        "step": optimizer.param_groups[0]["step"],
        "num_nodes": optimizer.network.num_nodes,
        "processes_per_node": optimizer.network.processes_per_node,
        "versions": {
            "decentlam": sys.modules["decentlam"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _method(optimizer: DecentralizedOptimizer) -> str:
    return type(optimizer._method).__name__


def _check_meta(
    meta: dict[str, Any], optimizer: DecentralizedOptimizer, others: dict[str, Any]
) -> None:
    if meta["method"] != _method(optimizer):
        raise ValueError(
            f"the checkpoint is of a {meta['method']} run, this is {_method(optimizer)}: their "
            "states mean different things. Build the same optimizer, or load the model alone."
        )
    silent = [name for name in meta["saved"] if name not in others]
    if silent:
        raise ValueError(
            f"the checkpoint also holds {', '.join(silent)}; pass it to continue that run, or pass "
            f"{silent[0]}=None to leave it out"
        )
    here = repr(optimizer._method)
    if meta["algorithm"] != here and optimizer.network.rank == 0:
        log.warning("the checkpoint was saved by %s, this is %s", meta["algorithm"], here)
