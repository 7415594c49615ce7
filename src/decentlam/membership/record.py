"""The members of a run, as the store keeps them: plain values."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

Turn = tuple[int, int, int]  # step, node, and of which generation: of its number, or how many ago


@dataclass(frozen=True)
class Change:
    """What one generation changed; all of them together say who had which samples."""

    step: int  # the first that the new members take together
    size: int  # members from then on
    lost: tuple[int, ...] = ()  # nodes of the generation before that are gone
    since: int = 0  # the first step from which on their batches are dealt again
    owed: tuple[Turn, ...] = ()  # of earlier generations; nobody will come to these any more


@dataclass(frozen=True)
class Generation:
    """The members in the order of their nodes."""

    number: int
    members: tuple[int, ...]
    step: int  # the first that all take together
    source: int  # whose state is taken
    takers: tuple[int, ...]  # by whom
    history: tuple[Change, ...]
    stores: tuple[str, ...] = ()  # the members' spare ones, "" where there is none
    numbers: int = 0  # the first that no process ever had
    behind: tuple[tuple[int, Turn], ...] = ()  # what members still take alone until this step
    run: str = ""  # the same in all generations of a run, and in no other run

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def read(text: bytes) -> Generation:
    """What `as_json` wrote."""
    found = json.loads(text)
    changes = [
        Change(c["step"], c["size"], tuple(c["lost"]), c["since"], turns(c["owed"]))
        for c in found["history"]
    ]
    return Generation(
        found["number"],
        tuple(found["members"]),
        found["step"],
        found["source"],
        tuple(found["takers"]),
        tuple(changes),
        tuple(found["stores"]),
        found["numbers"],
        tuple((member, (step, node, number)) for member, (step, node, number) in found["behind"]),
        found["run"],
    )


def turns(found: Iterable[Iterable[int]]) -> tuple[Turn, ...]:
    """As JSON has them, which knows no tuples."""
    return tuple((step, node, ago) for step, node, ago in found)


def are_enough(members: Collection[int], here: Collection[int], moved: bool) -> bool:
    """Whether no other part of the members can be enough, too: those who stay with a store may be
    half of them, those who have moved must be more."""
    return 2 * len(here) >= len(members) + moved
