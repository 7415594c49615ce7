"""The members of a run at one time, as the store keeps them: plain values."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from decentlam.data import Change


@dataclass(frozen=True)
class Generation:
    """The members of a run in the order of their nodes, and the step at which they begin."""

    number: int
    members: tuple[int, ...]
    step: int  # the first that all take together
    source: int  # whose state is taken
    takers: tuple[int, ...]  # by whom
    history: tuple[Change, ...]
    stores: tuple[str, ...] = ()  # the members' spare ones, "" where there is none
    numbers: int = 0  # the first that no process ever had
    run: str = ""  # the same in all generations of a run, and in no other run

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def read(text: bytes) -> Generation:
    """Return what `as_json` wrote."""
    content = json.loads(text)
    for name in ("members", "takers", "stores"):
        content[name] = tuple(content[name])
    content["history"] = tuple(Change.from_json(change) for change in content["history"])
    return Generation(**content)


def are_enough(members: Collection[int], here: Collection[int], moved: bool) -> bool:
    """Return True if no other part of the members can be enough, too: those who stay with a store
    may be half of them, those who have moved must be more."""
    return 2 * len(here) >= len(members) + moved
