"""Iteration times on emulated networks: what is timed, how it is split, and the study."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import left_of
from typer.testing import CliRunner

from decentlam.lab.calibration import fit, load_measurements
from decentlam.lab.cli import app
from decentlam.lab.emulation import unavailable
from decentlam.lab.emulation.contenders import BASE, LOCAL, choose, contenders
from decentlam.lab.emulation.facts import explained
from decentlam.lab.emulation.models import make_model, sleeping
from decentlam.lab.emulation.results import bound, left_out, limits, split, summary
from decentlam.lab.emulation.setting import Setting
from decentlam.lab.emulation.timing import measure
from decentlam.lab.studies import STUDIES, runtime
from decentlam.lab.study import perform
from decentlam.runtime.overlap import OverlapChoice

ONE_PEER = "DecentLaM one-peer, overlap"


@pytest.fixture
def network() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")


def test_a_sleeping_model_finishes_its_gradients_layer_by_layer() -> None:
    model = sleeping(parameters=101, seconds=0.3, forward_share=0.2, layers=4)
    arrived: list[tuple[int, float]] = []
    for k, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(
            lambda _, k=k: arrived.append((k, time.perf_counter()))
        )
    begun = time.perf_counter()
    loss = model(torch.ones(1)).sum()
    middle = time.perf_counter()
    loss.backward()
    assert middle - begun >= 0.06 and time.perf_counter() - middle >= 0.24
    assert [k for k, _ in arrived] == [3, 2, 1, 0]
    times = [middle, *(at for _, at in arrived)]
    assert all(b - a >= 0.3 * 0.8 / 4 for a, b in itertools.pairwise(times))
    # loss = 1 + sum over layers of weight[0]
    for p in model.parameters():
        expected = torch.zeros(p.shape)
        expected[0] = 1.0
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=0)
    assert sum(p.numel() for p in model.parameters()) == 101


def test_models_have_the_size_they_are_said_to_have() -> None:
    for name in ("convnet-0.2M", "transformer-2M", "resnet50"):
        model, _ = make_model(name)
        size = sum(p.numel() for p in model.parameters())
        assert size == Setting(model=name).size
        asleep, _ = make_model(name, sleep_seconds=0.0)
        assert sum(p.numel() for p in asleep.parameters()) == size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "alexnet"}, "unknown model 'alexnet'; choose from convnet"),
        ({"compute": "sleep"}, "real or sleep:MILLISECONDS"),
        ({"parameters": 10**6}, "needs sleeping compute"),
        ({"only": ("SGP",)}, "unknown contender 'SGP'; choose from local only"),
        ({"rounds": 0}, "1 or more"),
        ({"straggler_ms": -1.0}, "0 ms or more"),
        ({"buckets": 0}, "1 bucket or more, got 0"),
        ({"compute": "sleep:1", "forward_share": 1.5}, "between 0 and 1, got 1.5"),
        ({"forward_share": 0.1}, "only sleeping compute"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


def record(contender: str, number: int, seconds: float, step: float, wait: float) -> dict[str, Any]:
    spent = {"seconds": seconds, "step_seconds": step, "wait_seconds": wait, "bytes_sent": 4e6}
    spent |= {"forward_seconds": 0.1, "cpu_seconds": 0.05, "buckets": [4]}
    return {"round": number, "contender": contender, **spent}


def test_times_are_split_and_compared_round_by_round() -> None:
    local = [record(LOCAL, k, 0.10, 0.02, 0.0) for k in range(3)]
    ddp = [record(BASE, k, s, 0.02, 0.0) for k, s in enumerate((0.20, 0.30, 0.40))]
    mine = [record(ONE_PEER, k, s, 0.07, 0.04) for k, s in enumerate((0.20, 0.15, 0.16))]
    # Compute 0.10 - 0.02, update 0.07 - 0.04, the rest is exposed.
    found = split(mine[0], local[0])
    assert found == pytest.approx({"compute": 0.08, "update": 0.03, "exposed": 0.09})
    gone = {"round": 0, "contender": "x", "left_out": "no such overlap"}
    asleep = Setting(compute="sleep:80", parameters=10**7)
    records = explained([*local, *ddp, *mine, gone], asleep, 4, "1Gbit")
    rows = {row["contender"]: row for row in summary(records)}
    assert list(rows) == [LOCAL, BASE, ONE_PEER]
    ours = rows[ONE_PEER]  # 1, 0.5 and 0.4 of DDP
    assert (ours["of_DDP"], ours["lowest"], ours["highest"]) == pytest.approx((0.5, 0.4, 1.0))
    assert ours["speed_up"] == pytest.approx(2) and ours["MB_sent"] == 4
    assert ours["cpu_ms"] == pytest.approx(50)
    # A third of 0.08 s is forward. 40 MB in frames of 1448 bytes and 66 of headers take 0.335 s,
    # and one bucket leaves after backward; of two, the first leaves in its midst, and is updated
    # while the second is on its way.
    timed = next(r for r in records if r["contender"] == ONE_PEER)
    wire = 0.32 * 1514 / 1448
    assert bound(timed) == pytest.approx(0.08 + wire + 0.02)
    assert bound({**timed, "buckets": [5, 5]}) == pytest.approx(0.16 / 3 + wire + 0.01)
    assert bound({**timed, "overlap": "iteration"}) == pytest.approx(wire + 0.02)
    assert bound({**timed, "bandwidth": None}) == pytest.approx(0.10)
    assert left_out([*local, gone]) == ["Left out: x: no such overlap"]
    assert "1.75 models of 40 MB" in limits(8, 10**7)


def test_the_two_that_all_are_compared_with_are_always_there() -> None:
    assert list(choose((ONE_PEER,))) == [LOCAL, BASE, ONE_PEER]


def test_a_mode_that_is_found_by_trying_is_timed_after_the_trial_and_only_when_named() -> None:
    auto = "DecentLaM one-peer, auto"
    assert auto not in choose(()) and auto not in runtime.USUAL
    choice = OverlapChoice("auto")
    for _ in range(choose((auto,))[auto].warm_up):
        choice.step_ended()
    assert not choice.undecided


@pytest.mark.parametrize(
    ("name", "kind", "peers", "overlap"),
    [
        (LOCAL, "none", 0, "none"),
        (BASE, "all-reduce", 0, "backward"),
        ("PmSGD", "all-reduce", 0, "backward"),
        ("raw exchange, 2 peers", "neighbors", 2, "none"),
        ("DecentLaM ring, into forward", "neighbors", 2, "forward"),
        ("DecentLaM one-peer, no overlap", "neighbors", 1, "none"),
        ("DecentLaM sym. exponential, overlap", "neighbors", 2, "backward"),
        ("AWC-DmSGD one-peer", "neighbors", 1, "iteration"),
        ("DecentLaM one-peer, overlap, 16 bits", "neighbors", 1, "backward"),
    ],
)
def test_a_record_tells_what_was_sent_and_hidden(
    name: str, kind: str, peers: int, overlap: str
) -> None:
    late = Setting(compute="sleep:100", straggler_ms=80.0, forward_share=0.2)
    timed = [record(n, 0, 0.3, 0.02, 0.0) for n in dict.fromkeys((LOCAL, BASE, name))]
    unfinished = record(name, 1, 0.3, 0.02, 0.0)  # of a round without DDP
    found = {r["contender"]: r for r in explained([*timed, unfinished], late, 8, "1Gbit")}
    assert len(found) == len(timed)
    mine = found[name]
    assert (mine["kind"], mine["peers"], mine["overlap"]) == (kind, peers, overlap)
    assert mine["message_fraction"] == (0.5 if "16 bits" in name else 1.0)
    assert mine["compute_seconds"] == pytest.approx(0.3 - 0.08 / 8)
    assert mine["bandwidth"] == 1e9 and mine["forward_fraction"] == 0.2
    longest = {"none": 0.08 / 8, "all-reduce": 0.08}.get(kind)
    assert longest is None or mine["straggler_seconds"] == pytest.approx(longest, rel=1e-3)
    assert 0.08 / 8 < mine["straggler_seconds"] + 1e-4 < 0.0802


TINY = runtime.Runtime(
    cases=(runtime.Case(2, "200Mbit", "sleep:16", parameters=50_000),),
    only=(ONE_PEER,),
    rounds=2,
    iterations=3,
)


@pytest.mark.system
@pytest.mark.netns
def test_the_study_runs_on_emulated_links(
    network: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ticks: list[str] = []
    result = perform(STUDIES["runtime"], TINY, tmp_path, lambda *tick: ticks.append(tick[2]))
    assert ticks[0].startswith("6 runs, about ")
    title = "2 nodes, 200Mbit, 0.05M parameters, sleep:16"
    told = [title, *(f"{title}, {name}" for name in (LOCAL, BASE, ONE_PEER) for _ in range(2))]
    assert sorted(ticks[1:-1]) == sorted(told)
    assert {"runtime.png", "runtime.svg", "table.md"} <= {path.name for path in result.files}
    rows = {row["contender"]: row for row in result.table}
    assert rows[BASE]["of_DDP"] == "1.00 (1.00-1.00)"
    assert rows[LOCAL]["ms"] >= 16 and float(rows[LOCAL]["MB_sent"]) < 0.01
    for name in (BASE, ONE_PEER):  # with two nodes, an all-reduce moves one model as well
        assert 0.2 <= float(rows[name]["MB_sent"]) < 0.25
        parts = [rows[name][f"{part}_ms"] for part in ("compute", "update", "exposed")]
        assert sum(parts) == pytest.approx(rows[name]["ms"], rel=0.2)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[0])["network"] == "200Mbit"
    measured = {m.contender: m for m in load_measurements(tmp_path / "records.jsonl")}
    ours, ddp = measured[ONE_PEER], measured[BASE]
    assert (ours.kind, ours.peers, ours.overlap) == ("neighbors", 1, "backward")
    assert (ddp.kind, ddp.overlap) == ("all-reduce", "backward")
    assert (ours.nodes, ours.bandwidth, ours.compute) == (2, 200e6, "sleep")
    assert len(ours.seconds) == 2 and ours.forward_fraction == pytest.approx(1 / 3)
    assert sum(ours.buckets) == sum(ddp.buckets) == ours.model_bytes == 200_000
    assert min(ours.compute_seconds, ours.median) >= 0.016  # they slept
    assert fit(measured.values()).overhead_seconds < 1
    assert left_of(os.getpid()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.system
def test_the_study_runs_on_loopback_without_root() -> None:
    setting = runtime.recipe(nodes=2, quick=True, loopback=True)
    setting = replace(setting, only=(ONE_PEER,), rounds=1, iterations=2)
    records = runtime.run(setting)
    assert {r["contender"] for r in records} == {LOCAL, BASE, ONE_PEER}
    assert {row["network"] for row in runtime.table(records)} == {"loopback"}
    assert any("loopback" in note for note in runtime.notes(setting, records))


@pytest.mark.system
@pytest.mark.netns
def test_what_was_measured_is_kept_when_a_case_fails(network: None) -> None:
    lost = replace(TINY.cases[0], parameters=10**13)  # for which there is no memory
    setting = replace(TINY, cases=(TINY.cases[0], lost), rounds=1)
    records = runtime.run(setting)
    rows = runtime.table(records)
    assert [row["contender"] for row in rows] == [LOCAL, BASE, ONE_PEER]
    assert any("the rest of 2 nodes" in note for note in runtime.notes(setting, records))
    assert list(runtime.figures(records)) == ["runtime"]
    with pytest.raises(RuntimeError, match="memory"):
        runtime.run(replace(setting, cases=(lost,)))


def test_loopback_is_for_runtime_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "bias", "--loopback", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "--loopback is for runtime" in result.output


def test_recipes_of_the_study() -> None:
    assert {case.nodes for case in runtime.recipe().cases} == {4, 8}
    assert {case.nodes for case in runtime.recipe(nodes=6).cases} == {6}
    (case,) = runtime.recipe(quick=True, loopback=True).cases
    assert case.bandwidth is None
    assert all(name in contenders(with_decent_dp=True) for name in runtime.USUAL)
    with pytest.raises(ValueError, match="2 nodes or more"):
        runtime.recipe(nodes=1)
    with pytest.raises(ValueError, match="2 nodes or more"):
        measure(Setting(), 1, None)
