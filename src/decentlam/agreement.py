"""Before training, all nodes check that they mean the same run; whoever differs is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from decentlam.algorithms import Algorithm
from decentlam.exchange.network import Network
from decentlam.options import Options
from decentlam.topology import Topology


def facts_of(
    method: Algorithm, options: Options, groups: Sequence[Mapping[str, Any]], tag: int
) -> dict[str, object]:
    """What every process must have alike, named so that a difference explains itself."""
    facts: dict[str, object] = {"algorithm": repr(method)}
    facts |= {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    if isinstance(options.topology, Topology):
        facts["topology"] = f"{options.topology!r} {options.topology.fingerprint()}"
    facts["number of parameters"] = sum(len(group["params"]) for group in groups)
    for i, group in enumerate(groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for k, (name, p) in enumerate(zip(names, group["params"], strict=True)):
            frozen = "" if p.requires_grad else " frozen"
            described = f"{name} {tuple(p.shape)} {p.dtype}{frozen}"
            facts[f"parameter {k} of group {i}"] = described.strip()
        for name, value in group.items():
            if name not in ("params", "param_names"):
                facts[f"{name} of group {i}"] = value
    facts["first message tag (other optimizers were built before)"] = tag
    return facts


def check_agreement(network: Network, facts: Mapping[str, object]) -> None:
    """Raises the same error on every process if one's facts differ from process 0's."""
    if network.group is None:
        return
    everyone: list[dict[str, object]] = network.gather(dict(facts))
    reference = everyone[0]
    differences = []
    for rank, theirs in enumerate(everyone):
        for key in reference:
            if theirs.get(key) != reference[key]:
                differences.append(
                    f"process {rank} has {key} = {theirs.get(key)!r}, "
                    f"process 0 has {reference[key]!r}"
                )
    if differences:
        shown = differences[:5] + ([f"and {len(differences) - 5} more"] if differences[5:] else [])
        raise ValueError(
            "the nodes do not agree on the run: "
            + "; ".join(shown)
            + ". Give every process the same model, method, hyper-parameters and topology."
        )
