"""Accuracies over seeds: mean, spread and lead, and how tables say them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from decentlam.lab.study import Record

AVERAGED, NODES = "averaged_top1", "nodes_top1"


def where(records: Sequence[Record], **values: Any) -> list[Record]:
    """The records with these values."""
    return [r for r in records if all(r[key] == value for key, value in values.items())]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the standard deviation between seeds (0 for one seed)."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def scores(records: Sequence[Record], score: str = AVERAGED) -> list[float]:
    """In percent, of the runs that have one: those that did not diverge."""
    return [100 * r[score] for r in records if r[score] is not None]


def cell(records: Sequence[Record], score: str = AVERAGED) -> str | None:
    """`84.12 ± 0.30`, in percent; how many diverged, if any; None without records.

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
    """Percentage points by which a method is ahead of another, seed by seed: both had the same
    shards, samples and start, so that what a seed does to both cancels."""
    found = [r for r in records if r[score] is not None]
    other = {r["seed"]: r[score] for r in where(found, method=theirs)}
    return [
        100 * (r[score] - other[r["seed"]]) for r in where(found, method=ours) if r["seed"] in other
    ]


def signed(values: Sequence[float]) -> str:
    """`+1.20 ± 0.30`, or that there is nothing to compare."""
    if not values:
        return "none to compare"
    mean, spread = mean_and_spread(values)
    return f"{mean:+.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")


def verdict(smaller: Sequence[float], larger: Sequence[float]) -> str:
    """Whether the second is larger by more than the two spreads together."""
    if not smaller or not larger:
        return "cannot be told"
    (a, a_spread), (b, b_spread) = mean_and_spread(smaller), mean_and_spread(larger)
    if abs(b - a) <= a_spread + b_spread:
        return "stays within the spread"
    return "grows" if b > a else "shrinks"
