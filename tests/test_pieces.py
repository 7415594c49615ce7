"""Large messages travel in pieces, and urgent ones overtake others; the steps stay the same."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import runs
import runs_pieces as pieces
import torch
from runs import Scenarios

from decentlam.runtime.forward.wire import PIECE_BYTES, PrioritySender

N = 4
RUNS = [
    ("decentlam", "ring", False),
    ("dmsgd", "one-peer-exponential", True),
    ("decentlam", "one-peer-symmetric-exponential", "forward"),
    ("gt-dmsgd", "ring", "forward"),  # two payloads in a message
    ("qg-dmsgd", "bipartite-random-match", "forward"),
]

scenarios = Scenarios(N)
scenarios.add("dropped", pieces.dropped)
for name, dtype in (("whole", None), ("rounded", torch.bfloat16)):
    scenarios.add(
        name, pieces.trajectory, method="dmsgd", topology="ring", overlap="forward",
        shared_memory=False, message_dtype=dtype,
    )  # fmt: skip
resting = Scenarios(5)  # one of them is left over at every step
for topology in ("one-peer-symmetric-exponential", "bipartite-random-match"):
    for shared in (True, False):
        resting.add(
            str((topology, shared)), pieces.trajectory, method="dmsgd", topology=topology,
            overlap="forward", shared_memory=shared,
        )  # fmt: skip
for method, topology, overlap in RUNS:
    for shared in (True, False):
        scenarios.add(
            str((method, topology, overlap, shared)), pieces.trajectory,
            method=method, topology=topology, overlap=overlap, shared_memory=shared,
        )  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_what_is_sent_in_pieces_arrives_whole(run: tuple[str, str, bool | str]) -> None:
    assert 3 * PIECE_BYTES < 8 * pieces.SIZES[0] < pieces.BUCKET_BYTES
    read, sent = (scenarios.outcomes(str((*run, shared))) for shared in (True, False))
    for expected, found in zip(read, sent, strict=True):
        assert runs.same(expected, found)


@pytest.mark.parametrize("topology", ["one-peer-symmetric-exponential", "bipartite-random-match"])
def test_a_node_that_rests_has_nothing_to_send(topology: str) -> None:
    read, sent = (resting.outcomes(str((topology, shared))) for shared in (True, False))
    for expected, found in zip(read, sent, strict=True):
        assert runs.same(expected, found)


def test_rounded_differences_in_pieces_stay_near_whole_messages() -> None:
    whole, rounded = scenarios.outcomes("whole"), scenarios.outcomes("rounded")
    for expected, found in zip(whole, rounded, strict=True):
        moved = (expected[-1] - expected[0]).abs().max()
        assert 0 < (expected[-1] - found[-1]).abs().max() < 0.01 * moved


def test_nothing_is_left_of_an_optimizer_that_is_gone() -> None:
    assert scenarios.outcomes("dropped") == [(False, 0)] * N


# The sender ------------------------------------------------------------------------------------


class Sent:
    """A piece on the wire until it is let go."""

    def __init__(self, error: str = "") -> None:
        self.gone, self.error = threading.Event(), error

    def wait(self, timeout: timedelta) -> bool:
        assert self.gone.wait(timeout.total_seconds())
        if self.error:
            raise RuntimeError(self.error)
        return True


class Wire:
    """Notes what is posted; each piece stays until it is let go."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.works: dict[str, Sent] = {}
        self._changed = threading.Condition()

    def piece(self, name: str, error: str = "") -> Any:
        self.works[name] = Sent(error)

        def post() -> list[Any]:
            with self._changed:
                self.posted.append(name)
                self._changed.notify_all()
            return [self.works[name]]

        return post

    def await_posts(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.posted) >= count, runs.HANG_SECONDS)
            return list(self.posted)

    def let_go(self, *names: str) -> None:
        for name in names:
            self.works[name].gone.set()


SECONDS = runs.HANG


def test_an_urgent_message_waits_for_pieces_of_another_not_for_all_of_it() -> None:
    wire, sender = Wire(), PrioritySender(SECONDS)
    slow = sender.submit(1, [wire.piece(f"slow {k}") for k in range(4)])
    assert wire.await_posts(2) == ["slow 0", "slow 1"]
    urgent = sender.submit(2, [wire.piece("urgent 0"), wire.piece("urgent 1")])
    wire.let_go("slow 0", "slow 1", "urgent 0", "urgent 1")
    assert wire.await_posts(6)[2:4] == ["urgent 0", "urgent 1"]
    assert urgent.wait(SECONDS)
    assert not slow.is_completed()
    wire.let_go("slow 2", "slow 3")
    assert slow.wait(SECONDS)
    assert wire.posted[4:] == ["slow 2", "slow 3"]


def test_the_rest_of_a_message_that_failed_is_not_sent_and_others_go_on() -> None:
    wire, sender = Wire(), PrioritySender(SECONDS)
    broken = sender.submit(2, [wire.piece("a", error="no route"), *map(wire.piece, "bcd")])
    whole = sender.submit(1, [wire.piece("e"), wire.piece("f")])
    wire.let_go(*"abcdef")
    with pytest.raises(RuntimeError, match="no route"):
        broken.wait(SECONDS)
    assert whole.wait(SECONDS)
    assert wire.posted[0] == "a" and wire.posted[-2:] == ["e", "f"]
    assert not {"c", "d"} & set(wire.posted)


def test_a_message_that_does_not_leave_in_time_is_reported() -> None:
    wire, sender = Wire(), PrioritySender(SECONDS)
    stuck = sender.submit(1, [wire.piece("stuck")])
    with pytest.raises(RuntimeError, match="in time"):
        stuck.wait(timedelta(seconds=0.05))
    wire.let_go("stuck")


def test_a_message_without_pieces_is_refused_and_the_sender_goes_on() -> None:
    wire, sender = Wire(), PrioritySender(SECONDS)
    with pytest.raises(ValueError, match="no piece"):
        sender.submit(1, [])
    later = sender.submit(1, [wire.piece("later")])
    wire.let_go("later")
    assert later.wait(SECONDS)
