"""Generations: what one follows from, and whose batches are dealt again."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from typing import Any

import pytest
import torch.distributed as dist

from decentlam.data import Deal, Place
from decentlam.elastic.generation import Change, Generation, are_enough, read
from decentlam.elastic.membership import Membership

DEAL = Deal(samples=10_000, batch=2)


def member(store: dist.Store, rank: int = 0, host: str | None = None) -> Membership:
    return Membership(store, rank, num_processes=1, timeout=20.0, wait=20.0, host=host)


def ready(step: int | None, everyone: bool = False) -> dict[str, Any]:
    return {"step": step, "whole": True, "everyone": everyone, "store": "", "left": []}


def first_of(size: int) -> Generation:
    members = tuple(range(size))
    return Generation(0, members, 0, 0, (), (Change(0, size),), ("",) * size, size)


class Dealt:
    """Members on a ring that take batches, and are lost; who took which."""

    def __init__(self, size: int) -> None:
        self.run = member(dist.HashStore())
        self.known: dict[int, list[Generation]] = {m: [first_of(size)] for m in range(size)}
        self.step = dict.fromkeys(range(size), 0)
        self.begun: set[int] = set()  # members in the midst of a step
        self.took: dict[int, list[int]] = defaultdict(list)  # of each batch
        self.generation = first_of(size)

    def begin(self, m: int) -> None:
        its = self.known[m][-1]
        place = Place(self.step[m], its.members.index(m), its.history)
        self.took[DEAL.position(place) // DEAL.batch].append(m)
        self.begun.add(m)

    def end(self, m: int) -> None:
        self.begun.discard(m)
        self.step[m] += 1

    def go_on(self, m: int) -> None:
        """Begins its step, or ends it if its neighbors have come as far."""
        members, here = self.generation.members, self.step[m]
        at = members.index(m)
        near = {members[at - 1], members[(at + 1) % len(members)]} - {m}
        if m not in self.begun:
            self.begin(m)
        elif all(self.step[n] > here or (self.step[n] == here and n in self.begun) for n in near):
            self.end(m)

    def change(self, *lost: int, newcomers: int = 0, everyone: bool = False) -> Generation:
        """The next generation, without those that are lost."""
        for m in lost:
            self.begun.discard(m)
            del self.step[m]
        for m in list(self.begun):
            self.end(m)
        self.run.generation = self.generation
        said = {m: ready(step, everyone) for m, step in self.step.items()}
        first = self.generation.numbers
        said |= {m: ready(None) for m in range(first, first + newcomers)}
        now = self.run._propose(self.generation.number + 1, said)
        self.generation = read(now.as_json().encode())
        assert self.generation == now
        for m in now.members:
            self.known.setdefault(m, []).append(now)
            self.step[m] = now.step  # whoever is behind skips the steps between
        return now

    def missing(self) -> list[int]:
        """Batches that nobody has begun, after all have come to the same step."""
        end = max(*self.step.values(), self.generation.step) + 20
        while any(step < end for step in self.step.values()):
            for m in self.step:
                if self.step[m] < end:
                    self.go_on(m)
        upto = max(self.took) - 2 * len(self.step)
        return [batch for batch in range(upto) if batch not in self.took]


def test_a_generation_never_begins_before_the_last_one() -> None:
    """Process 3 dies in step 5. Process 1 is one step further than its neighbors then, and dies
    while the generation that begins there is formed."""
    run = Dealt(4)
    for _ in range(5):
        for m in range(4):
            run.begin(m)
        for m in range(4):
            run.end(m)
    for m in range(4):
        run.begin(m)
    run.end(1)
    run.begin(1)
    assert run.change(3).step == 7
    assert run.change(1).step == 7
    assert run.missing() == []
    assert {batch: who for batch, who in run.took.items() if len(who) > 1} == {
        5 * 4 + 3: [3, 0]  # dealt again: nobody knows whether it was begun
    }
    left = member(dist.HashStore())  # with others who had not come as far when it was formed
    left.generation = dataclasses.replace(first_of(3), number=1, step=7)
    assert left._propose(2, {0: ready(5), 1: ready(6)}).step == 7


@pytest.mark.parametrize("seed", range(40))
def test_no_batch_is_lost_whoever_is_lost_when(seed: int) -> None:
    """None but those that were begun; only batches of who was lost are taken twice."""
    chance = random.Random(seed)
    run, gone = Dealt(7), set[int]()
    for _ in range(12):
        members = list(run.step)
        for _ in range(chance.choice((0, 3, 40))):
            run.go_on(chance.choice(members))
        struck = chance.sample(members, min(chance.choice((0, 1, 1, 2)), len(members) - 1))
        before = run.generation.step
        now = run.change(
            *struck, newcomers=chance.choice((0, 0, 1, 2)), everyone=chance.random() < 0.1
        )
        assert now.step >= before
        gone.update(struck)
    assert run.missing() == []
    assert all(len([m for m in who if m not in gone]) <= 1 for who in run.took.values())


def test_never_are_two_parts_of_the_members_enough() -> None:
    for size in range(1, 8):
        members = range(size)
        for sides in itertools.product(("stay", "move", "elsewhere"), repeat=size):
            stay, move = ([m for m in members if sides[m] == side] for side in ("stay", "move"))
            assert not (are_enough(members, stay, False) and are_enough(members, move, True))
