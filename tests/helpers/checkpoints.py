"""A user's run, and what is in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import decentlam
from tests.helpers.quadratic import CLASSES

# Method and options. SlowMo is saved in the middle of a period, AWC with messages under way.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "decentlam": ("decentlam", {"topology": "ring", "weight_decay": 1e-3}),
    "slowmo": ("slowmo", {"topology": "ring", "tau": 4}),
    "awc-dmsgd": ("awc-dmsgd", {"topology": "ring"}),
    "d2-dmsgd": ("d2-dmsgd", {"topology": "ring", "nesterov": True}),
    "scaler": ("decentlam", {"topology": "ring", "overlap": False}),
    "2x2": ("decentlam", {"processes_per_node": 2}),
    "float16": ("decentlam", {"topology": "ring", "message_dtype": torch.float16}),
}


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


def build_run(case: str, **changes: Any) -> Run:
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


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained_run(case: str = "decentlam", steps: int = 3) -> Run:
    torch.manual_seed(0)
    run = build_run(case)
    run.train(range(steps))
    return run


def steps_in(path: Path) -> int:
    return decentlam.load_checkpoint(path, **build_run("decentlam").parts()).step


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
