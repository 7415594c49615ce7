"""Timings with what explains them: records that `decentlam.lab.calibration` fits constants to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from decentlam.lab.calibration.measurements import KINDS
from decentlam.lab.emulation.contenders import BASE, LOCAL, contenders
from decentlam.lab.emulation.hosts import bits_per_second
from decentlam.lab.emulation.setting import Setting

Record = dict[str, Any]

_KIND_OF = {reach: kind for kind, reach in KINDS.items()}


def explained(
    records: Sequence[Record], setting: Setting, nodes: int, bandwidth: str | float | None
) -> list[Record]:
    """The timed records, each with the cluster, the contender and its round's local training.

    Rounds that ended before local training and DDP were timed are left out: nothing to compare.
    """
    timed = [r for r in records if "left_out" not in r]
    local = {r["round"]: r for r in timed if r["contender"] == LOCAL}
    whole = {r["round"] for r in timed if r["contender"] == BASE and r["round"] in local}
    cluster = {
        "nodes": nodes,
        "bandwidth": None if bandwidth is None else bits_per_second(bandwidth),
        "cores": os.cpu_count(),
        "parameters": setting.size,
        "model_bytes": 4 * setting.size,
        "compute": setting.compute,
    }
    found = []
    for record in records:
        if "left_out" in record:
            found.append({**record, **cluster})
        elif record["round"] in whole:
            facts = _facts(record["contender"], local[record["round"]], setting, nodes)
            found.append({**record, **cluster, **facts})
    return found


def _facts(name: str, alone: Record, setting: Setting, nodes: int) -> Record:
    """What a contender sends and hides, beside local training in the same round."""
    contender = contenders(with_decent_dp=True)[name]
    late = setting.straggler_ms / 1e3
    seconds = alone["seconds"] - late / nodes  # a node is late once in n steps
    share = (alone["forward_seconds"] - late / nodes) / (seconds - alone["step_seconds"])
    return {
        "kind": _KIND_OF[contender.reach],
        "peers": contender.peers(nodes),
        "message_fraction": contender.message_fraction,
        "overlap": contender.overlap,
        "straggler_seconds": contender.delay(nodes, late),
        "compute_seconds": seconds,
        "update_seconds": alone["step_seconds"],
        "forward_fraction": setting.forward_share if setting.asleep else min(1.0, share),
    }
