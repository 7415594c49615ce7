"""Summaries of timings: ratios to DDP in the same round, and where the time goes."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence

import torch

from decentlam.lab.network.contenders import BASE, LOCAL
from decentlam.lab.values import Record


def split(record: Record, local: Record) -> dict[str, float]:
    """Return the seconds of compute, update and exposed communication, which add up to all.

    Compute is what forward and backward take without communication, in the same round. The update
    is what `step()` takes when it does not wait, and never less than plain SGD's: parts of it may
    run elsewhere. The rest is communication that nothing hides.
    """
    compute = local["seconds"] - local["step_seconds"]
    update = max(local["step_seconds"], record["step_seconds"] - record["wait_seconds"])
    exposed = max(0.0, record["seconds"] - compute - update)
    return {"compute": compute, "exposed": exposed, "update": record["seconds"] - compute - exposed}


def summary(records: Sequence[Record]) -> list[Record]:
    """Return a row per contender: medians over rounds, and ratios to DDP with their range."""
    timed = [r for r in records if "left_out" not in r]
    names = dict.fromkeys(r["contender"] for r in timed)
    by = {name: {r["round"]: r for r in timed if r["contender"] == name} for name in names}
    rows = []
    for name, mine in by.items():
        ratios = [r["seconds"] / by[BASE][k]["seconds"] for k, r in mine.items()]
        parts = [split(r, by[LOCAL][k]) for k, r in mine.items()]
        middle = _median_over(list(mine.values()))
        rows.append(
            {
                "contender": name,
                "ms": 1e3 * middle("seconds"),
                "of_DDP": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "speed_up": 1 / statistics.median(ratios),
                **{f"{part}_ms": 1e3 * _median_over(parts)(part) for part in parts[0]},
                "wait_ms": 1e3 * middle("wait_seconds"),
                "MB_sent": middle("bytes_sent") / 1e6,
                "cpu_ms": 1e3 * middle("cpu_seconds"),
            }
        )
    return rows


def left_out(records: Sequence[Record]) -> list[str]:
    reasons = {r["contender"]: r["left_out"] for r in records if "left_out" in r}
    return [f"Left out: {name}: {reason}" for name, reason in reasons.items()]


def limits(nodes: int, parameters: int) -> str:
    """Return a sentence on the bytes that each kind of method moves, however it is written."""
    size, reduce = 4 * parameters / 1e6, 2 * (nodes - 1) / nodes
    return (
        f"A node sends per step: all-reduce 2(n-1)/n = {reduce:.3g} models of {size:.3g} MB, one "
        f"peer 1, two peers 2. Where the wire binds, one peer is at most {reduce:.3g} times as "
        "fast as all-reduce, and two peers win nothing by their bytes."
    )


def machine() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} cores, torch {torch.__version__}"


def _median_over(records: Sequence[dict[str, float]]) -> Callable[[str], float]:
    return lambda key: statistics.median(r[key] for r in records)
