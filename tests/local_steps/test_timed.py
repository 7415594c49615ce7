"""Averages by time: nodes that are not equally fast, none of which waits for another."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

import decentlam
from decentlam.exchange.base import combine
from decentlam.local_steps.timed import in_background, seconds_of, weighted
from tests.helpers.processes import Group, Scenarios
from tests.helpers.quadratic import Quadratic, flat, train
from tests.local_steps.test_local_steps import start

N = 3
scenarios = Scenarios(N)


@pytest.mark.parametrize(
    ("every", "seconds"), [("2s", 2.0), (" 500 ms", 0.5), ("1.5min", 90.0), (16, None)]
)
def test_times_are_read(every: str | int, seconds: float | None) -> None:
    assert seconds_of(every) == seconds


@pytest.mark.parametrize("every", ["0s", "2", "two seconds", "-1s", ""])
def test_what_is_no_time_is_refused(every: str) -> None:
    with pytest.raises(ValueError, match="a time above 0 such as '2s'"):
        seconds_of(every)


@pytest.mark.parametrize("option", [{"delay": 1}, {"elastic": True}])
def test_what_counts_steps_is_refused_with_a_time(option: dict[str, object]) -> None:
    inner = torch.optim.SGD(Quadratic().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="goes without delay, elastic and outer"):
        decentlam.LocalSteps(inner, "2s", **option)


def test_join_which_waits_for_everyone_is_refused_with_a_time() -> None:
    optimizer = decentlam.LocalSteps(torch.optim.SGD(Quadratic().parameters(), lr=0.1), "2s")
    with pytest.raises(ValueError, match="leave Join out"):
        Join([optimizer])


def test_nodes_count_as_often_as_they_took_steps() -> None:
    z, theirs, rounded = (torch.tensor([value]) for value in (1.0, 4.0, 1.5))
    whole = weighted([(0.5, z), (0.5, theirs)], 1, [2])
    assert float(combine(whole)) == pytest.approx((1 * 1.0 + 2 * 4.0) / 3)
    # 1 + w (4 - 1.5), which what the other end adds takes away again.
    short = weighted([(1.0, z), (0.5, theirs), (-0.5, rounded)], 1, [2])
    assert float(combine(short)) == pytest.approx(1 + 2 / 3 * 2.5)
    terms = [(0.5, z), (0.5, theirs)]
    assert weighted(terms, 0, [0]) == terms


def test_a_failure_while_messages_travel_is_raised_where_they_are_used() -> None:
    arrival = in_background(lambda: [][0])
    with pytest.raises(IndexError):
        arrival.result()
    assert arrival.done()


def weighed_by_steps(process_group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Send after one more step than the node before, and move on before messages are used; return
    the model as it was sent, as it was then, and after."""
    node, model, optimizer = start(process_group, "sgd", every="60min", topology="complete")
    train(optimizer, model, node, range(1 + node))
    sent = flat(model)
    optimizer._send()
    optimizer.inner.step()
    then = flat(model)
    optimizer._settle()
    return sent, then, flat(model)


@scenarios.run(weighed_by_steps)
def test_what_mixing_changes_is_added_to_where_the_node_is_by_then(results: list[Any]) -> None:
    """The complete graph weighs all alike, and steps 1 to 3 then make it a sixth to a half."""
    sent = torch.stack([result[0] for result in results])
    mix = (torch.arange(1, N + 1)[:, None] * sent).sum(0) / 6
    for own, then, after in results:
        assert not torch.equal(own, then)
        assert (after - (then + mix - own)).abs().max() < 1e-12


def unequally_fast(process_group: Group) -> tuple[int, int, Tensor, Tensor]:
    """Train on nodes of which the last waits, between two steps, until the others are done."""
    node, model, optimizer = start(process_group, "adamw", every="10ms")
    done, last = torch.zeros(1), N - 1
    for step in range(4 if node == last else 40):
        train(optimizer, model, node, range(1))
        time.sleep(0.005)
        if node == last and step == 1:
            for other in range(last):
                dist.recv(done, group_src=other, group=process_group)
    if node != last:
        dist.send(done, group_dst=last, group=process_group)
    steps = optimizer.steps
    optimizer.merge(model)
    with optimizer.averaged(model):
        mean = flat(model)
    return steps, optimizer.runtime.index, flat(model), mean


@scenarios.run(unequally_fast)
def test_a_slow_node_keeps_nobody_from_training(
    results: list[tuple[int, int, Tensor, Tensor]],
) -> None:
    assert [steps for steps, *_ in results] == [40, 40, 4]
    averages = {index for _, index, *_ in results}
    assert len(averages) == 1 and averages.pop() >= 2
    for _, _, x, mean in results:
        assert torch.equal(x, results[0][2])
        assert (mean - x).abs().max() < 1e-12
