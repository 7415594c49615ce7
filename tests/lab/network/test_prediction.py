"""The predicted time of a step: by hand, and against steps that were measured."""

from __future__ import annotations

import statistics

import pytest

from decentlam.lab.network.prediction import FRAME, Traffic, predict_step

ALL_REDUCE, ONE_PEER = Traffic(None, ddp_buckets=True), Traffic(1)
HALF, FLAT, EARLY = Traffic(1, message_fraction=0.5), Traffic(1, "nothing"), Traffic(1, "step")

# Milliseconds of a step in docs/results/time.md: nodes, bytes, bits per second, local training and
# its update, then each contender; and the median and largest error that `prediction` states.
MEASURED = {
    "100 Mbit/s": (
        (8, 8_000_000, 1e8, 636, 13),
        [
            (ALL_REDUCE, 1624), (ONE_PEER, 1007), (ONE_PEER, 963), (HALF, 670), (HALF, 666),
            (EARLY, 685), (EARLY, 704), (EARLY, 704),
        ],
        (0.03, 0.095),
    ),
    "1 Gbit/s": (
        (4, 40_000_000, 1e9, 354, 23),
        [
            (ALL_REDUCE, 809), (FLAT, 741), (ONE_PEER, 493), (ONE_PEER, 498), (HALF, 432),
            (HALF, 428), (ONE_PEER, 506), (HALF, 458), (ONE_PEER, 518), (EARLY, 414), (EARLY, 452),
            (EARLY, 428),
        ],
        (0.105, 0.215),
    ),
    "1 Gbit/s, real compute": (
        (4, 4 * 9_457_152, 1e9, 155, 29),
        [
            (ALL_REDUCE, 664), (ONE_PEER, 429), (ONE_PEER, 472), (HALF, 384), (HALF, 357),
            (ONE_PEER, 473), (ONE_PEER, 472), (EARLY, 410), (EARLY, 412), (EARLY, 408),
        ],
        (0.17, 0.395),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_error_against_measured_steps_is_the_one_that_is_stated(name: str):
    (nodes, size, bandwidth, local, update), rows, (median, most) = MEASURED[name]
    compute = (local - update) / 1e3
    errors = [
        predict_step(
            traffic, nodes, size, bandwidth, compute / 3, 2 * compute / 3, update / 1e3
        ).seconds
        / (ms / 1e3)
        - 1
        for traffic, ms in rows
    ]
    assert statistics.median(map(abs, errors)) < median
    assert max(map(abs, errors)) < most
    assert max(errors) < 0.02  # what the wire allows, and rarely more


def test_a_step_by_hand():
    # 16 buckets of 1 MB at 1 MB/s, headers included: the first leaves after 2 s of 32 s backward.
    step = {"nodes": 8, "model_bytes": 16 * 10**6, "bandwidth": 8e6 * FRAME}
    slow = predict_step(ONE_PEER, forward=8, backward=32, update=1, **step)
    assert (slow.compute, slow.wire) == (41, pytest.approx(16))
    assert slow.exposed == pytest.approx(1)  # the last bucket leaves when backward is over
    fast = predict_step(ONE_PEER, forward=8, backward=8, **step)
    assert fast.exposed == pytest.approx(0.5 + 16 - 8)  # the wire is busy once the first has left
    assert predict_step(EARLY, forward=8, backward=4, **step).exposed == pytest.approx(4)
    assert predict_step(FLAT, forward=8, backward=4, **step).exposed == pytest.approx(16)
    assert predict_step(HALF, forward=8, backward=0, **step).exposed == pytest.approx(8)
    assert predict_step(Traffic(None), forward=8, backward=0, **step).wire == pytest.approx(28)
    no_limit = predict_step(ONE_PEER, 8, 16 * 10**6, None, 1, 2)
    assert (no_limit.wire, no_limit.exposed, no_limit.seconds) == (0, 0, 3)


def test_every_bucket_pays_the_latency_of_its_rounds():
    latency = {"forward": 0, "backward": 0, "latency_seconds": 1.0}
    assert predict_step(Traffic(2), 8, 1000, None, **latency).wire == 16 * 2
    assert predict_step(ALL_REDUCE, 8, 1000, None, **latency).wire == 2 * 7


def test_ddp_fills_buckets_of_1_and_25_mib():
    shares = ALL_REDUCE.bucket_shares(40 * 2**20)
    assert [round(40 * share) for share in shares] == [1, 25, 14]
    assert ALL_REDUCE.bucket_shares(1000) == [1.0]
    assert sum(ONE_PEER.bucket_shares(1000)) == 1
