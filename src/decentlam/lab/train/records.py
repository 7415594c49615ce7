"""The run directory: run.json, and records.jsonl as they happen."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from decentlam.checkpoint.directory import find
from decentlam.lab import recipes
from decentlam.lab.progress import Progress
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.engines import Engine
from decentlam.lab.values import Record, parse_json, plain, read_records
from decentlam.lab.versions import versions

# The numbers of an evaluation that summaries show.
SCORES = {
    "classification": ("averaged_top1", "nodes_top1", "nodes_top1_min", "consensus_distance"),
    "text": ("averaged_loss", "nodes_loss", "averaged_top1", "consensus_distance"),
    "detection": (
        *("averaged_ap50", "averaged_ap", "nodes_ap50", "nodes_ap"),
        *("nodes_ap50_min", "consensus_distance"),
    ),
}
RUN, RECORDS, CHECKPOINT = "run.json", "records.jsonl", "checkpoint"


@dataclass(frozen=True)
class RunOptions:
    """The options that `train` was called with."""

    recipe: Recipe
    directory: Path
    simulate: bool = False
    resume: bool = False
    elastic: bool = False
    workers: int = 0
    quiet: bool = True


@contextlib.contextmanager
def claimed(options: RunOptions) -> Iterator[None]:
    """Check the directory and lock it against other runs; the lock ends with its process."""
    directory = options.directory
    if options.resume:
        check(options)  # before a directory is made
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be made: {error.strerror}; choose another with --out"
        ) from None
    lock = directory / ".lock"
    try:
        with open(lock, "a", encoding="utf-8") as file:
            _lock(file, directory)
            check(options)
            yield
    finally:
        if not (directory / RUN).exists():  # the run did not start
            with contextlib.suppress(OSError):
                lock.unlink()
                directory.rmdir()


def _lock(file: IO[str], directory: Path) -> None:
    try:
        import fcntl  # not on every platform
    except ImportError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"another run is writing to {directory}; wait for its end, or choose another "
            "directory with --out"
        ) from None


def read_recipe(directory: Path) -> tuple[Recipe, Record]:
    """Return the recipe of the run that was started there, and all of run.json."""
    file = directory / RUN
    if not file.is_file():
        raise ValueError(
            f"there is no run to resume in {directory}: it has no {RUN}. To start one, leave out "
            "--resume"
        )
    try:
        info: Record = parse_json(file.read_bytes())
        recipe = recipes.from_json(info["recipe"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged or of another version: {type(error).__name__}: {error}; choose "
            "another directory with --out, or start anew"
        ) from error
    return recipe, info


def check(options: RunOptions) -> None:
    """Raise a ValueError rather than overwrite a run, or resume another one or none."""
    directory = options.directory
    saved = find(directory / CHECKPOINT) is not None
    if not options.resume:
        if (directory / RUN).exists() or (directory / RECORDS).exists():
            how = "continue it with --resume" if saved else "it left no checkpoint, so delete it"
            raise ValueError(
                f"{directory} holds a run already; {how}, or choose another directory with --out"
            )
        return
    before, info = read_recipe(directory)
    here, there = options.recipe.as_json(), before.as_json()
    differences = [f"{k} was {there[k]!r}, is {here[k]!r}" for k in here if here[k] != there[k]]
    for kind, now in (("simulated", options.simulate), ("elastic", options.elastic)):
        if bool(info.get(kind)) != now:
            differences.append(f"it was {'not ' * now}{kind}")
    if differences:
        raise ValueError(
            f"the run in {directory} is another one: {'; '.join(differences)}. Resume it with "
            "--resume and --out alone, or start a new one elsewhere"
        )
    if not saved:
        raise ValueError(
            f"the run in {directory} left no checkpoint to resume from. To start anew, leave out "
            "--resume and choose another directory with --out, or delete this one"
        )


def describe(
    options: RunOptions, parameters: int, steps_per_epoch: int, notes: list[str]
) -> Record:
    """Return the content of run.json."""
    recipe = options.recipe
    chosen = [f"--{name}" for name in ("simulate", "elastic") if getattr(options, name)]
    return {
        "recipe": recipe.as_json(),
        "versions": versions(),
        "command": recipes.command(recipe, *chosen, "--out", str(options.directory)),
        "simulated": options.simulate,
        "elastic": options.elastic,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "parameters": parameters,
        "steps": recipe.steps(steps_per_epoch),
        "steps_per_epoch": steps_per_epoch,
        "notes": notes,
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
    }


class RunWriter:
    """Writes a run's records and shows them, in the process that writes.

    In an elastic run that may be another process after a while: it takes over with its first
    record. Records that a resumed run will write again are cut off first.
    """

    def __init__(
        self, options: RunOptions, engine: Engine, steps_per_epoch: int, notes: list[str]
    ) -> None:
        self._options, self._engine, self._notes = options, engine, notes
        self.directory, self.steps_per_epoch = options.directory, steps_per_epoch
        self.steps = options.recipe.steps(steps_per_epoch)
        self.last_evaluation: Record | None = None
        self._file: IO[str] | None = None
        self._progress: Progress | None = None
        self._latest = Record()  # the newest numbers, for the progress line

    def __enter__(self) -> RunWriter:
        if self._engine.writes:
            self._begin(self._engine.step)
        return self

    def _begin(self, step: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if step == 0 or not (self.directory / RUN).exists():
            size = self._engine.parameters
            info = describe(self._options, size, self.steps_per_epoch, self._notes)
            _replace(self.directory / RUN, json.dumps(plain(info), indent=2) + "\n")
        kept = [r for r in read(self.directory) if r["kind"] != "end" and r["step"] <= step]
        _replace(self.directory / RECORDS, "".join(json.dumps(record) + "\n" for record in kept))
        self.last_evaluation = next((r for r in reversed(kept) if r["kind"] == "evaluation"), None)
        self._file = (self.directory / RECORDS).open("a", encoding="utf-8")
        if not self._options.quiet:
            recipe = self._options.recipe
            self._progress = Progress("step", step)
            self._progress.update(step, self.steps, f"{recipe.method} on {recipe.data}", now=True)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add a record; does nothing where another process writes."""
        if not self._engine.writes:
            return self.__exit__()
        if self._file is None:
            self._begin(step - 1)
        assert self._file is not None
        if kind != "end":
            values = {"epoch": step / self.steps_per_epoch, **values}
        record: Record = plain({"kind": kind, "step": step, **values})
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        if kind == "evaluation":
            self.last_evaluation = record
        if self._progress is not None and kind != "end":
            self._latest |= record
            words, now = in_words(self._latest), kind == "evaluation"
            self._progress.update(step, self.steps, words, now)

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def in_words(latest: Record) -> str:
    """Return the newest numbers of step and evaluation records in one line."""
    parts = [f"epoch {latest['epoch']:.4g}"]
    if latest.get("loss") is not None:
        parts.append(f"loss {latest['loss']:.4f}")
    for key, name in (("top1", "top-1"), ("ap50", "AP50")):
        if latest.get(f"averaged_{key}") is not None:
            low, high = latest[f"nodes_{key}_min"], latest[f"nodes_{key}_max"]
            parts.append(f"{name} {latest[f'averaged_{key}']:.2%} (nodes {low:.2%} to {high:.2%})")
            distance = latest["consensus_distance"]
            parts.append("distance " + ("-" if distance is None else f"{distance:.3g}"))
    if latest.get("step_seconds"):
        wait, data = (latest[f"{k}_seconds"] / latest["step_seconds"] for k in ("wait", "data"))
        parts.append(f"lr {latest['lr']:.4g}")
        parts.append(f"{latest['images_per_second']:,.0f} images/s")
        parts.append(f"wait {wait:.0%} data {data:.0%}")
    return "  ".join(parts)


def read(directory: Path) -> list[Record]:
    """Return the records, without a last line that was cut short."""
    return read_records(directory / RECORDS, [])


def write_interruption(directory: Path) -> int:
    """End the records of a run whose processes were all stopped; return its last step."""
    records = read(directory)
    step: int = records[-1]["step"] if records else 0
    if records and records[-1]["kind"] != "end":
        records.append({"kind": "end", "step": step, "status": "interrupted", "seconds": None})
        _replace(directory / RECORDS, "".join(json.dumps(record) + "\n" for record in records))
    return step


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
