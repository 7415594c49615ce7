"""A checkpoint on disk: one file per process and meta.json, replaced as a whole or not at all.

    path/meta.json  path/process-00000.pt  path/process-00001.pt ...

The next checkpoint grows in a sibling directory. meta.json is written last, so whatever has one is
complete. Two renames swap old and new; a crash between them is recognised by the old one's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import IO, Any, cast

import torch

from decentlam.errors import CheckpointError

FORMAT = 1
_META = "meta.json"


def file_of(rank: int) -> str:
    return f"process-{rank:05d}.pt"


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


# Writing ---------------------------------------------------------------------------------------


def begin(path: Path) -> None:
    """Makes an empty place for the next checkpoint at `path`."""
    _settle(path)
    _check_replaceable(path)
    if _new(path).exists():
        shutil.rmtree(_new(path))
    _new(path).mkdir(parents=True)


def write(path: Path, rank: int, content: dict[str, Any]) -> dict[str, Any]:
    """Writes the file of one process; returns its size and checksum."""
    # Process 0 has made it, but another host's view of a network file system may be older.
    _new(path).mkdir(parents=True, exist_ok=True)
    with open(_new(path) / file_of(rank), "wb") as file:
        hashing = _Hashing(file)
        torch.save(content, cast(IO[bytes], hashing))
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": hashing.sha256.hexdigest()}


class _Hashing:
    """A file that knows the checksum of what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def commit(path: Path, meta: dict[str, Any]) -> None:
    """Puts the new checkpoint, whose files are all written, in the place of the old one."""
    missing = [name for name in meta["files"] if not (_new(path) / name).is_file()]
    if missing:
        raise CheckpointError(
            f"process 0 does not see {', '.join(missing)} in {_new(path)}; {path.parent} must be "
            "on a file system that all hosts share"
        )
    draft = _new(path) / f"{_META}.draft"
    draft.write_text(json.dumps({"format": FORMAT, **meta}, indent=2) + "\n")
    _sync(draft)
    draft.rename(_new(path) / _META)
    _sync(_new(path))
    if path.exists():
        path.rename(_old(path))
    _new(path).rename(path)
    _sync(path.parent)
    shutil.rmtree(_old(path), ignore_errors=True)  # the new one counts; the next save tries again


def abandon(path: Path) -> None:
    """Clears away what a failed save left; the checkpoint at `path` stays as it was."""
    with contextlib.suppress(OSError):
        _settle(path)
        shutil.rmtree(_new(path), ignore_errors=True)


def _settle(path: Path) -> None:
    """Finishes a replacement that was interrupted between its two renames or after them."""
    if not _old(path).exists():
        return
    if not path.exists():
        (_new(path) if (_new(path) / _META).exists() else _old(path)).rename(path)
    if _old(path).exists():
        shutil.rmtree(_old(path))


def _check_replaceable(path: Path) -> None:
    """Refuses to replace anything that is not a checkpoint: replacing deletes it."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file; a checkpoint is a directory, choose another name")
    found = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in found if name != _META and not name.startswith("process-")]
    if foreign or (found and _META not in found):
        raise ValueError(
            f"{path} holds {', '.join((foreign or found)[:3])}, so it is not (only) a checkpoint; "
            "replacing it would delete that. Choose another directory."
        )


def _sync(path: Path) -> None:
    """Makes a file or the entries of a directory survive a power cut, where that is possible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can do it for directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading ---------------------------------------------------------------------------------------


def locate(path: Path) -> Path:
    """Where the newest complete checkpoint of `path` is; changes nothing on disk."""
    if (path / _META).is_file():
        return path
    if _old(path).exists():  # a replacement was interrupted between its two renames
        return _new(path) if (_new(path) / _META).is_file() else _old(path)
    if path.exists():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {_META}")
    left = f"; {_new(path)} is one that was never finished" if _new(path).exists() else ""
    raise FileNotFoundError(f"there is no checkpoint at {path}{left}")


def read_meta(place: Path) -> dict[str, Any]:
    """What the checkpoint says of itself; raises if a file is missing or has another size."""
    try:
        meta: dict[str, Any] = json.loads((place / _META).read_text())
        version, files = meta["format"], meta["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{place / _META} cannot be read: {error!r}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{place} has format {version}, this version of decentlam reads format {FORMAT}"
        )
    for name, facts in files.items():
        file = place / name
        if not file.is_file():
            raise CheckpointError(f"{place} is incomplete: {name} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise CheckpointError(
                f"{file} is damaged: it has {file.stat().st_size} bytes instead of {facts['bytes']}"
            )
    return meta


def read(place: Path, meta: dict[str, Any], rank: int) -> dict[str, Any]:
    """What one process saved, on the CPU. torch.load would not notice a changed byte."""
    file = place / file_of(rank)
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != meta["files"][file_of(rank)]["sha256"]:
        raise CheckpointError(f"{file} is damaged: its checksum is not the one in {_META}")
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content
