"""What the studies that train share: seeds, recipes, and scores over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from decentlam.lab.studies.study import Record
from decentlam.lab.values import parse_json, plain

AVERAGED, NODES = "averaged_top1", "nodes_top1"
METHODS = (
    "pmsgd",
    "pmsgd-lars",
    "dsgd",
    "dmsgd",
    "da-dmsgd",
    "awc-dmsgd",
    "slowmo",
    "qg-dmsgd",
    "d2-dmsgd",
    "decentlam",
)


class Finished:
    """The finished runs of a study in a file, a line each, so that none is repeated."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self._runs = {json.dumps(r.pop("job")): r for r in map(parse_json, lines)}

    def get(self, job: Any, run: Callable[[], Record]) -> Record:
        """Return the record of the job, which is taken from the file or run and added to it."""
        key = json.dumps(plain(job))
        if key not in self._runs:
            self._runs[key] = plain(run())
            line = json.dumps({"job": plain(job), **self._runs[key]}, allow_nan=False)
            with self._file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")
        return self._runs[key]


def seeds_from(seed: int, count: int) -> tuple[int, ...]:
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    return tuple(range(seed, seed + count))


def fitting(nodes: int, *batches: int) -> tuple[int, ...]:
    """Return the batches, or a little less, so that all nodes get equal shares."""
    return tuple(nodes * max(1, batch // nodes) for batch in batches)


def where(records: Sequence[Record], **values: Any) -> list[Record]:
    """Return the records with these values."""
    return [r for r in records if all(r[key] == value for key, value in values.items())]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the standard deviation between seeds (0 for one seed)."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def scores(records: Sequence[Record], score: str = AVERAGED) -> list[float]:
    """Return the scores in percent of the runs that did not diverge."""
    return [100 * r[score] for r in records if r[score] is not None]


def cell(records: Sequence[Record], score: str = AVERAGED) -> str | None:
    """Return `84.12 ± 0.30`, in percent, and how many diverged; None without records.

    >>> cell([{"averaged_top1": 0.8, "step": 9}, {"averaged_top1": None, "step": 5}])
    '80.00, 1 of 2 diverge'
    """
    if not records:
        return None
    found, lost = scores(records, score), [r["step"] for r in records if r[score] is None]
    if not found:
        low, high = min(lost), max(lost)
        return f"diverges at step {low}" + (f" to {high}" if high > low else "")
    mean, spread = mean_and_spread(found)
    text = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(found) > 1 else "")
    return f"{text}, {len(lost)} of {len(records)} diverge" if lost else text


def leads(records: Sequence[Record], ours: str, theirs: str, score: str = AVERAGED) -> list[float]:
    """Return the percentage points by which a method leads another, seed by seed.

    Both had the same shards, samples and start, so that what a seed does to both cancels.
    """
    found = [r for r in records if r[score] is not None]
    other = {r["seed"]: r[score] for r in where(found, method=theirs)}
    return [
        100 * (r[score] - other[r["seed"]]) for r in where(found, method=ours) if r["seed"] in other
    ]


def signed(values: Sequence[float]) -> str:
    """Return `+1.20 ± 0.30`, or that there is nothing to compare."""
    if not values:
        return "none to compare"
    mean, spread = mean_and_spread(values)
    return f"{mean:+.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")


def lead_text(
    records: Sequence[Record],
    ours: str = "decentlam",
    theirs: str = "dmsgd",
    keys: tuple[str, str] = (AVERAGED, NODES),
) -> str:
    """Return the lead of one method over another in words, for both scores."""
    averaged, nodes = (signed(leads(records, ours, theirs, key)) for key in keys)
    return f"{averaged} (averaged), {nodes} (nodes)"
