"""Run directories as training would have left them, and what a report makes of them."""

from __future__ import annotations

import json
import math
import random
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
        "versions": {
            "decentlam": "0.1.0",
            "commit": "0f" * 20,
            "python": "3.11.2",
            "torch": "2.15.0",
        },
        "command": f"decentlam train --method {method} --topology {recipe['topology']} --nodes "
        f"{recipe['nodes']} --shards {recipe['shards']} --batch {recipe['batch']} --seed {seed} "
        f"--simulate --out {directory.name}",
        "simulated": simulated,
        "started": "2026-11-15T12:00:00+00:00",
        "parameters": 25_450,
        "steps": EPOCHS * STEPS_PER_EPOCH,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "message_bytes": 101_800,
        "peers": 2.0,
        "rho": 0.8047,
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 8},
    }
    (directory / "run.json").write_text(json.dumps(info))
    records = list(measure(method, seed, status, until, recipe))
    (directory / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def measure(method: str, seed: int, status: str | None, until: float, recipe: dict[str, Any]):
    draw = random.Random(f"{method} {seed} {recipe['batch']} {recipe['lr']}")
    accuracy, distance, wait = METHODS.get(method, (0.9, 0.1, 0.2))
    accuracy -= 0.02 * math.log2(recipe["batch"] / 1024) * (0.97 - accuracy) / 0.02
    accuracy += draw.gauss(0, 0.004)
    steps = round(until * STEPS_PER_EPOCH)
    for k in range(steps + 1):
        epoch = k / STEPS_PER_EPOCH
        blown = status == "diverged" and epoch > until - 1.5
        if k and k % LOG_EVERY == 0:
            compute, data = 0.0121 * draw.uniform(0.95, 1.1), 0.0017 * draw.uniform(0.9, 1.2)
            whole = (compute + data) / (1 - wait) + 0.0004
            loss = (
                0.04 + 2.26 * math.exp(-0.55 * epoch) + draw.gauss(0, 0.02) * math.exp(-0.1 * epoch)
            )
            if blown:
                loss = None if k >= steps - 2 else loss * 40 ** (epoch - until + 1.5)
            yield {
                "kind": "step", "step": k, "epoch": epoch, "loss": loss,
                "lr": recipe["lr"] * min(epoch, 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))),
                "step_seconds": whole, "data_seconds": data, "compute_seconds": compute,
                "wait_seconds": wait * whole, "bytes_sent": 203_600,
                "images_per_second": recipe["batch"] / whole,
            }  # fmt: skip
        if k % STEPS_PER_EPOCH == 0:
            grown = 1 - 0.9 * math.exp(-0.5 * epoch) + draw.gauss(0, 0.004) * math.exp(-0.2 * epoch)
            top = (
                None
                if blown and k == steps
                else max(0.08, accuracy * grown) * (0.4 if blown else 1)
            )
            spread = 0.1 * distance * (0.5 + math.exp(-0.3 * epoch))
            yield {
                "kind": "evaluation", "step": k, "epoch": epoch, "averaged_top1": top,
                "averaged_top5": top and min(1.0, top + 0.1),
                "averaged_loss": top and 3 * (1 - top),
                "nodes_top1": top and top - spread, "nodes_top1_min": top and top - 2 * spread,
                "nodes_top1_max": top and top - 0.3 * spread, "nodes_loss": top and 3.2 * (1 - top),
                "consensus_distance": distance * (0.2 + math.exp(-((epoch - 1.5) ** 2) / 3) * 3
                + math.exp(-0.3 * epoch)) * draw.uniform(0.95, 1.05) if k else 0.0,
            }  # fmt: skip
    if status is not None:
        yield {"kind": "end", "step": steps, "status": status, "seconds": 0.0195 * steps}


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
