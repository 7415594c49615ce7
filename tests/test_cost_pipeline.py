"""The cost model's pipeline against a clock that ticks, and late nodes one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from decentlam.algorithms import Reach
from decentlam.analysis.cost import (
    Compute,
    Delays,
    Job,
    Link,
    predict,
    straggler_wait,
    timeline,
)
from decentlam.analysis.cost.pipeline import least
from decentlam.analysis.cost.values import OVERLAPS
from decentlam.topology import (
    bipartite_random_match,
    complete,
    one_peer_exponential,
    one_peer_hypercube,
    ring,
)

GIGABIT = Link(bytes_per_second=1.25e8)
STEP = Compute(0.1, 0.2)
MODEL = Job(40_000_000)


def ticking_seconds(
    f, b, u, wire, latency, overlap, prefer=None, pieces=False, sizes=None, iterations=8
) -> int:
    """Ticks per iteration of one node and its wire, moved one tick at a time; no recursion.

    f, b and u are ticks of a bucket of size 1. Into forward the wire takes the buckets that it
    prefers, the newest unless told, and else the first that came; in `pieces` of a tick, or whole.
    """
    count = len(wire)
    sizes = sizes or [1] * count
    if overlap == "forward" and prefer is None:
        prefer = range(count - 1, -1, -1)
    tasks = []  # [duration, message that must be there or None, messages it lets go, ends a step]
    for k in range(iterations):
        for i in reversed(range(count)):
            late = overlap == "forward"
            needs = (k - 1, i) if late and k else None
            tasks.append([sizes[i] * (f + (u if late else 0)), needs, [], False])
        for i in range(count):
            lets_go = [(k, i)] if overlap in ("backward", "forward") else []
            tasks.append([sizes[i] * b, None, lets_go, False])
        if overlap == "none":
            tasks[-1][2] = [(k, i) for i in range(count)]
        if overlap != "forward":
            for i in range(count):
                early = overlap == "iteration"
                needs = (k - 1, i) if early and k else (k, i) if not early else None
                tasks.append([sizes[i] * u, needs, [], False])
            if overlap == "iteration":
                tasks[-1][2] = [(k, i) for i in range(count)]
        tasks[-1][3] = True
    ends, queue, arrives = [], [], {}  # queue: [message, ticks that it still takes]
    sending, running = None, None  # (entry of the queue, end), (task, end)
    now = 0
    while tasks or running:
        if sending and sending[1] == now:
            (message, left), sending = sending[0], None
            if left == 0:
                arrives[message] = now + latency
            else:
                queue.append([message, left])
        if running and running[1] == now:
            queue += [[message, wire[message[1]]] for message in running[0][2]]
            ends += [now] if running[0][3] else []
            running = None
        if not running and tasks and (tasks[0][1] is None or arrives.get(tasks[0][1], 1e9) <= now):
            task = tasks.pop(0)
            running = (task, now + task[0])
        if not sending and queue:
            if prefer is not None:
                queue.sort(key=lambda entry: prefer.index(entry[0][1]))
            message, left = queue.pop(0)
            now_sent = 1 if pieces else left
            sending = ([message, left - now_sent], now + now_sent)
        now += 1
        assert now < 100_000
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_pipeline_equals_a_ticking_clock(overlap: str):
    generator = np.random.default_rng(0)
    for _ in range(60):
        count = int(generator.integers(1, 7))
        f, b, u = (int(x) for x in generator.integers(1, 6, 3))
        wire = [int(x) for x in generator.integers(1, 12, count)]
        latency = int(generator.integers(0, 9))
        seconds = ticking_seconds(f, b, u, wire, latency, overlap)
        found = timeline(count * f, count * b, count * u, wire, latency, overlap)
        assert found.seconds == pytest.approx(seconds), (f, b, u, wire, latency)
        later = timeline(count * f, count * b, count * u, wire, latency + found.slack, overlap)
        assert later.seconds == pytest.approx(found.seconds)
        later = timeline(count * f, count * b, count * u, wire, latency + found.slack + 1, overlap)
        assert later.seconds > found.seconds


def test_in_the_order_of_backward_the_next_forward_hides_nothing():
    wire = [10] * 10
    backward = timeline(30, 60, 0, wire, overlap="backward").seconds
    in_order = ticking_seconds(3, 6, 0, wire, 0, "forward", prefer=range(10))
    first_first = timeline(30, 60, 0, wire, overlap="forward").seconds
    assert in_order == pytest.approx(backward) and first_first < backward - 10


def drawn(seed: int, cases: int):
    """Ticks of forward, backward and update per size, of buckets on the wire, and their sizes."""
    generator = np.random.default_rng(seed)
    for _ in range(cases):
        count = int(generator.integers(1, 6))
        f, b, u = (int(x) for x in generator.integers(1, 6, 3))
        wire = [int(x) for x in generator.integers(1, 12, count)]
        yield f, b, u, wire, [int(x) for x in generator.integers(1, 4, count)]


def least_of(f, b, u, wire, sizes, overlap) -> float:
    return least(*(x * sum(sizes) for x in (f, b, u)), wire, overlap, sizes)


@pytest.mark.parametrize(
    ("overlap", "seconds"),
    [
        # Backward ends at 6, the wire needs 9 more ticks, a bucket 1 for its update, forward 3.
        ("none", 6 + 9 + 1 + 3),
        # All of it is on the wire from 2 on, and the last bucket is updated when it is there.
        ("backward", 2 + 9 + 1 + 3),
        # The last layer's bucket leaves at 2 and makes room for the two others: its last byte is
        # there at 11, and its layer is all that is left of forward.
        ("forward", 2 + 9 + 1 + 1),
        # The wire never stands still, and backward, an update and forward take 6 + 1 + 3.
        ("iteration", 10),
    ],
)
def test_the_least_time_is_what_is_found_by_hand(overlap: str, seconds: float):
    assert least(3, 6, 3, [5, 2, 2], overlap) == pytest.approx(seconds)
    assert least(3, 6, 3, [5, 2, 2], overlap, late=2) == pytest.approx(seconds + 2)


def test_where_the_wire_is_fast_the_first_layers_message_is_all_that_cannot_hide():
    """Its gradient is complete at 6, and all of forward is left when it is there."""
    assert least(3, 6, 0, [1, 1, 1], "forward") == pytest.approx(6 + 1 + 3)
    assert least(3, 6, 0, [0, 0, 0], "forward") == pytest.approx(6 + 3)
    assert least(3, 6, 3, [0, 0, 0], "backward") == pytest.approx(6 + 3 + 3)


def test_where_messages_need_no_gradient_a_slow_wire_is_all_that_binds():
    assert least(3, 6, 3, [4, 4, 4], "iteration") == 12
    assert least(3, 6, 3, [4, 4, 4], "iteration", late=1) == 12
    assert least(3, 6, 3, [12, 0, 0], "iteration") == 13  # updated before it leaves again


def test_into_forward_the_least_time_is_never_above_that_of_less_overlap():
    for case in drawn(seed=1, cases=300):
        none, backward, forward, _ = (least_of(*case, overlap) for overlap in OVERLAPS)
        assert forward <= backward + 1e-9 <= none + 2e-9, case


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_schedule_of_whole_buckets_takes_less_than_the_least_time(overlap: str):
    for f, b, u, wire, sizes in drawn(seed=2, cases=12):
        bound = least_of(f, b, u, wire, sizes, overlap)
        total = sum(sizes)
        predicted = timeline(total * f, total * b, total * u, wire, 0.0, overlap, sizes).seconds
        assert bound <= predicted + 1e-9
        orders = list(itertools.permutations(range(len(wire))))
        for prefer in orders[:: max(1, len(orders) // 12)] if overlap == "forward" else [None]:
            taken = ticking_seconds(f, b, u, wire, 0, overlap, prefer, sizes=sizes)
            assert bound <= taken + 1e-9, (f, b, u, wire, sizes, prefer)


def test_a_wire_that_drops_a_bucket_for_a_newer_one_attains_the_least_time():
    whole_is_worse = 0
    for f, b, _, wire, sizes in drawn(seed=3, cases=60):
        bound = least_of(f, b, 0, wire, sizes, "forward")
        taken = ticking_seconds(f, b, 0, wire, 0, "forward", pieces=True, sizes=sizes)
        assert taken == pytest.approx(bound), (f, b, wire, sizes)
        whole_is_worse += ticking_seconds(f, b, 0, wire, 0, "forward", sizes=sizes) > bound + 1e-9
    assert whole_is_worse > 5


def test_a_small_first_bucket_keeps_the_wire_busy_early():
    job = Job(26 * 2**20).as_ddp()
    assert job.bucket_shares == pytest.approx([1 / 26, 25 / 26])
    assert Job(1000).as_ddp().bucket_shares == [1.0]
    args = ("pmsgd", complete(4), GIGABIT, STEP)
    assert (
        predict(*args, job).seconds < predict(*args, replace(job, bucket_bytes=2**30)).seconds + 1
    )
    assert predict(*args, job).seconds < predict(*args, Job(26 * 2**20, 2**30)).seconds


@pytest.mark.parametrize("network", [ring(6), one_peer_exponential(6), bipartite_random_match(7)])
@pytest.mark.parametrize("early", [False, True])
def test_straggler_recursion_equals_node_by_node(network, early: bool):
    delays, slack, warm_up, steps = Delays(1.0, "exponential"), 0.3, 20, 60
    found = straggler_wait(network, delays, slack, early=early, settle=warm_up, steps=steps)
    generator = np.random.default_rng(0)
    n, means = network.num_nodes, [0.0]
    times = [0.0] * n
    for k in range(warm_up + steps):
        late = delays.draw(generator, n)
        finished = []
        for i in range(n):
            heard = [times[j] + (0 if early else late[j]) - slack for j in network.neighbors(i, k)]
            finished.append(max([times[i] + late[i], *heard]))
        times = finished
        means.append(sum(times) / n)
    assert found == pytest.approx((means[-1] - means[warm_up]) / steps)


def test_all_reduce_waits_for_the_slowest_and_neighbors_for_less():
    for delays in (Delays(0.2), Delays(0.2, "exponential")):
        everyone = straggler_wait(ring(16), delays, reach=lambda k: Reach.EVERYONE)
        one = straggler_wait(one_peer_hypercube(16), delays)
        few = straggler_wait(ring(16), delays)
        assert delays.seconds / 16 < one < everyone and few < everyone
    assert Delays(0.2, "exponential").mean_of_slowest(2) == pytest.approx(0.3)
    sampled = straggler_wait(complete(4), Delays(0.2, "exponential"), steps=4000)
    assert sampled == pytest.approx(0.2 * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.05)
    late = replace(STEP, delays=Delays(0.3))
    assert predict("pmsgd", complete(8), GIGABIT, late, MODEL).straggler == pytest.approx(0.3)
