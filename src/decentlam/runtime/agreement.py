"""The agreement of all nodes, before training, on what they run; whoever differs is named."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentlam.algorithms import Algorithm
from decentlam.network.network import Network
from decentlam.options import Options
from decentlam.runtime.param_groups import PAST
from decentlam.runtime.sharded import described as placed
from decentlam.runtime.sharded import local, number_of_shard
from decentlam.topology import Topology


def describe_run(
    method: Algorithm,
    options: Options,
    groups: Sequence[Mapping[str, Any]],
    buffers: Sequence[Tensor] = (),
    named: Mapping[Tensor, str] | None = None,
) -> dict[str, object]:
    """Return what every process must have alike, named so that a difference explains itself.

    `named` has the parameters' names in the model, for groups that have none.
    """
    run: dict[str, object] = {
        "decentlam version": f"{sys.modules['decentlam'].__version__}, code {_code_of_decentlam()}",
        "torch version": torch.__version__,
        "algorithm": repr(method),
        "code of the algorithm": _code_of(type(method)),
    }
    run |= {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if isinstance(options.topology, Topology):
        run["topology"] = f"{options.topology!r} {options.topology.fingerprint()}"
    run["buffers"] = [f"{tuple(buffer.shape)} {buffer.dtype}" for buffer in buffers]
    run["shard"] = number_of_shard(p for group in groups for p in group["params"])
    run["number of parameters"] = sum(len(group["params"]) for group in groups)
    for i, group in enumerate(groups):
        names = group.get("param_names") or [(named or {}).get(p, "") for p in group["params"]]
        for k, (name, p) in enumerate(zip(names, group["params"], strict=True)):
            frozen = "" if p.requires_grad else " frozen"
            described = f"{name} {tuple(p.shape)} {p.dtype}{frozen}{placed(p)}"
            run[f"parameter {k} of group {i}"] = described.strip()
        for name, value in group.items():
            if name not in ("params", "param_names", *PAST):
                run[f"{name} of group {i}"] = value
    return run


@cache
def _code_of_decentlam() -> str:
    """Return a digest that differs where one host has other files of the same version."""
    root = Path(__file__).parents[1]
    files = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    return _digest("".join(f"{name}\n{(root / name).read_text()}" for name in files))


@cache
def _code_of(kind: type) -> str:
    try:
        return _digest(inspect.getsource(kind))
    except (OSError, TypeError):  # typed at a prompt
        return "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_agreement(network: Network, run: Mapping[str, object]) -> None:
    """Raise the same error on every process if what one of them has differs from process 0's."""
    if network.group is None:
        return
    everyone = network.gather({key: repr(value) for key, value in run.items()})
    reference = everyone[0]
    differences = [
        f"process {rank} has {key} = {theirs.get(key)}, process 0 has {reference.get(key)}"
        for rank, theirs in enumerate(everyone)
        for key in {**reference, **theirs}
        if theirs.get(key) != reference.get(key)
    ]
    if differences:
        shown = differences[:5] + ([f"and {len(differences) - 5} more"] if differences[5:] else [])
        raise ValueError(
            "the nodes do not agree on the run: "
            + "; ".join(shown)
            + ". Give every process the same model, method, hyper-parameters and topology."
        )


@torch.no_grad()
def check_order(network: Network, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters that are in another order on one process, where their first values tell:
    those of equal shape would be averaged with others. Models that were seeded alike have the same
    values; of others, and of those on a GPU, nothing is seen here, but names tell, where there are
    any."""
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if network.group is None or any(p.device.type != "cpu" for p in trained):
        return
    norms = [torch.linalg.vector_norm(local(p), dtype=torch.float64).item() for p in trained]
    everyone = network.gather((_digest(repr(norms)), _digest(repr(sorted(norms)))))
    order, values = everyone[0]
    others = [rank for rank, its in enumerate(everyone) if its[0] != order and its[1] == values]
    if others:
        raise ValueError(
            f"the nodes do not agree on the run: the parameters of process {others[0]} have the "
            "values of process 0's in another order. Give every process its parameters in the same "
            "order, as model.parameters() does: a set has none."
        )
