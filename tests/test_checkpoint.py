"""A run that was saved and resumed is the run that never stopped, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from runs_checkpoint import (
    CASES,
    ON_TWO,
    OTHER_BUCKETS,
    SAVED_AT,
    STEPS,
    build,
    resume_and_run,
    resume_on_two,
    resume_with_other_choices,
    run_and_save,
    tensors,
)
from torch import Tensor

import decentlam


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(directory: Path) -> list[dict[str, Any]]:
    return runs.run_processes(run_and_save, 4, (str(directory),))


@pytest.fixture(scope="module")
def resumed(directory: Path, saved: Any) -> list[dict[str, Any]]:
    return runs.run_processes(resume_and_run, 4, (str(directory),))


@pytest.mark.parametrize("case", CASES)
def test_saving_does_not_disturb_the_run(case: str, saved: Any) -> None:
    assert [process[case][3] for process in saved] == [False] * 4


@pytest.mark.parametrize("case", CASES)
def test_resuming_in_new_processes_equals_the_uninterrupted_run(
    case: str, saved: Any, resumed: Any
) -> None:
    nodes, per_node = (2, 2) if case == "2x2" else (4, 1)
    for before, after in zip(saved, resumed, strict=True):
        _, expected, expected_numbers, _ = before[case]
        facts, _, found, found_numbers = after[case]
        assert facts == decentlam.Resumed(SAVED_AT, nodes, per_node, averaged=False)
        for name in expected:
            assert torch.equal(found[name], expected[name]), name
        assert found.keys() == expected.keys()
        assert found_numbers == expected_numbers


@pytest.mark.parametrize("case", OTHER_BUCKETS)
def test_other_buckets_hold_the_same_and_the_run_goes_on_up_to_rounding(
    case: str, saved: Any, resumed: Any
) -> None:
    """Vectorised kernels round the ends of a bucket differently."""
    for before, after in zip(saved, resumed, strict=True):
        at_save, expected, _, _ = before[case]
        _, at_load, found, _ = after[f"{case} in other buckets"]
        for name in expected:
            if not name.startswith("state") or case != "2x2":  # parts are cut elsewhere
                assert torch.equal(at_load[name], at_save[name]), name
                torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_meta_says_what_was_saved(directory: Path, saved: Any) -> None:
    (save,) = (directory / "2x2").iterdir()
    assert save.name == f"000001-step-{SAVED_AT}"
    meta = json.loads((save / "process-00003.json").read_text())
    assert {name: meta[name] for name in ("rank", "num_nodes", "processes_per_node", "step")} == {
        "rank": 3, "num_nodes": 2, "processes_per_node": 2, "step": SAVED_AT,
    }  # fmt: skip
    assert meta["method"] == "DecentLaM" and meta["saved"] == ["scheduler"]
    assert meta["versions"]["torch"] == torch.__version__
    assert sorted(f.name for f in save.iterdir()) == [
        f"process-{r:05d}.{kind}" for r in range(4) for kind in ("json", "pt")
    ]
    assert sorted(p.name for p in directory.iterdir()) == sorted(CASES), "nothing is left behind"


def test_a_run_that_goes_on_with_another_choice_says_so_and_how_to_keep_the_old_one(
    tmp_path: Path,
) -> None:
    """The links are measured at every start, and the answer may be another one."""
    told, of_others = runs.run_processes(resume_with_other_choices, 2, (str(tmp_path),))
    (had,) = told["had"]
    before = f"was saved with topology='{had}', message_dtype=None, bucket_bytes=None; from here on"
    (bits,), (network,) = told["16 bits"], told["another topology"]
    assert before in bits and "message_dtype=torch.float16" in bits
    assert before in network and network.count("topology='") == 3  # both, and "auto"
    assert told["the same"] == told["other buckets"] == []
    assert not any(texts for name, texts in of_others.items() if name != "had")


@pytest.fixture(scope="module")
def on_two(directory: Path, saved: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    alone = build("slowmo")
    alone.train(range(SAVED_AT))
    decentlam.save_checkpoint(directory / "slowmo alone", **alone.parts())
    return runs.run_processes(resume_on_two, 2, (str(directory), ON_TWO))


def assert_average(found: dict[str, Tensor], at_save: list[dict[str, Tensor]]) -> None:
    for name, value in found.items():
        if name == "rng":
            continue
        rows = torch.stack([process[name] for process in at_save])
        if rows.is_floating_point():
            torch.testing.assert_close(value, rows.mean(0), rtol=1e-6, atol=1e-7)
            continue
        assert torch.equal(value, rows[0]), name


@pytest.mark.parametrize("case", ["decentlam", "slowmo", "awc-dmsgd"])
def test_other_number_of_nodes_starts_from_the_average(case: str, saved: Any, on_two: Any) -> None:
    at_save = [process[case][0] for process in saved]
    for rank, process in enumerate(on_two):
        facts, at_load, kept, warnings, at_end, (groups, _, _) = process[case]
        assert facts == decentlam.Resumed(SAVED_AT, 4, 1, averaged=True)
        assert_average(at_load, at_save)
        assert kept, "two processes must not draw the same random numbers"
        assert len(warnings) == (1 if rank == 0 else 0)
        assert "average" in "".join(warnings) or rank == 1
        assert groups[0]["step"] == STEPS
        assert all(t.isfinite().all() for t in at_end.values())


def test_state_of_nodes_of_several_processes_is_averaged_too(saved: Any, on_two: Any) -> None:
    facts, at_load, *_ = on_two[0]["2x2"]
    assert facts == decentlam.Resumed(SAVED_AT, 2, 2, averaged=True)
    model = {name: t for name, t in at_load.items() if name.startswith("model")}
    assert_average(model, [process["2x2"][0] for process in saved])
    # Each process holds half of the one bucket's state under the first parameter; the bucket
    # holds the parameters backwards.
    parts = [process["2x2"][0] for process in saved]
    (name,) = (name for name in parts[0] if name.startswith("state") and name[-2:] == " v")
    nodes = [torch.cat([parts[2 * i][name], parts[2 * i + 1][name]]) for i in range(2)]
    expected = torch.stack(nodes).mean(0)
    flat = torch.cat([at_load[f"state {number} v"].reshape(-1) for number in range(5, -1, -1)])
    torch.testing.assert_close(flat, expected[: len(flat)], rtol=1e-6, atol=1e-7)


def test_slowmo_of_one_node_goes_on_on_two_without_a_jump(on_two: Any) -> None:
    """One node keeps no x0; taken as zero, the end of the period would throw the model away."""
    _, at_load, _, _, at_end, _ = on_two[0]["slowmo alone"]
    assert torch.equal(at_load["state 0 x0"], at_load["model layers.0.weight"])
    moved = at_end["model layers.0.weight"] - at_load["model layers.0.weight"]
    assert moved.norm() < 0.5 * at_load["model layers.0.weight"].norm()


def test_four_nodes_resume_in_one_process_without_a_group(directory: Path, saved: Any) -> None:
    run = build("d2-dmsgd")
    facts = decentlam.load_checkpoint(directory / "d2-dmsgd", **run.parts())
    assert facts == decentlam.Resumed(SAVED_AT, 4, 1, averaged=True)
    assert_average(tensors(run), [process["d2-dmsgd"][0] for process in saved])
