"""Before training, all nodes check that they mean the same run; whoever differs is named."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from decentlam.exchange.network import Network


def check_agreement(network: Network, facts: Mapping[str, object]) -> None:
    """Raises the same error on every process if one's facts differ from process 0's."""
    if network.group is None:
        return
    everyone: list[dict[str, object] | None] = [None] * network.num_processes
    dist.all_gather_object(everyone, dict(facts), group=network.group)
    reference = everyone[0] or {}
    differences = []
    for rank, theirs in enumerate(everyone):
        for key in reference:
            if theirs is not None and theirs.get(key) != reference[key]:
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
