"""Checkpoints on disk: numbered saves in one directory, each put there whole by one rename.

    path/000002-step-400/process-00000.pt  process-00000.json  process-00001.pt ...

A save grows in path/.000002-step-400.new. A process writes its .json last, so who finds everyone's
knows that all files are complete, and renames the directory. Nothing is ever written over.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from decentlam.errors import CheckpointError

FORMAT = 2
_META_BYTES = 1 << 20  # no save's .json comes near
Meta = dict[str, Any]  # what a save says of itself; the same on all processes but for the rank
_NAME = re.compile(r"\d{6,}-step-\d+")
_LEFT = re.compile(rf"\.{_NAME.pattern}\.(new|old)")  # where a save or its deletion was killed
_FILE = re.compile(r"process-\d{5,}\.(pt|json|draft)")  # all that a save ever writes


def local(path: str | os.PathLike[str]) -> Path:
    """Return the real path, behind links; refuse what is not on a file system."""
    if "://" in str(path):
        raise ValueError(
            f"{path} is not on a file system; every process writes files of its own, so save to a "
            "directory that all hosts share"
        )
    return Path(os.path.realpath(path))


def _file(place: Path, rank: int, kind: str) -> Path:
    return place / f"process-{rank:05d}.{kind}"


def _saves(path: Path) -> list[Path]:
    """Return the complete saves in a directory, oldest first."""
    found = [place for place in path.iterdir() if _NAME.fullmatch(place.name)]
    return sorted(found, key=lambda place: int(place.name.partition("-")[0]))


# Writing ---------------------------------------------------------------------------------------


def begin(path: Path, step: int) -> Path:
    """Make an empty place for the next save in `path`; clear away what broken ones have left."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        text = f"{path} is or leads through a file; a checkpoint is a directory"
        raise ValueError(text) from None
    for left in [place for place in path.iterdir() if _LEFT.fullmatch(place.name)]:
        if _holds_only_a_save(left):
            shutil.rmtree(left, ignore_errors=True)  # the next save tries again
    names = [p.name.removeprefix(".") for p in path.iterdir()]
    taken = [int(name.partition("-")[0]) for name in names if _NAME.match(name)]
    number = max(taken, default=0) + 1
    place = path / f".{number:06d}-step-{step}.new"
    place.mkdir()
    return place


def _holds_only_a_save(place: Path) -> bool:
    """Return True if a directory with a save's name may be deleted: it holds nothing else."""
    with contextlib.suppress(OSError):
        if not place.is_symlink():
            with os.scandir(place) as entries:
                return all(
                    _FILE.fullmatch(e.name) and e.is_file(follow_symlinks=False) for e in entries
                )
    return False


def write(place: Path, meta: Meta, content: dict[str, Any]) -> None:
    """Write the two files of one process. The checksum covers the meta data and the content."""
    # Process 0 has made it, but another host's view of a network file system may be older.
    place.mkdir(parents=True, exist_ok=True)
    meta = {"format": FORMAT, **meta}
    file, described = (_file(place, meta["rank"], kind) for kind in ("pt", "json"))
    with open(file, "wb") as opened:
        try:
            torch.save(content, opened)
        except RuntimeError as error:  # torch hides what the file system said
            raise error.__context__ or error from None
    _sync(file)
    with open(file, "rb") as opened:
        sha256 = _sha256(meta, opened)
    draft = described.with_suffix(".draft")
    draft.write_text(json.dumps({**meta, "sha256": sha256}, indent=2) + "\n")
    _sync(draft)
    draft.rename(described)  # from here on another process may rename the directory


def _sha256(meta: Meta, opened: BinaryIO) -> str:
    """Return the checksum of the meta data and the content together."""
    told = json.dumps({k: v for k, v in meta.items() if k != "sha256"}, sort_keys=True)
    return hashlib.file_digest(opened, lambda: hashlib.sha256(told.encode())).hexdigest()  # type: ignore[arg-type]


def commit(place: Path, num_processes: int, keep: int) -> bool:
    """Make the save count if all its files are there, and delete all but the last `keep`.

    Whoever writes last does it. Two may think they are; for one of them it has been done.
    """
    final = place.with_name(place.name[1:].removesuffix(".new"))
    if not all(_file(place, rank, "json").is_file() for rank in range(num_processes)):
        return final.exists()
    try:
        _sync(place)
        place.rename(final)
    except FileNotFoundError:
        return final.exists()
    _sync(place.parent)
    for old in filter(_holds_only_a_save, _saves(place.parent)[:-keep]):
        with contextlib.suppress(OSError):  # the next save tries again
            shutil.rmtree(old.rename(old.with_name(f".{old.name}.old")))
    return True


def _sync(path: Path) -> None:
    """Make a file or the entries of a directory survive a power cut, where that is possible."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # not every file system can do it, least of all for directories
        if not path.is_dir() and error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


# Reading ---------------------------------------------------------------------------------------


def find(path: Path, step: int | None = None) -> Path | None:
    """Return the newest save in `path`, of this step if one is given, or `path` itself if it is
    one; change nothing on disk."""
    if _file(path, 0, "json").is_file():
        return path
    saves = _saves(path) if path.is_dir() else []
    fitting = [save for save in saves if step is None or save.name.endswith(f"-step-{step}")]
    return fitting[-1] if fitting else None


def locate(path: Path, step: int | None = None) -> Path:
    """Return what `find` does, but raise if there is none."""
    place = find(path, step)
    if place is None:
        of = "" if step is None else f" of step {step}"
        held = ", ".join(save.name for save in _saves(path)) if path.is_dir() else ""
        raise FileNotFoundError(
            f"there is no complete checkpoint{of} at {path}: it has {held or 'nothing'}"
        )
    return place


def _open(file: Path) -> BinaryIO:
    """Opens a regular file: a pipe would block for ever, and a device may have no end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is incomplete: {file.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{file} is damaged or foreign: it is not a regular file")
    return open(descriptor, "rb")


def read_meta(place: Path, rank: int) -> Meta:
    """Return what the save says of itself; only `read` knows whether it is true."""
    file = _file(place, rank, "json")
    try:
        with _open(file) as opened:
            text = opened.read(_META_BYTES + 1)
        if len(text) > _META_BYTES:
            raise ValueError(f"it has more than {_META_BYTES} bytes")
        meta = json.loads(text)
        if meta["format"] != FORMAT:
            raise CheckpointError(
                f"{place} has format {meta['format']!r}, this version of decentlam reads {FORMAT}"
            )
        for name, least in (("step", 0), ("num_nodes", 1), ("processes_per_node", 1)):
            if type(meta[name]) is not int or meta[name] < least:
                raise ValueError(
                    f"{name} is {meta[name]!r}, it must be a whole number of {least} or more"
                )
        if meta["rank"] != rank:
            raise ValueError(f"it describes process {meta['rank']!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or foreign: {error!r}{_before(place)}") from error
    return cast(Meta, meta)


def read(place: Path, rank: int) -> tuple[Meta, dict[str, Any]]:
    """Return what one process saved, on the CPU. Nothing in the file is run, whoever wrote it."""
    meta, file = read_meta(place, rank), _file(place, rank, "pt")
    with _open(file) as opened:
        if _sha256(meta, opened) != meta.get("sha256"):
            raise CheckpointError(
                f"{file} or its .json is damaged: the checksum is another one{_before(place)}"
            )
        opened.seek(0)
        try:
            content = torch.load(opened, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError) as error:
            raise CheckpointError(
                f"{file} is not a checkpoint: it holds more than tensors, numbers and text, or is "
                f"malformed; nothing of it was run. torch says: {reason(error)}"
            ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a checkpoint: it holds a {type(content).__name__}")
    return meta, content


def _before(place: Path) -> str:
    """Return, for errors, which save to try instead."""
    with contextlib.suppress(OSError):
        saves = [save for save in _saves(place.parent) if save.name < place.name]
        return f". The save before it is {saves[-1]}; load it by this path" if saves else ""
    return ""


def reason(error: Exception) -> str:
    """Return the line of torch's long message that names the culprit."""
    lines = str(error).splitlines() or [repr(error)]
    return next((line.strip() for line in lines if "nsupported" in line), lines[0])
