"""The cost model's pipeline against a clock that ticks, and late nodes one by one."""

from __future__ import annotations

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


def ticking_seconds(f, b, u, wire, latency, overlap, newest_first=True, iterations=8) -> int:
    """Ticks per iteration of one node and its wire, moved one tick at a time; no recursion."""
    count = len(wire)
    tasks = []  # [duration, message that must be there or None, messages it lets go, ends a step]
    for k in range(iterations):
        for layer in range(count):
            bucket = count - 1 - layer
            late = overlap == "forward"
            needs = (k - 1, bucket) if late and k else None
            tasks.append([f + (u if late else 0), needs, [], False])
        for i in range(count):
            tasks.append([b, None, [(k, i)] if overlap in ("backward", "forward") else [], False])
        if overlap == "none":
            tasks[-1][2] = [(k, i) for i in range(count)]
        if overlap != "forward":
            for i in range(count):
                early = overlap == "iteration"
                needs = (k - 1, i) if early and k else (k, i) if not early else None
                tasks.append([u, needs, [], False])
            if overlap == "iteration":
                tasks[-1][2] = [(k, i) for i in range(count)]
        tasks[-1][3] = True
    ends, queue, arrives = [], [], {}
    sending, running = None, None  # (message, end), (task, end)
    now = 0
    while tasks or running:
        if sending and sending[1] == now:
            arrives[sending[0]], sending = now + latency, None
        if running and running[1] == now:
            queue += running[0][2]
            ends += [now] if running[0][3] else []
            running = None
        if not running and tasks and (tasks[0][1] is None or arrives.get(tasks[0][1], 1e9) <= now):
            task = tasks.pop(0)
            running = (task, now + task[0])
        if not sending and queue:
            message = queue.pop(-1 if overlap == "forward" and newest_first else 0)
            sending = (message, now + wire[message[1]])
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
    in_order = ticking_seconds(3, 6, 0, wire, 0, "forward", newest_first=False)
    first_first = timeline(30, 60, 0, wire, overlap="forward").seconds
    assert in_order == pytest.approx(backward) and first_first < backward - 10


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
