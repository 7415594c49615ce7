"""A user's run and how it is saved and resumed; importable, because processes do it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runs import CLASSES
from torch import Tensor, nn

import decentlam

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
    "float16": ("decentlam", {"topology": "ring", "message_dtype": torch.float16}),
    "float16 into forward": (
        "decentlam",
        {"topology": "ring", "message_dtype": torch.float16, "overlap": "forward"},
    ),
    "bfloat16": ("decentlam", {"message_dtype": torch.bfloat16}),  # random pairs
    "bfloat16 before the gradient": (
        "awc-dmsgd",
        {"topology": "ring", "message_dtype": torch.bfloat16},
    ),
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


def resume_with_other_choices(directory: str) -> dict[str, list[str]]:
    """What is told when a run of topology="auto" goes on with this or that."""
    run = build("decentlam", topology="auto")  # in shared memory, so that messages are whole
    run.train(range(2))
    decentlam.save_checkpoint(f"{directory}/automatic", **run.parts())
    had = {"topology": run.optimizer.topology.name}
    changes: dict[str, dict[str, Any]] = {
        "the same": had,
        "other buckets": {**had, "bucket_bytes": 64},
        "16 bits": {"topology": "auto", "message_dtype": torch.float16},
        "another topology": {"topology": "ring" if had["topology"] != "ring" else "complete"},
    }
    found = {"had": [had["topology"]]}
    for name, options in changes.items():
        again, warnings = build("decentlam", **options), Warnings()
        logging.getLogger("decentlam.checkpoint").addHandler(warnings)
        decentlam.load_checkpoint(f"{directory}/automatic", **again.parts())
        logging.getLogger("decentlam.checkpoint").removeHandler(warnings)
        found[name] = warnings.texts
    return found


def trained(case: str = "decentlam", steps: int = 3) -> Run:
    torch.manual_seed(0)
    run = build(case)
    run.train(range(steps))
    return run


def steps_in(path: Path) -> int:
    return decentlam.load_checkpoint(path, **build("decentlam").parts()).step


def newest(path: Path) -> Path:
    return max(save for save in path.iterdir() if not save.name.startswith("."))


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


class Holds:
    """An object whose state is what it is told."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state
