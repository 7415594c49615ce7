"""What processes write to the store: their heartbeats, and why a generation ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_PIDS = 1 << 31  # Linux has no more

Beat = dict[str, Any]  # see `read_beat`


@dataclass(frozen=True)
class Interruption:
    """The reason why the members cannot go on as they are."""

    text: str
    lost: tuple[int, ...] = ()  # who is gone


def declare(store: Any, key: str, interruption: Interruption) -> Interruption:
    """Write the cause down and return it; of several who find out, the first to write decides."""
    text = json.dumps({"text": interruption.text, "lost": interruption.lost})
    kept = store.compare_set(key, "", text)
    first = read_interruption(kept)
    if first is None:  # nobody of this library wrote it
        first = read_interruption(store.compare_set(key, kept, text))
    return first or interruption


def read_interruption(text: bytes) -> Interruption | None:
    """Return the interruption in a text, or None if it is not one."""
    match _read_json(text):
        case {"text": str(why), "lost": [*lost]} if all(type(m) is int for m in lost):
            return Interruption(why, tuple(lost))
    return None


def read_beat(text: bytes) -> Beat | None:
    """Return the heartbeat in a text, or None if it is not one."""
    match beat := _read_json(text):
        case {
            "pid": int(pid),
            "host": str(),
            "machine": None | [str(), str()],
            "net": None | [str(), str()],
            "count": int(),
            "left": bool(),
            "at": [int(), int()],
            "doing": str(),
        } if 0 < pid < _PIDS:
            return beat
    return None


def _read_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
