"""How far a run is: a line on stderr per evaluation, and one when nothing was said for a while."""

from __future__ import annotations

import sys
import time

from decentlam.lab.values import Record

_LINE_SECONDS = 30.0


class Display:
    """Prints the latest numbers of a run, of step records and evaluations."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self._steps, self._latest = steps, Record()
        self._say(f"{title}, {steps} steps" + (f", from step {done}" if done else ""))

    def show(self, record: Record) -> None:
        self._latest |= record
        due = record["kind"] == "evaluation" or time.monotonic() - self._said > _LINE_SECONDS
        if due and record["kind"] != "end":
            self._say(f"step {record['step']}/{self._steps}  {words(self._latest)}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(text, file=sys.stderr, flush=True)


def words(latest: Record) -> str:
    """Return the latest numbers of either kind of record in a line."""
    parts = []
    if "epoch" in latest:
        parts.append(f"epoch {latest['epoch']:.4g}")
    if latest.get("loss") is not None:
        parts.append(f"loss {latest['loss']:.4f}")
    for key, name in (("top1", "top-1"), ("ap50", "AP50")):
        if latest.get(f"averaged_{key}") is not None:
            low, high = latest[f"nodes_{key}_min"], latest[f"nodes_{key}_max"]
            parts.append(f"{name} {latest[f'averaged_{key}']:.2%} (nodes {low:.2%} to {high:.2%})")
            distance = latest["consensus_distance"]
            parts.append("distance " + ("-" if distance is None else f"{distance:.3g}"))
    if latest.get("step_seconds"):
        wait = latest["wait_seconds"] / latest["step_seconds"]
        data = latest["data_seconds"] / latest["step_seconds"]
        parts.append(f"lr {latest['lr']:.4g}")
        parts.append(f"{latest['images_per_second']:,.0f} images/s")
        parts.append(f"wait {wait:.0%} data {data:.0%}")
    return "  ".join(parts)
