"""Run directories as training would have left them, and what a report makes of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from decentlam.lab.report import run_groups
from decentlam.lab.report.runs import read

EPOCHS, STEPS_PER_EPOCH, LOG_EVERY = 12, 14, 2
# Final accuracy, consensus distance and wait share, roughly as label-sorted digits have them.
METHODS = {
    "pmsgd": (0.968, 0.0, 0.31),
    "dmsgd": (0.934, 0.21, 0.16),
    "da-dmsgd": (0.941, 0.13, 0.19),
    "qg-dmsgd": (0.957, 0.074, 0.17),
    "decentlam": (0.965, 0.061, 0.16),
}


def write_run(
    directory: Path,
    method: str = "decentlam",
    seed: int = 0,
    status: str | None = "finished",
    until: float = EPOCHS,
    simulated: bool = True,
    **settings: Any,
) -> Path:
    """A run directory as training writes it, from made-up but smooth numbers."""
    directory.mkdir(parents=True)
    recipe = {
        "method": method, "topology": "ring", "nodes": 8, "model": "mlp", "data": "digits",
        "data_path": None, "shards": "label-sorted", "batch": 1024, "micro_batch": None,
        "epochs": float(EPOCHS), "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4,
        "hyper": [], "schedule": "cosine", "warmup_epochs": 1.0, "seed": seed,
        "precision": "float32", "evaluate_every": 1.0, **settings,
    }  # fmt: skip
    info = {
        "recipe": recipe,
        "versions": {"decentlam": "0.1.0", "commit": "0f" * 20, "torch": "2.15.0"},
        "command": f"decentlam train --method {method} --seed {seed} --out {directory.name}",
        "simulated": simulated,
        "started": "2026-11-15T12:00:00+00:00",
        "parameters": 25_450,
        "steps": EPOCHS * STEPS_PER_EPOCH,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 8},
    }
    (directory / "run.json").write_text(json.dumps(info))
    records = list(measure(method, seed, status, until, recipe))
    (directory / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def measure(method: str, seed: int, status: str | None, until: float, recipe: dict[str, Any]):
    accuracy, distance, wait = METHODS.get(method, (0.9, 0.1, 0.2))
    accuracy += 0.003 * seed - 0.01 * recipe["lr"]
    steps = round(until * STEPS_PER_EPOCH)
    for k in range(steps + 1):
        epoch = k / STEPS_PER_EPOCH
        lost = status == "diverged" and k >= steps - 2
        if k and k % LOG_EVERY == 0:
            loss = 0.04 + 0.01 * seed + 2.26 * math.exp(-0.55 * epoch)
            yield {
                "kind": "step", "step": k, "epoch": epoch, "loss": None if lost else loss,
                "lr": recipe["lr"] * min(epoch, 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))),
                "step_seconds": 0.02, "data_seconds": 0.002, "compute_seconds": 0.01,
                "wait_seconds": wait * 0.02, "bytes_sent": 203_600,
                "images_per_second": recipe["batch"] / 0.02,
            }  # fmt: skip
        if k % STEPS_PER_EPOCH == 0:
            top = None if lost else accuracy * (1 - 0.9 * math.exp(-0.5 * epoch))
            spread = 0.1 * distance * (0.5 + math.exp(-0.3 * epoch))
            yield {
                "kind": "evaluation", "step": k, "epoch": epoch, "averaged_top1": top,
                "averaged_loss": top and 3 * (1 - top), "nodes_top1": top and top - spread,
                "nodes_top1_min": top and top - 2 * spread, "nodes_top1_max": top,
                "consensus_distance": distance * (1 + 0.1 * seed) * math.exp(-0.3 * epoch),
            }  # fmt: skip
    if status is not None:
        yield {"kind": "end", "step": steps, "status": status, "seconds": 0.02 * steps}


def last_evaluation(directory: Path) -> dict[str, Any]:
    lines = (directory / "records.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "evaluation"][-1]


def only_group(directories: list[Path]) -> run_groups.Group:
    (setting,) = run_groups.collect([read(directory) for directory in directories])
    (group,) = setting.groups
    return group


def embedded_data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{title}}"


def write_hostile_run(directory: Path) -> Path:
    """A run whose every text tries to break out of the page."""
    run = write_run(directory, topology=EVIL, model=EVIL, data=EVIL, shards=EVIL, schedule=EVIL)
    info = json.loads((run / "run.json").read_text())
    info |= {"command": EVIL, "started": EVIL, "versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}}
    info["recipe"] |= {"method": EVIL, "seed": EVIL, "hyper": [[EVIL, EVIL]], EVIL: EVIL}
    (run / "run.json").write_text(json.dumps(info))
    return run
