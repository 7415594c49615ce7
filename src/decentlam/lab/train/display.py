"""How far a run is: a bar with the latest numbers in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from decentlam.lab.values import Record

_LINE_SECONDS = 30.0


class Display:
    """Shows records on stderr. Without a terminal that is a line per evaluation, and one when
    nothing was said for a while."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._steps, self._latest, self._said = steps, Record(), time.monotonic()
        name = TextColumn("{task.description}", markup=False)
        self._progress = Progress(name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._task = self._progress.add_task(title, total=steps, completed=done)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(self._progress, console=self._console)
            self._live.start()
        else:
            self._say(f"{title}, {steps} steps" + (f", from step {done}" if done else ""))

    def show(self, record: Record) -> None:
        self._latest |= record
        step, numbers = record["step"], words(self._latest)
        due = record["kind"] == "evaluation" or time.monotonic() - self._said > _LINE_SECONDS
        if self._live is not None:
            self._progress.update(self._task, completed=step)
            self._live.update(Group(self._progress, Text(numbers)))
        elif due and record["kind"] != "end":
            self._say(f"step {step}/{self._steps}  {numbers}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


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
