"""A run that was saved and resumed is the run that never stopped, to the bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from tests.helpers.checkpoints import (
    CASES,
    Holds,
    build_run,
    names_in,
    numbers,
    same_tensors,
    tensors,
    trained_run,
)
from tests.helpers.processes import run_processes, warnings_of

SAVED_AT, STEPS = 5, 9
# The same runs resumed with other buckets.
OTHER_BUCKETS = {"decentlam": 64, "2x2": 64}
ON_TWO = ["decentlam", "slowmo", "2x2", "slowmo alone"]


def run_and_save(directory: str) -> dict[str, Any]:
    """Each case twice, without and with a checkpoint on the way; the second's states."""
    found = {}
    for case in CASES:
        torch.manual_seed(dist.get_rank())
        undisturbed = build_run(case)
        undisturbed.train(range(STEPS))
        torch.manual_seed(dist.get_rank())
        run = build_run(case)
        run.train(range(SAVED_AT))
        decentlam.save_checkpoint(f"{directory}/{case}", **run.parts())
        at_save = tensors(run)
        run.train(range(SAVED_AT, STEPS))
        disturbed = not same_tensors(tensors(undisturbed), tensors(run))
        found[case] = at_save, tensors(run), numbers(run), disturbed
    return found


def resume_and_run(directory: str) -> dict[str, Any]:
    cases = [(case, {}) for case in CASES]
    cases += [(case, {"bucket_bytes": size}) for case, size in OTHER_BUCKETS.items()]
    found = {}
    for case, changes in cases:
        torch.manual_seed(99)
        run = build_run(case, **changes)
        resumed = decentlam.load_checkpoint(f"{directory}/{case}", **run.parts())
        at_load = tensors(run)
        run.train(range(SAVED_AT, STEPS))
        key = f"{case} in other buckets" if changes else case
        found[key] = resumed, at_load, tensors(run), numbers(run)
    return found


def resume_on_two(directory: str, cases: list[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        torch.manual_seed(5 + dist.get_rank())
        with warnings_of("decentlam") as said:
            run = build_run(case.removesuffix(" alone"), processes_per_node=1)
            rng = torch.get_rng_state()
            resumed = decentlam.load_checkpoint(f"{directory}/{case}", **run.parts())
            kept = torch.equal(torch.get_rng_state(), rng)
            at_load = tensors(run)
            run.train(range(SAVED_AT, STEPS))
        found[case] = resumed, at_load, kept, said, tensors(run), numbers(run)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(directory: Path) -> list[dict[str, Any]]:
    return run_processes(run_and_save, 4, (str(directory),))


@pytest.fixture(scope="module")
def resumed(directory: Path, saved: Any) -> list[dict[str, Any]]:
    return run_processes(resume_and_run, 4, (str(directory),))


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


@pytest.fixture(scope="module")
def on_two(directory: Path, saved: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    alone = build_run("slowmo")
    alone.train(range(SAVED_AT))
    decentlam.save_checkpoint(directory / "slowmo alone", **alone.parts())
    return run_processes(resume_on_two, 2, (str(directory), ON_TWO))


def assert_average(found: dict[str, Tensor], at_save: list[dict[str, Tensor]]) -> None:
    for name, value in found.items():
        if name == "rng":
            continue
        rows = torch.stack([process[name] for process in at_save])
        if rows.is_floating_point():
            torch.testing.assert_close(value, rows.mean(0), rtol=1e-6, atol=1e-7)
            continue
        assert torch.equal(value, rows[0]), name


@pytest.mark.parametrize("case", ["decentlam", "slowmo"])
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
    run = build_run("d2-dmsgd")
    facts = decentlam.load_checkpoint(directory / "d2-dmsgd", **run.parts())
    assert facts == decentlam.Resumed(SAVED_AT, 4, 1, averaged=True)
    assert_average(tensors(run), [process["d2-dmsgd"][0] for process in saved])


# One process ------------------------------------------------------------------------------------


def test_one_process_resumes_to_the_bit(tmp_path: Path) -> None:
    run = trained_run()
    decentlam.save_checkpoint(tmp_path / "deep" / "run", **run.parts())
    run.train(range(3, 6))
    again = build_run("decentlam")
    facts = decentlam.load_checkpoint(str(tmp_path / "deep" / "run"), **again.parts())
    assert facts == decentlam.Resumed(3, 1, 1, averaged=False)
    again.train(range(3, 6))
    assert same_tensors(tensors(again), tensors(run)) and numbers(again) == numbers(run)


def test_several_optimizers_in_evaluation(tmp_path: Path) -> None:
    """One must not save what the other has averaged, nor load what its train() would undo."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    first, second = (decentlam.DecentLaM(model[i].parameters(), lr=0.1) for i in (0, 2))
    own = copy.deepcopy(model.state_dict())
    parts = {"path": tmp_path, "model": model, "optimizer": first}
    second.eval(model)
    with torch.no_grad():  # as if other nodes had had a part in the average
        for tensor in (model[1].running_mean, *model[2].parameters()):
            tensor.add_(1)
    for evaluating in (False, True):
        if evaluating:
            first.eval()
        with pytest.raises(decentlam.CheckpointError, match=r"2.weight and 3 more .* its train()"):
            decentlam.save_checkpoint(**parts)
    with first.runtime.own_parameters(), second.runtime.own_parameters():
        decentlam.save_checkpoint(**parts)
    first.train()
    with pytest.raises(decentlam.CheckpointError, match=r"cannot load .*2.weight and 3 more"):
        decentlam.load_checkpoint(**parts)
    with first.runtime.own_parameters():  # it has them already
        second.train()
    decentlam.load_checkpoint(**parts)
    assert same_tensors(own, model.state_dict())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "run"
    decentlam.save_checkpoint(path, **trained_run().parts())
    return path


def test_another_precision_is_refused(sound: Path) -> None:
    run = build_run("decentlam")
    run.model.double()
    optimizer = decentlam.DecentLaM(run.model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"weight is torch.float32 of .* in the checkpoint, and torch.float64"
    ):
        decentlam.load_checkpoint(sound, model=run.model, optimizer=optimizer, scheduler=None)


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, run = tmp_path / "run", trained_run()
    decentlam.save_checkpoint(path, **run.parts())

    def refused(kind: type[Exception], match: str, **changes: Any) -> None:
        before = tensors(run)
        with pytest.raises(kind, match=match):
            decentlam.load_checkpoint(path, **{**run.parts(), **changes})
        assert same_tensors(before, tensors(run)), "nothing may change when loading fails"

    other = trained_run("slowmo")
    refused(ValueError, "of a DecentLaM run, this is SlowMo", **other.parts())
    parts = {k: v for k, v in run.parts().items() if k != "scheduler"}
    with pytest.raises(ValueError, match=r"also holds scheduler; .* pass scheduler=None"):
        decentlam.load_checkpoint(path, **parts)
    decentlam.load_checkpoint(path, **parts, scheduler=None)
    refused(ValueError, "holds no meter; .* it has: scheduler", meter=trained_run().scheduler)
    wider = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    optimizer = decentlam.DecentLaM(wider.parameters(), lr=0.1)
    refused(
        ValueError,
        r"another model: 0.weight is not in the checkpoint.*and \d+ more",
        model=wider,
        optimizer=optimizer,
    )
    reordered = decentlam.DecentLaM(reversed(list(run.model.parameters())), lr=0.1)
    refused(ValueError, "in other groups or in another order", optimizer=reordered)
    refused(ValueError, "not one of the model's", optimizer=optimizer)
    with pytest.raises(TypeError, match="for decentlam's optimizers"):
        sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
        decentlam.save_checkpoint(path, model=run.model, optimizer=sgd)  # type: ignore[arg-type]
    for changes, message in (
        ({"model": "x"}, "model must be a torch.nn.Module, got 'x'"),
        ({"meter": 3}, r"meter must be an object with state_dict\(\), .*; got 3"),
    ):
        with pytest.raises(TypeError, match=message):
            decentlam.save_checkpoint(path, **{**run.parts(), **changes})
    with pytest.raises(ValueError, match="keep must be a whole number of 1 or more, got 0"):
        decentlam.save_checkpoint(path, **run.parts(), keep=0)


def test_what_could_never_be_loaded_is_refused_when_saving(tmp_path: Path) -> None:
    run = trained_run()
    with pytest.raises(ValueError, match=r"state of meter holds something.*numpy"):
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), meter=Holds([np.float64(1)]))
    assert names_in(tmp_path) == []


def test_other_hyper_parameters_are_mentioned(tmp_path: Path, caplog: Any) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained_run().parts())
    run = build_run("decentlam", momentum=0.5)
    decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert "DecentLaM(beta=0.9, nesterov=False), here: DecentLaM(beta=0.5" in caplog.text
    assert run.optimizer.param_groups[0]["momentum"] == 0.9
