"""The study of iteration times on emulated networks."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decentlam.lab.commands.app import app
from decentlam.lab.network import unavailable
from decentlam.lab.network.contenders import BASE, CONTENDERS, LOCAL
from decentlam.lab.studies import STUDIES, runtime
from decentlam.lab.studies.study import perform
from tests.lab.network.namespaces import left_of

ONE_PEER = "DecentLaM one-peer, overlap"


@pytest.fixture
def network() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(f"no emulated network: {reason}")


TINY = runtime.TimingStudy(
    clusters=(runtime.Cluster(2, "200Mbit", "sleep:16", parameters=50_000),),
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
    title = "2 nodes, 200Mbit, 0.05M parameters, sleep:16"
    assert ticks == [title] * 3
    assert {"runtime.png", "runtime.svg", "table.md"} <= {path.name for path in result.files}
    rows = {row["contender"]: row for row in result.table}
    assert rows[BASE]["of_DDP"] == rows[BASE]["highest"] == 1
    assert rows[LOCAL]["ms"] >= 16 and rows[LOCAL]["MB_sent"] < 0.01
    for name in (BASE, ONE_PEER):  # with two nodes, an all-reduce moves one model as well
        assert 0.2 <= rows[name]["MB_sent"] < 0.25
        parts = [rows[name][f"{part}_ms"] for part in ("compute", "update", "exposed")]
        assert sum(parts) == pytest.approx(rows[name]["ms"], rel=0.2)
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == 6 and json.loads(lines[0])["network"] == "200Mbit"
    timed = [json.loads(line) for line in lines]
    assert {r["bandwidth"] for r in timed} == {"200Mbit"} and {r["nodes"] for r in timed} == {2}
    assert min(r["seconds"] for r in timed) >= 0.016  # they slept
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


def test_loopback_is_for_runtime_only(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "bias", "--loopback", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "--loopback is for runtime" in result.output


def test_recipes_of_the_study() -> None:
    assert {cluster.nodes for cluster in runtime.recipe().clusters} == {4, 8}
    assert {cluster.nodes for cluster in runtime.recipe(nodes=6).clusters} == {6}
    (cluster,) = runtime.recipe(quick=True, loopback=True).clusters
    assert cluster.bandwidth is None
    assert all(name in CONTENDERS for name in runtime.USUAL)
    with pytest.raises(ValueError, match="2 nodes or more"):
        runtime.recipe(nodes=1)
