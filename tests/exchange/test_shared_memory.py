"""On one machine neighbors read messages where they are, if there is room."""

from __future__ import annotations

import copy
import gc
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import decentlam
from tests.helpers.processes import Group, Scenarios
from tests.helpers.quadratic import (
    Quadratic,
    assert_equal,
    quadratic_loss,
    same,
    simulate,
    start,
    train,
)

N = 4
scenarios = Scenarios(N)


def kind(process_group: Group, **options: Any) -> str:
    return type(start(process_group, **options)[2].runtime.exchange).__name__


def usual_kind(process_group: Group) -> str:
    """Of an optimizer that is told nothing about it."""
    parameters = Quadratic().parameters()
    optimizer = decentlam.DecentLaM(parameters, topology="ring", process_group=process_group)
    return type(optimizer.runtime.exchange).__name__


@scenarios.run(usual_kind)
def test_messages_are_read_in_place_unless_told_otherwise(kinds: list[str]) -> None:
    assert set(kinds) == {"SharedMemory"}


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("SharedMemory", {"method": "dmsgd", "shared_memory": True, "processes_per_node": 2}),
    ("Neighbors", {"method": "decentlam", "shared_memory": False}),
    ("Neighbors", {"method": "awc-dmsgd", "shared_memory": True}),  # it needs no gradient
    ("AllReduce", {"method": "pmsgd", "shared_memory": True}),
]


@scenarios.run(kind, [options for _, options in KINDS])
def test_who_shares(kinds: list[str], method: str) -> None:
    assert set(kinds) == {expected for expected, options in KINDS if options["method"] == method}


def delayed_loss(draw: random.Random) -> Any:
    """The quadratic, on a node that is late at random, before forward and before backward."""

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        if draw.random() < 0.3:
            time.sleep(0.02 * draw.random())
        value = quadratic_loss(model, node, step)
        if draw.random() < 0.3:
            time.sleep(0.02 * draw.random())
        return value

    return loss


def again(process_group: Group) -> list[list[Tensor]]:
    """Twice the same steps: the number of the step goes back while neighbors may be behind."""
    node, model, optimizer = start(
        process_group, "dmsgd", topology="one-peer-exponential", shared_memory=True
    )
    late = delayed_loss(random.Random(node))
    train(optimizer, model, node, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = train(optimizer, model, node, range(3, 12), late)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return [first, train(optimizer, model, node, range(3, 12), late)]


@scenarios.run(again)
def test_a_state_of_an_earlier_step_may_be_loaded(results: Any) -> None:
    for first, second in results:
        assert same(first, second)


def maps() -> int:
    """How often memory of ours is mapped here."""
    return Path("/proc/self/maps").read_text().count("memfd:decentlam")


def mapped(process_group: Group) -> tuple[int, int, int]:
    """Return the number of maps before there is an optimizer, with it, and after it."""
    before = maps()
    node, model, optimizer = start(process_group, "decentlam", shared_memory=True)
    train(optimizer, model, node, range(2))
    during = maps()
    del optimizer
    gc.collect()
    return before, during, maps()


@scenarios.run(mapped)
def test_nothing_stays_mapped(results: list[tuple[int, int, int]]) -> None:
    for before, during, after in results:
        assert during == before + N and after == before


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """A process may not have files, nor memory that looks like one, of more than 64 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def without_room(process_group: Group) -> tuple[str, list[Tensor]]:
    with no_room(process_group.rank() == 1):
        node, model, optimizer = start(process_group, "decentlam", shared_memory=True)
    return type(optimizer.runtime.exchange).__name__, train(optimizer, model, node, range(6))


@scenarios.run(without_room)
def test_without_memory_on_one_node_all_send_their_messages(results: Any) -> None:
    assert {name for name, _ in results} == {"Neighbors"}
    assert_equal([t for _, t in results], simulate("decentlam", N, 6))
