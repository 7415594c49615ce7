"""What the timings say: ratios to DDP in the same round, where the time goes, limits by bytes."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence

import torch

from decentlam.algorithms import Reach
from decentlam.analysis.cost.model import Exchange
from decentlam.analysis.cost.pipeline import least
from decentlam.lab.calibration.measurements import KINDS
from decentlam.lab.emulation.contenders import BASE, LOCAL
from decentlam.lab.emulation.facts import Record

BARE = "bare buckets, 1 peer"  # the least that ours could cost the CPU
FRAME = 1514 / 1448  # bytes of an Ethernet frame, over what TCP has of them for a message


def split(record: Record, local: Record) -> dict[str, float]:
    """Seconds of compute, update and exposed communication, which add up to the iteration.

    Compute is what forward and backward take without communication, from the same round. The
    update is what `step()` takes when it does not wait, and never less than plain SGD's: parts
    of it may run elsewhere. The rest is communication that nothing hides.
    """
    compute = local["seconds"] - local["step_seconds"]
    update = max(local["step_seconds"], record["step_seconds"] - record["wait_seconds"])
    exposed = max(0.0, record["seconds"] - compute - update)
    return {"compute": compute, "exposed": exposed, "update": record["seconds"] - compute - exposed}


def bound(record: Record, late: float = 0.0) -> float:
    """The seconds that an iteration takes at least, by its bytes and its overlap.

    Forward, backward and update take what local training did in the same round, the first two
    spread over the buckets by their sizes. Every message takes the time of its bytes and their
    headers at the full bandwidth, and all else nothing. A node is `late` seconds late on average,
    and what it waits for others who are may be hidden. See `decentlam.analysis.cost.pipeline.least`
    for what may overlap with what.
    """
    forward = record["forward_fraction"] * (record["compute_seconds"] - record["update_seconds"])
    backward = record["compute_seconds"] - record["update_seconds"] - forward
    fraction = record["message_fraction"]
    kind = Exchange(KINDS[record["kind"]], record["nodes"], record["peers"], 1, fraction)
    wire = 0.0
    if record["bandwidth"] is not None and kind.reach is not Reach.NOBODY:
        wire = 8 * FRAME * kind.bytes_sent(record["model_bytes"]) / record["bandwidth"]
    sizes = record["buckets"] or [1]
    times = [wire * size / sum(sizes) for size in sizes]
    update = record["update_seconds"]
    return least(forward, backward, update, times, record["overlap"], sizes, late)


def summary(records: Sequence[Record]) -> list[Record]:
    """A row per contender: medians over the rounds, ratios to DDP with lowest and highest round.

    CPU time has its lowest and highest round, too, and `cpu_of_bare` is the median, lowest and
    highest ratio to bare buckets in the same round; None if they were never timed together.
    """
    timed = [r for r in records if "left_out" not in r]
    by = {name: {r["round"]: r for r in timed if r["contender"] == name} for name in _names(timed)}
    rows = []
    for name, mine in by.items():
        ratios = [r["seconds"] / by[BASE][k]["seconds"] for k, r in mine.items()]
        parts = [split(r, by[LOCAL][k]) for k, r in mine.items()]
        cpu_ms, cpu_lowest_ms, cpu_highest_ms = _spread(
            [1e3 * r["cpu_seconds"] for r in mine.values()]
        )
        bare = by.get(BARE, {})
        cpu_ratios = [
            r["cpu_seconds"] / bare[k]["cpu_seconds"] for k, r in mine.items() if k in bare
        ]
        bounds = {k: bound(r, by[LOCAL][k]["straggler_seconds"]) for k, r in mine.items()}
        middle = _median_over(list(mine.values()))
        rows.append(
            {
                "contender": name,
                "ms": 1e3 * middle("seconds"),
                "of_DDP": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
                "speed_up": 1 / statistics.median(ratios),
                **{f"{p}_ms": 1e3 * _median_over(parts)(p) for p in parts[0]},
                "wait_ms": 1e3 * middle("wait_seconds"),
                "MB_sent": middle("bytes_sent") / 1e6,
                "cpu_ms": cpu_ms,
                "cpu_lowest_ms": cpu_lowest_ms,
                "cpu_highest_ms": cpu_highest_ms,
                "cpu_of_bare": _spread(cpu_ratios) if cpu_ratios else None,
                "bound_of_DDP": statistics.median(bounds[k] / by[BASE][k]["seconds"] for k in mine),
                "of_bound": statistics.median(r["seconds"] / bounds[k] for k, r in mine.items()),
            }
        )
    return rows


def left_out(records: Sequence[Record]) -> list[str]:
    found = {r["contender"]: r["left_out"] for r in records if "left_out" in r}
    return [f"Left out: {name}: {reason}" for name, reason in found.items()]


def limits(nodes: int, parameters: int) -> str:
    """The bytes each kind of method moves, whatever the implementation."""
    size, reduce = 4 * parameters / 1e6, 2 * (nodes - 1) / nodes
    return (
        f"A node sends per step: all-reduce 2(n-1)/n = {reduce:.3g} models of {size:.3g} MB, one "
        f"peer 1, two peers 2. Where the wire binds, one peer is at most {reduce:.3g} times as "
        "fast as all-reduce, and two peers win nothing by their bytes."
    )


def machine() -> str:
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} cores, torch {torch.__version__}"


def _names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r["contender"] for r in records))


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    return statistics.median(values), min(values), max(values)


def _median_over(records: Sequence[dict[str, float]]) -> Callable[[str], float]:
    return lambda key: statistics.median(r[key] for r in records)
