"""How far a run is: live in a terminal, a line now and then elsewhere; always on stderr."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from decentlam.lab.values import Record

_LINE_SECONDS = 30.0


class Lines:
    """A line per evaluation, and one when nothing was said for a while."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._steps, self._latest, self._said = steps, Record(), time.monotonic()
        self._console.print(f"{title}, {steps} steps" + (f", from step {done}" if done else ""))

    def show(self, record: Record) -> None:
        self._latest |= record
        if record["kind"] == "end":
            return
        if record["kind"] == "evaluation" or time.monotonic() - self._said > _LINE_SECONDS:
            self._said = time.monotonic()
            self._console.print(f"step {record['step']}/{self._steps}  {words(self._latest)}")

    def close(self) -> None:
        pass


class Bar:
    """A progress bar with the latest numbers below it."""

    def __init__(self, title: str, steps: int, done: int) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(title, total=steps, completed=done)
        self._latest = Record()
        self._live = Live(console=console, refresh_per_second=4)
        self._live.start()
        self._draw()

    def show(self, record: Record) -> None:
        self._latest |= record
        self._progress.update(self._task, completed=record["step"])
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(self._progress, Text(words(self._latest))))

    def close(self) -> None:
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
            parts.append(f"distance {_number(latest['consensus_distance'])}")
    if latest.get("step_seconds"):
        wait = latest["wait_seconds"] / latest["step_seconds"]
        data = latest["data_seconds"] / latest["step_seconds"]
        parts.append(f"lr {latest['lr']:.4g}")
        parts.append(f"{latest['images_per_second']:,.0f} images/s")
        parts.append(f"wait {wait:.0%} data {data:.0%}")
    return "  ".join(parts)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def choose(quiet: bool, title: str, steps: int, done: int) -> Lines | Bar | None:
    if quiet:
        return None
    return (Bar if Console(stderr=True).is_terminal else Lines)(title, steps, done)
