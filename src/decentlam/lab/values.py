"""Records: plain values, and how they are written as JSON and shown in tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decentlam.errors import CheckpointError, ExchangeError, LaunchError

Record = dict[str, Any]  # plain JSON values
Tick = Callable[[int, int, str], None]  # (done, total, what), for the progress line


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def parse_json(text: str | bytes) -> Any:
    """Return what the JSON says; a ValueError if it is none, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_records(file: Path, notes: list[str]) -> list[Record]:
    """Return the records in the lines of a file; what is none is left out, with a note."""
    records = []
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    for at, line in enumerate(text.split("\n"), 1):
        try:
            record = parse_json(line) if line.strip() else None
        except ValueError:
            record = line
        if isinstance(record, dict):
            records.append(record)
        elif record is not None:
            notes.append(f"line {at} of {file.name} is not a record and was left out")
    return records


def show(value: Any) -> str:
    """Return a table cell: four significant digits; a dash where there is nothing to say."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table_text(rows: Sequence[Record]) -> str:
    """Return the rows, which have the same keys, as an aligned table in Markdown."""
    cells = [[show(value).replace("|", "/") for value in row.values()] for row in rows]
    columns = zip([key.replace("_", " ") for key in rows[0]], *cells, strict=True)
    lines = zip(*(_column(*column) for column in columns), strict=True)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _column(head: str, *cells: str) -> list[str]:
    width = max(map(len, (head, *cells)))
    return [head.ljust(width), "-" * width, *(cell.ljust(width) for cell in cells)]


def explained(error: BaseException | None) -> str | None:
    """Return a one-line explanation of an error that is no bug of ours; None for other errors."""
    text = " ".join(str(error).split())
    memory = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    if memory or "can't allocate memory" in text:
        return (
            f"out of memory: {text or 'no more is known'}; try a smaller --batch or --micro-batch"
        )
    if isinstance(error, CheckpointError | ExchangeError | LaunchError):
        return None if "Traceback" in text else text
    return None
