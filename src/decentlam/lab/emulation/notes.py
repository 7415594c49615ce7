"""Records on their way from node 0 to the process that waits: a file that one writes, one reads."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_LOOK_SECONDS = 0.3


def write(path: str, record: Record) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class Notes:
    """Calls `hear` with every record that is written to `path`, while the block lasts."""

    def __init__(self, hear: Callable[[Record], Any]) -> None:
        self._hear = hear
        self._told = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Notes:
        self._directory = tempfile.TemporaryDirectory()
        self.path = str(Path(self._directory.name) / "records.jsonl")
        Path(self.path).touch()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._tell()
        self._directory.cleanup()

    def heard(self) -> list[Record]:
        """All records so far; a line that is still being written is not one yet."""
        lines = Path(self.path).read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _listen(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self._tell()

    def _tell(self) -> None:
        for record in self.heard()[self._told :]:
            self._told += 1
            self._hear(record)
