"""A run that was saved and resumed is the run that never stopped, to the bit; and what can fail."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import CLASSES
from torch import Tensor, nn

import decentlam

pytestmark = pytest.mark.timeout(240)  # starting a process takes seconds on a busy machine

SAVED_AT, STEPS = 5, 9

# Case: method, options. SlowMo is saved in the middle of a period, AWC with messages under way.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "decentlam": ("decentlam", {"topology": "ring", "weight_decay": 1e-3}),
    "slowmo": ("slowmo", {"topology": "ring", "tau": 4}),
    "awc-dmsgd": ("awc-dmsgd", {"topology": "ring"}),
    "d2-dmsgd": ("d2-dmsgd", {"topology": "ring", "nesterov": True}),
    "pmsgd": ("pmsgd", {}),
    "scaler": ("decentlam", {"topology": "ring", "overlap": False}),
    "2x2": ("decentlam", {"processes_per_node": 2}),
}
# The same runs resumed with other buckets.
OTHER_BUCKETS = {"decentlam": 64, "2x2": 64}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@dataclass
class Run:
    """What a user's script holds."""

    model: nn.Module
    optimizer: decentlam.DecentralizedOptimizer
    scheduler: Any
    scaler: Any = None

    def parts(self) -> dict[str, Any]:
        return vars(self)

    def train(self, steps: range) -> None:
        rank = self.optimizer.network.rank
        for step in steps:
            data = torch.Generator().manual_seed(1000 * rank + step)
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 6, generator=data)).square().mean()
            if self.scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.scheduler.step()


def build(case: str, **changes: Any) -> Run:
    method, options = CASES[case]
    model = Net()
    optimizer = CLASSES[method](
        model.parameters(), lr=0.1, **{"overlap": True, **options, **changes}
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 7], gamma=0.3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2) if case == "scaler" else None
    return Run(model, optimizer, scheduler, scaler)


def tensors(run: Run) -> dict[str, Tensor]:
    """Everything of a run that is a tensor, as copies."""
    found = {f"model {name}": t for name, t in run.model.state_dict().items()}
    for number, buffers in run.optimizer.state_dict()["state"].items():
        found |= {f"state {number} {name}": t for name, t in buffers.items()}
    found["rng"] = torch.get_rng_state()
    return {name: t.clone() for name, t in found.items()}


def numbers(run: Run) -> list[Any]:
    groups = run.optimizer.state_dict()["param_groups"]
    return [groups, run.scheduler.state_dict(), run.scaler and run.scaler.state_dict()]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# To the bit ------------------------------------------------------------------------------------


def run_and_save(directory: str) -> dict[str, Any]:
    """Each case twice, without and with a checkpoint on the way; the second's states."""
    found = {}
    for case in CASES:
        torch.manual_seed(dist.get_rank())
        undisturbed = build(case)
        undisturbed.train(range(STEPS))
        torch.manual_seed(dist.get_rank())
        run = build(case)
        run.train(range(SAVED_AT))
        decentlam.save_checkpoint(f"{directory}/{case}", **run.parts())
        at_save = tensors(run)
        run.train(range(SAVED_AT, STEPS))
        disturbed = not same(tensors(undisturbed), tensors(run))
        found[case] = at_save, tensors(run), numbers(run), disturbed
    return found


def resume_and_run(directory: str) -> dict[str, Any]:
    cases = [(case, {}) for case in CASES]
    cases += [(case, {"bucket_bytes": size}) for case, size in OTHER_BUCKETS.items()]
    found = {}
    for case, changes in cases:
        torch.manual_seed(99)
        run = build(case, **changes)
        resumed = decentlam.load_checkpoint(f"{directory}/{case}", **run.parts())
        at_load = tensors(run)
        run.train(range(SAVED_AT, STEPS))
        key = f"{case} in other buckets" if changes else case
        found[key] = resumed, at_load, tensors(run), numbers(run)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(directory: Path) -> list[dict[str, Any]]:
    return decentlam.launch(run_and_save, nodes=4, args=(str(directory),))


@pytest.fixture(scope="module")
def resumed(directory: Path, saved: Any) -> list[dict[str, Any]]:
    return decentlam.launch(resume_and_run, nodes=4, args=(str(directory),))


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
    meta = json.loads((directory / "2x2" / "meta.json").read_text())
    assert {name: meta[name] for name in ("format", "num_nodes", "processes_per_node", "step")} == {
        "format": 1, "num_nodes": 2, "processes_per_node": 2, "step": SAVED_AT,
    }  # fmt: skip
    assert meta["method"] == "DecentLaM" and meta["saved"] == ["scheduler"]
    assert meta["versions"]["torch"] == torch.__version__
    assert sorted(meta["files"]) == [f"process-{r:05d}.pt" for r in range(4)]
    assert sorted(p.name for p in directory.iterdir()) == sorted(CASES), "nothing is left behind"


# On another number of nodes ----------------------------------------------------------------------


class Warnings(logging.Handler):
    """Collects what the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def resume_on_two(directory: str, cases: list[str]) -> dict[str, Any]:
    found = {}
    for case in cases:
        warnings = Warnings()
        logging.getLogger("decentlam").addHandler(warnings)
        torch.manual_seed(5 + dist.get_rank())
        run = build(case.removesuffix(" alone"), processes_per_node=1)
        rng = torch.get_rng_state()
        resumed = decentlam.load_checkpoint(f"{directory}/{case}", **run.parts())
        kept = torch.equal(torch.get_rng_state(), rng)
        at_load = tensors(run)
        run.train(range(SAVED_AT, STEPS))
        logging.getLogger("decentlam").removeHandler(warnings)
        found[case] = resumed, at_load, kept, warnings.texts, tensors(run), numbers(run)
    return found


ON_TWO = ["decentlam", "slowmo", "awc-dmsgd", "2x2", "slowmo alone"]


@pytest.fixture(scope="module")
def on_two(directory: Path, saved: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    alone = build("slowmo")
    alone.train(range(SAVED_AT))
    decentlam.save_checkpoint(directory / "slowmo alone", **alone.parts())
    return decentlam.launch(resume_on_two, nodes=2, args=(str(directory), ON_TWO))


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
    (name,) = (name for name in parts[0] if name.startswith("state"))
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


# One process -------------------------------------------------------------------------------------


def trained(case: str = "decentlam", steps: int = 3) -> Run:
    torch.manual_seed(0)
    run = build(case)
    run.train(range(steps))
    return run


def test_one_process_resumes_to_the_bit(tmp_path: Path) -> None:
    run = trained()
    decentlam.save_checkpoint(tmp_path / "deep" / "run", **run.parts())
    run.train(range(3, 6))
    again = build("decentlam")
    facts = decentlam.load_checkpoint(str(tmp_path / "deep" / "run"), **again.parts())
    assert facts == decentlam.Resumed(3, 1, 1, averaged=False)
    again.train(range(3, 6))
    assert same(tensors(again), tensors(run)) and numbers(again) == numbers(run)


def steps_in(path: Path) -> int:
    return decentlam.load_checkpoint(path, **build("decentlam").parts()).step


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_replacement_interrupted_anywhere_leaves_one_that_loads(tmp_path: Path) -> None:
    run, path = trained(steps=1), tmp_path / "run"
    decentlam.save_checkpoint(path, **run.parts())
    run.train(range(1, 2))
    decentlam.save_checkpoint(tmp_path / "other", **run.parts())
    old, new = tmp_path / ".run.old", tmp_path / ".run.new"

    (tmp_path / "other").rename(new)  # killed before the first rename
    assert steps_in(path) == 1
    path.rename(old)  # killed between the renames: the new one is complete
    assert steps_in(path) == 2
    (new / "meta.json").rename(tmp_path / "meta.json")  # not a state that can happen, but safe
    assert steps_in(path) == 1
    (tmp_path / "meta.json").rename(new / "meta.json")

    run.train(range(2, 3))
    decentlam.save_checkpoint(path, **run.parts())  # clears up whatever is there
    assert names_in(tmp_path) == ["run"] and steps_in(path) == 3

    old.mkdir()  # killed while the old one was being deleted
    assert steps_in(path) == 3
    decentlam.save_checkpoint(path, **run.parts())
    assert names_in(tmp_path) == ["run"]


def test_an_unfinished_first_checkpoint_is_not_one(tmp_path: Path) -> None:
    (tmp_path / ".run.new").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*\.run\.new is one that was"):
        steps_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, meta: file.unlink(), "incomplete: process-00000.pt is missing"),
        (lambda file, meta: file.write_bytes(file.read_bytes()[:-9]), "bytes instead of"),
        (lambda file, meta: flip(file), "damaged: its checksum"),
        (lambda file, meta: meta.unlink(), r"not a complete checkpoint: it has no meta\.json"),
        (lambda file, meta: meta.write_text("{"), r"meta\.json cannot be read"),
        (lambda file, meta: change(meta, format=9), "format 9, this version of decentlam reads"),
    ],
)
def test_a_damaged_checkpoint_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    damage(tmp_path / "run" / "process-00000.pt", tmp_path / "run" / "meta.json")
    with pytest.raises(decentlam.CheckpointError, match=message):
        steps_in(tmp_path / "run")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def change(meta: Path, **changes: Any) -> None:
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **changes}))


class Holds:
    """An object whose state is what it is told."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def test_what_does_not_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, run = tmp_path / "run", trained()
    decentlam.save_checkpoint(path, **run.parts())

    def refused(kind: type[Exception], match: str, **changes: Any) -> None:
        before = tensors(run)
        with pytest.raises(kind, match=match):
            decentlam.load_checkpoint(path, **{**run.parts(), **changes})
        assert same(before, tensors(run)), "nothing may change when loading fails"

    other = trained("slowmo")
    refused(ValueError, "of a DecentLaM run, this is SlowMo", **other.parts())
    parts = {k: v for k, v in run.parts().items() if k != "scheduler"}
    with pytest.raises(ValueError, match=r"also holds scheduler; .* pass scheduler=None"):
        decentlam.load_checkpoint(path, **parts)
    decentlam.load_checkpoint(path, **parts, scheduler=None)
    refused(ValueError, "holds no meter; .* it has: scheduler", meter=Holds({}))
    wider = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    optimizer = decentlam.DecentLaM(wider.parameters(), lr=0.1)
    refused(
        ValueError,
        r"another model: 0.weight is not in the checkpoint.*and \d+ more",
        model=wider,
        optimizer=optimizer,
    )
    reordered = decentlam.DecentLaM(reversed(list(run.model.parameters())), lr=0.1)
    refused(ValueError, "parameters in another order", optimizer=reordered)
    refused(ValueError, "not one of the model's", optimizer=optimizer)
    with pytest.raises(TypeError, match="for decentlam's optimizers"):
        sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
        decentlam.save_checkpoint(path, model=run.model, optimizer=sgd)  # type: ignore[arg-type]


def test_what_could_never_be_loaded_is_refused_when_saving(tmp_path: Path) -> None:
    run = trained()
    with pytest.raises(ValueError, match=r"state of meter holds something.*numpy"):
        decentlam.save_checkpoint(tmp_path / "run", **run.parts(), meter=Holds([np.float64(1)]))
    assert names_in(tmp_path) == []


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    run, path = trained(), tmp_path / "run"
    path.mkdir()
    decentlam.save_checkpoint(path, **run.parts())  # an empty directory is free to use
    (path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds thesis\.tex, so it is not"):
        decentlam.save_checkpoint(path, **run.parts())
    assert (path / "thesis.tex").read_text() == "precious"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        decentlam.save_checkpoint(tmp_path / "file", **run.parts())
    link = tmp_path / "latest"
    (path / "thesis.tex").unlink()
    link.symlink_to(path)
    decentlam.save_checkpoint(link, **run.parts())
    assert link.is_symlink() and steps_in(link) == 3


def test_other_hyper_parameters_are_mentioned(tmp_path: Path, caplog: Any) -> None:
    decentlam.save_checkpoint(tmp_path / "run", **trained().parts())
    run = build("decentlam", momentum=0.5)
    decentlam.load_checkpoint(tmp_path / "run", **run.parts())
    assert "DecentLaM(beta=0.9, nesterov=False), this is DecentLaM(beta=0.5" in caplog.text
    assert run.optimizer.param_groups[0]["momentum"] == 0.9


# One process of several fails ----------------------------------------------------------------


class KilledWhileWritten:
    """Pickled once to see whether it can be loaded; the second time it is being written."""

    times = 0

    def __reduce__(self) -> Any:
        KilledWhileWritten.times += 1
        if KilledWhileWritten.times == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return OrderedDict, ()


def fail_on_one_process(directory: str) -> None:
    """Node 1 fails in every way; at last node 0, which tidies up, is killed while it writes."""
    torch.manual_seed(0)
    run, path, one = build("decentlam"), f"{directory}/run", dist.get_rank() == 1
    outcomes = {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
            outcomes[name] = "no error"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    def save(path: str = path, **changes: Any) -> None:
        decentlam.save_checkpoint(path, **{**run.parts(), **changes})

    def load(path: str = path) -> None:
        decentlam.load_checkpoint(path, **run.parts())

    run.train(range(1))
    attempt("first", save)
    run.train(range(1, 2))
    if one:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    attempt("disk full", save)
    if one:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    attempt("after disk full", load)
    attempt("unlike paths", lambda: save(f"{path}-{dist.get_rank()}"))
    attempt("unlike paths to load", lambda: load(f"{path}-{dist.get_rank()}"))
    attempt("below a file", lambda: save(f"{path}/meta.json/run"))
    state = np.zeros(1) if one else torch.zeros(1)
    attempt("state of one", lambda: save(meter=Holds(state)))
    other = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    sound = run.model
    if one:
        run.model = other
    attempt("model of one", load)
    run.model = sound
    if one:
        flip(Path(path) / "process-00001.pt")
    dist.barrier()
    attempt("file of one", load)
    if one:
        flip(Path(path) / "process-00001.pt")
    dist.barrier()
    attempt("absent", lambda: load(f"{directory}/absent"))
    run.model(torch.ones(2, 6)).sum().backward()
    attempt("inside a step", save)
    run.optimizer.step()
    Path(f"{directory}/{dist.get_rank()}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    save(meter=Holds({} if one else KilledWhileWritten()))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("failures")
    with pytest.raises(RuntimeError, match="node 0 was killed by SIGKILL"):
        decentlam.launch(fail_on_one_process, nodes=2, args=(str(directory),), timeout_seconds=60)
    return directory


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("first", "no error"),
        ("disk full", r"CheckpointError: process 1: .*File too large"),
        ("after disk full", "no error"),
        ("unlike paths", r"ValueError: .*process 1 has checkpoint path = .*run-1', process 0"),
        ("unlike paths to load", r"ValueError: .*process 1 has checkpoint path = .*run-1'"),
        ("below a file", r"CheckpointError: process 0: NotADirectoryError"),
        ("state of one", r"ValueError: process 1: the state of meter holds something"),
        ("model of one", r"ValueError: process 1: parameter 0 of the optimizer is not one of"),
        ("file of one", r"CheckpointError: process 1: .*process-00001.pt is damaged"),
        ("absent", r"FileNotFoundError: there is no checkpoint at .*absent"),
        ("inside a step", "CheckpointError: cannot save a checkpoint between backward and step"),
    ],
)
def test_failure_on_one_process_is_an_error_on_all(name: str, outcome: str, failures: Path) -> None:
    texts = [json.loads((failures / f"{rank}.json").read_text())[name] for rank in range(2)]
    assert texts[0] == texts[1]
    assert re.search(outcome, texts[0]), texts[0]


def test_a_crash_while_writing_leaves_the_old_checkpoint(failures: Path) -> None:
    """Written at step 1; the one for step 2 failed for want of room, then for want of a process."""
    assert "process-00000.pt" in names_in(failures / ".run.new")
    assert steps_in(failures / "run") == 1
    decentlam.save_checkpoint(failures / "run", **trained().parts())
    assert steps_in(failures / "run") == 3
    assert not (failures / ".run.new").exists()
