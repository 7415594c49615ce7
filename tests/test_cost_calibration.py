"""Fits of the cost model: to what it makes itself, and to real runs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
import torch.distributed as dist
from launching import fork, run_as_main
from measured import TRUTH, benchmark

import decentlam
from decentlam.analysis.cost import Calibration, Job
from decentlam.lab.calibration import (
    Measurement,
    check,
    fit,
    held_out,
    load_calibration,
    load_measurements,
    save_calibration,
)

CALIBRATE = Path(__file__).parents[1] / "benchmarks" / "calibrate.py"


def test_fit_recovers_the_constants_of_exact_measurements():
    found = fit(benchmark(TRUTH))
    assert vars(found) == pytest.approx(vars(TRUTH), rel=1e-6)


def test_fit_is_close_on_noisy_measurements_and_on_other_numbers_of_nodes():
    found = fit(benchmark(TRUTH, noise=0.05))
    for name in ("wire", "all_reduce_wire", "copy_seconds_per_byte"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.15)
    others = check(found, benchmark(TRUTH, nodes=(16,)))
    assert max(abs(error.relative) for error in others) < 0.15


def test_no_constant_is_below_zero_and_what_was_not_measured_stays_nominal():
    fast = [replace(m, seconds=[0.8 * m.median]) for m in benchmark(Calibration())]
    assert min(vars(fit(fast)).values()) >= 0
    alone = [m for m in benchmark(TRUTH) if m.kind == "neighbors"]
    assert fit(alone).all_reduce_wire == 1.0
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([replace(alone[0], kind="none")])


def test_measured_networks_are_explained_and_eight_nodes_foreseen_from_four():
    """Medians of real runs between network namespaces, computing by a sleep; seconds."""
    rows = [
        # contender, kind, peers, overlap, buckets, four nodes, eight nodes
        ("DDP, 1 MB", "all-reduce", 0, "backward", (40, 8), 0.675, 1.464),
        ("one peer, after", "neighbors", 1, "none", (1, 1), 0.719, 1.342),
        ("two peers, after", "neighbors", 2, "none", (1, 1), 1.063, 2.182),
        ("one peer, hooks", "neighbors", 1, "backward", (40, 8), 0.419, 0.831),
        ("one peer, AWC", "neighbors", 1, "iteration", (1, 1), 0.387, 0.788),
    ]
    four, eight = [], []
    for name, kind, peers, overlap, buckets, at_four, at_eight in rows:
        for place, n, rate, size, alone, took, many in (
            (four, 4, 1e9, 40_000_000, 0.343, at_four, buckets[0]),
            (eight, 8, 1e8, 8_000_000, 0.625, at_eight, buckets[1]),
        ):
            place.append(
                Measurement(
                    name,
                    n,
                    rate,
                    size,
                    "sleep",
                    alone,
                    [took],
                    kind,
                    peers,
                    overlap,
                    buckets=many,
                    forward_fraction=0.12,
                )
            )
    known, foreseen = check(fit(four), four), check(fit(four), eight)
    assert max(abs(e.relative) for e in known) < 0.03
    assert max(abs(e.relative) for e in foreseen) < 0.15


def test_rounds_of_a_contender_are_joined_and_files_read_together(tmp_path: Path):
    record = {
        "contender": "a", "nodes": 4, "bandwidth": 1e9, "model_bytes": 4000, "kind": "neighbors",
        "compute": "sleep:300", "compute_seconds": 0.1, "seconds": 0.3, "buckets": [3000, 1000],
    }  # fmt: skip
    lines = [record, record | {"seconds": 0.5, "compute_seconds": 0.2}, {"left_out": "no such"}]
    one, other = tmp_path / "records.jsonl", tmp_path / "other.json"
    one.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other.write_text(json.dumps({"records": [record | {"nodes": 8}]}))
    joined, alone = load_measurements(one, other)
    assert list(joined.seconds) == [0.3, 0.5] and joined.compute == "sleep"
    assert joined.compute_seconds == pytest.approx(0.15)
    assert (joined.nodes, alone.nodes) == (4, 8)
    assert Job(4000, bucket_sizes=(3000, 1000)).bucket_shares == [0.75, 0.25]
    assert joined.about == "n = 4, 1 Gbit/s, 0.004 MB, sleep"


def test_the_command_fits_some_runs_and_checks_others(tmp_path: Path):
    files = [str(tmp_path / f"{n}.json") for n in (4, 8)]
    for n, file in zip((4, 8), files, strict=True):
        Path(file).write_text(json.dumps([m.__dict__ for m in benchmark(TRUTH, nodes=(n,))]))
    out = tmp_path / "constants.json"
    options = ["--held-out", files[1], "--out", str(out)]
    right = fork(run_as_main, tmp_path / "right", str(CALIBRATE), files[0], *options)
    right.join(runs.HANG_SECONDS)
    text = (tmp_path / "right").read_text()
    assert right.exitcode == 0, text
    assert "not seen by the fit, 42 measurements" in text
    assert text.count("off by 0.0% (median), 0.0% at most") == 2
    assert vars(load_calibration(out)) == pytest.approx(vars(TRUTH), rel=1e-6)
    wrong = fork(run_as_main, tmp_path / "wrong", str(CALIBRATE), str(out))
    wrong.join(runs.HANG_SECONDS)
    assert wrong.exitcode == 1
    assert "holds no list of records" in (tmp_path / "wrong").read_text()


def test_records_and_constants_travel_as_json(tmp_path: Path):
    record = {
        "contender": "DecentLaM one-peer", "nodes": 4, "bandwidth": None, "model_bytes": 4000,
        "compute": "sleep", "compute_seconds": 0.1, "seconds": [0.3, 0.1, 0.2], "bytes_sent": None,
        "kind": "neighbors", "peers": 1, "overlap": "forward", "straggler_seconds": 0.0,
    }  # fmt: skip
    path = tmp_path / "records.json"
    path.write_text(json.dumps({"machine": "a", "records": [record]}))
    (read,) = load_measurements(path)
    assert read.median == 0.2 and read.overlap == "forward"
    save_calibration(TRUTH, path)
    assert load_calibration(path) == TRUTH
    with pytest.raises(ValueError, match="no list of records"):
        load_measurements(path)
    with pytest.raises(ValueError, match="choose from all-reduce, neighbors, none"):
        Measurement.from_record(record | {"kind": "nope"})
    with pytest.raises(ValueError, match="cannot use the record"):
        Measurement.from_record({"contender": "a"})


@pytest.mark.parametrize(("fraction", "wire"), [(1.0, 0.32), (0.5, 0.16)])
def test_messages_of_16_bits_take_half_the_wire(fraction: float, wire: float):
    measured = Measurement(
        "DecentLaM", nodes=4, bandwidth=1e9, model_bytes=40_000_000, compute="sleep",
        compute_seconds=0.3, seconds=[0.6], kind="neighbors", peers=1, message_fraction=fraction,
    )  # fmt: skip
    assert measured.predicted(Calibration()) == pytest.approx(0.3 + wire)


def exchange_for_real(rounds: int) -> list[dict]:
    """Times of real messages of several sizes, to one peer, to two, and all-reduces."""
    rank, n, records = dist.get_rank(), dist.get_world_size(), []
    for size in (2_000_000, 4_000_000, 8_000_000):
        for peers in (0, 1, 2):
            x = torch.zeros(size // 4)
            offsets = [1, -1][:peers]
            inbox = [torch.empty_like(x) for _ in offsets]
            times = []
            for _ in range(rounds):
                dist.barrier()
                start = time.perf_counter()
                time.sleep(0.005)
                works = [dist.irecv(b, (rank - o) % n) for b, o in zip(inbox, offsets, strict=True)]
                works += [dist.isend(x, (rank + o) % n) for o in offsets]
                works += [] if peers else [dist.all_reduce(x, async_op=True)]
                for work in works:
                    work.wait()
                times.append(time.perf_counter() - start)
            records.append(
                {
                    "contender": f"{peers} {size}",
                    "nodes": n,
                    "bandwidth": None,
                    "model_bytes": size,
                    "compute": "sleep",
                    "compute_seconds": 0.005,
                    "seconds": times[1:],
                    "kind": "neighbors" if peers else "all-reduce",
                    "peers": peers,
                    "overlap": "none",
                    "buckets": 1,
                }
            )
    return records


@pytest.mark.slow
def test_real_exchanges_are_foreseen_within_a_third():
    records = decentlam.launch(exchange_for_real, nodes=4, args=(15,))[0]
    errors = held_out([Measurement.from_record(record) for record in records])
    middle = sorted(abs(error.relative) for error in errors)[len(errors) // 2]
    assert middle < 1 / 3, [(e.contender, round(e.relative, 2)) for e in errors]
