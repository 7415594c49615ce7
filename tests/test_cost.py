"""The cost of an iteration against closed forms worked out by hand."""

from __future__ import annotations

import math
import runpy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from decentlam.algorithms import DSGD, Reach, make
from decentlam.analysis.cost import (
    Calibration,
    Compute,
    Delays,
    Job,
    Link,
    predict,
    timeline,
)
from decentlam.topology import (
    complete,
    one_peer_hypercube,
    resolve,
    ring,
    star,
)

GIGABIT = Link(bytes_per_second=1.25e8)
STEP = Compute(0.1, 0.2)
MODEL = Job(40_000_000)


def test_two_nodes_without_latency_take_bytes_over_bandwidth():
    # 40 MB at 125 MB/s are 0.32 s, after 0.3 s of compute; 1e-9 s per byte of update are 0.04 s.
    work = replace(STEP, update_seconds_per_byte=1e-9)
    job = replace(MODEL, bucket_bytes=2**30)  # of two buckets, one is updated as the other travels
    found = predict("decentlam", ring(2), GIGABIT, work, job, overlap=False)
    assert found.exposed == pytest.approx(0.32)
    assert (found.compute, found.update) == pytest.approx((0.3, 0.04))
    assert found.seconds == pytest.approx(0.66) and found.bytes_sent == 40_000_000


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_all_reduce_sends_two_n_minus_one_over_n_and_one_peer_wins_by_that(n: int):
    args = (GIGABIT, Compute(0.0, 0.0), MODEL)
    everyone = predict("pmsgd", complete(n), *args)
    one = predict("decentlam", one_peer_hypercube(n), *args)
    assert everyone.bytes_sent == pytest.approx(2 * (n - 1) / n * MODEL.model_bytes)
    assert everyone.seconds / one.seconds == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize(("how", "rounds"), [("ring", 14), ("halving", 6)])
def test_latency_of_an_all_reduce_counts_per_round_and_bucket(how: str, rounds: int):
    job = Job(4 * 2**20, 2**20, all_reduce=how)
    found = predict("pmsgd", complete(8), Link(1e-3), Compute(0.0, 0.0), job)
    assert found.seconds == pytest.approx(4 * rounds * 1e-3)


def test_processes_of_a_node_share_its_link_and_are_all_in_the_ring():
    job = replace(MODEL, processes_per_node=8)
    found = predict("pmsgd", complete(8), GIGABIT, STEP, job)
    assert found.bytes_sent == pytest.approx(2 * 63 / 64 * MODEL.model_bytes)


@pytest.mark.parametrize("overlap", [False, True, "forward"])
def test_without_communication_an_iteration_is_compute(overlap):
    for method, network, link in [
        ("decentlam", ring(1), GIGABIT),
        ("pmsgd", complete(1), GIGABIT),
        ("decentlam", ring(4), Link()),
    ]:
        found = predict(method, network, link, STEP, MODEL, overlap)
        assert found.seconds == pytest.approx(0.3) and found.exposed == pytest.approx(0)


def test_methods_differ_by_payloads_and_reach():
    def seconds(method: str, overlap: str = "none") -> float:
        return predict(method, ring(8), GIGABIT, STEP, MODEL, overlap).seconds

    assert seconds("dmsgd") == seconds("decentlam") == pytest.approx(0.3 + 0.64)
    assert seconds("da-dmsgd") == pytest.approx(0.3 + 1.28)
    assert seconds("awc-dmsgd", "backward") == pytest.approx(0.64)  # behind the whole iteration
    slow = predict("slowmo", one_peer_hypercube(8), GIGABIT, STEP, MODEL, "none")
    assert slow.exposed == pytest.approx(0.32 * (47 + 1.75) / 48)  # an all-reduce every 48 steps


def test_changing_and_uneven_topologies_are_averaged_over_steps_at_the_busiest_node():
    assert predict("dmsgd", star(5), GIGABIT, STEP, MODEL, False).bytes_sent == 4 * 40_000_000
    cuboid = resolve("one-peer-hyper-cuboid", 12)  # groups of 2, 2 and 3: 1, 1 and 2 messages
    assert predict("dmsgd", cuboid, GIGABIT, STEP, MODEL, False).exposed == pytest.approx(
        0.32 * 4 / 3
    )


def test_time_falls_with_bandwidth_and_rises_with_latency_and_all_reduce_with_nodes():
    def seconds(rate=1e8, latency=1e-4, n=8, method="decentlam", overlap="backward"):
        network = one_peer_hypercube(n)
        return predict(method, network, Link(latency, rate), STEP, MODEL, overlap).seconds

    for method in ("decentlam", "pmsgd", "awc-dmsgd"):
        rates = [seconds(rate=r, method=method) for r in (1e7, 1e8, 1e9, 1e10)]
        waits = [seconds(latency=a, method=method) for a in (0.0, 1e-4, 1e-2, 1.0)]
        assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
        assert waits == sorted(waits) and waits[0] < waits[-1]
    grows = [seconds(n=n, method="pmsgd") for n in (2, 4, 8, 64, 1024)]
    assert grows == sorted(grows) and grows[0] < grows[-1]
    assert len({seconds(n=n) for n in (2, 4, 64, 1024)}) == 1  # one peer: flat in n
    hidden = [seconds(overlap=o) for o in ("none", "backward", "forward")]
    assert hidden == pytest.approx(sorted(hidden, reverse=True))


def test_an_algorithm_of_ones_own_is_priced_with_its_all_reduce():
    source = Path(__file__).parents[1] / "examples" / "own_algorithm.py"
    own = runpy.run_path(str(source))["GossipPGA"](period=10)
    found = predict(own, one_peer_hypercube(8), GIGABIT, STEP, MODEL, "none")
    assert found.exposed == pytest.approx(0.32 * (9 + 1.75) / 10)


@dataclass(frozen=True)
class EveryoneAtFirst(DSGD):
    """Averages exactly in its first steps only."""

    @property
    def warm_up(self) -> int:
        return 5

    def reach(self, index: int) -> Reach:
        return Reach.EVERYONE if index < 5 else Reach.NEIGHBORS


def test_steps_while_warming_up_are_not_priced_and_long_periods_are():
    late = replace(STEP, delays=Delays(0.3))
    args = (one_peer_hypercube(8), GIGABIT, late, MODEL, "none")
    assert predict(EveryoneAtFirst(), *args) == predict("dsgd", *args)
    slow = make("slowmo", tau=20_000)
    share = predict(slow, *args).bytes_sent / MODEL.model_bytes - 1
    assert share == pytest.approx(0.75 / 20_000)


def test_auto_is_none_or_backward():
    args = ("decentlam", ring(8), GIGABIT, STEP, MODEL)
    assert predict(*args, "auto") == predict(*args, "backward") == predict(*args, True)
    assert predict(*args, "forward").seconds < predict(*args, "auto").seconds


def test_values_out_of_range_are_refused():
    for wrong in (
        lambda: Link(-1.0),
        lambda: Link(0.0, 0.0),
        lambda: Compute(math.nan, 0.0),
        lambda: Compute.split(1.0, 2.0),
        lambda: Job(0),
        lambda: Delays(1.0, "nope"),
        lambda: Calibration(wire=-1.0),
        lambda: timeline(1.0, 1.0, 0.0, [1.0], overlap="nope"),
        lambda: predict("decentlam", ring(4), GIGABIT, STEP, MODEL, "iteration"),
    ):
        with pytest.raises(ValueError):
            wrong()
