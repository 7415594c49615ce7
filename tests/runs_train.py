"""What the processes of the training tests run; importable, because pytest does not fork them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from decentlam.lab.recipes import Recipe
from decentlam.lab.train import Stop, Summary, train

NODES = 8
METHODS = ("decentlam", "dmsgd", "pmsgd")


def recipe(method: str = "decentlam", **changes: Any) -> Recipe:
    """A few steps on digits in float64, on shards that pull the nodes apart."""
    values: dict[str, Any] = {
        "method": method,
        "nodes": NODES,
        "shards": "label-sorted",
        "batch": 64,
        "epochs": 9 / 22,  # 22 steps are an epoch
        "warmup_epochs": 1 / 22,
        "warmup_from": 0.1,
        "weight_decay": 1e-3,
        "precision": "float64",
        "evaluate_every": 4 / 22,
        "log_every": 2,
        "seed": 3,
    }
    return Recipe(**{**values, **changes})


BATCH_NORM = {  # with pieces of 3 samples, the last of 2
    how: recipe(method, model="cnn", micro_batch=3, batch_norm=how, epochs=2 / 22, nesterov=True)
    for how, method in (("average", "awc-dmsgd"), ("estimate", "qg-dmsgd"))
}
LONG = recipe(epochs=30 / 22)


def all_scenarios(directory: Path) -> dict[str, Summary]:
    """One after the other in this process, which is one of the nodes."""
    summaries = {method: train(recipe(method), directory / method) for method in METHODS}
    for how, plan in BATCH_NORM.items():
        summaries[how] = train(plan, directory / how)
    summaries["long"] = train(LONG, directory / "long")
    summaries["interrupted"] = _interrupted(directory / "interrupted")
    summaries["resumed"] = train(LONG, directory / "interrupted", resume=True)
    return summaries


class _Interrupting:
    """Looked at for the second time, which is in the midst of training, it sends a SIGINT."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._looks = stop, 0

    @property
    def requested(self) -> bool:
        self._looks += 1
        if self._looks == 2:
            signal.raise_signal(signal.SIGINT)
        return self._stop.requested


def _interrupted(directory: Path) -> Summary:
    """One node of eight gets a real SIGINT in the midst of training."""
    stop = Stop()
    with stop.listening():
        interrupting: Any = _Interrupting(stop) if dist.get_rank() == 5 else stop
        return train(LONG, directory, stop=interrupting)
