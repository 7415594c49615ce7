"""The work with Ray Train: a script, which starts a cluster of four workers on this machine."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from torch.utils.data import DataLoader

import decentlam
from decentlam.integrations import ray as integration
from tests.integrations import launched, work


def sharded(data: Any, shuffle: bool) -> Any:
    """By Ray's way to deal data out to the workers."""
    return ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=shuffle))


def first(config: dict[str, Any]) -> None:
    """Every case; a whole run; the same run, stopped after its first epoch; a mistake."""
    torch.set_num_threads(1)
    out, rank = Path(config["out"]), ray.train.get_context().get_world_rank()
    by_ray = {
        "prepare": functools.partial(ray.train.torch.prepare_model, parallel_strategy=None),
        "loader_of": sharded,
    }
    for name, options in work.CASES.items():
        work.save(out, f"ray-{name}", *work.train_plain(**options, **by_ray))
    result = {
        "whole": train_in_parts(work.EPOCHS, report=lambda *args, **parts: None),
        "stopped": train_in_parts(1),
        "wrapped": work.refused(wrapped),
    }
    torch.save(result, out / f"first-{rank}.pt")


def second(config: dict[str, Any]) -> None:
    """Goes on with the stopped run; in the midst of its second epoch a worker dies, once."""
    torch.set_num_threads(1)
    out, rank = Path(config["out"]), ray.train.get_context().get_world_rank()
    death = out / "death"

    def die_once() -> None:
        if rank == 1 and not death.exists():
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save(train_in_parts(work.EPOCHS, after_4=die_once), out / f"second-{rank}.pt")


def train_in_parts(
    epochs: int,
    report: Callable[..., None] = integration.report,
    after_4: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """With dropout, so that random numbers count. Every epoch ends with a report."""
    model = work.build_model(dropout=0.3)
    torch.manual_seed(ray.train.get_context().get_world_rank())
    optimizer = work.build_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = decentlam.ResumableLoader(work.build_data(0, 256), batch_size=8)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    found = integration.resume(**parts)
    while loader.epoch < epochs:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if loader.batches == 4:
                after_4()
        scheduler.step()
        with optimizer.averaged(model):
            seen = work.flat(model)
        report({"epoch": loader.epoch}, **parts)
    return {"own": work.flat(model), "seen": seen, "began at": found.step if found else 0}


def wrapped() -> None:
    model = ray.train.torch.prepare_model(work.build_model())
    optimizer = work.build_optimizer(model)
    model(torch.randn(8, 8)).sum().backward()
    optimizer.step()


def fit(loop: Callable[..., None], out: Path, failures: int = 0) -> Result:
    """Under the same name every time: Ray goes on with that run."""
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"out": str(out)},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(
            name="run",
            storage_path=str(out / "storage"),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            failure_config=FailureConfig(max_failures=failures),
        ),
    )
    return trainer.fit()


def start_cluster() -> None:
    """Ray gives its own processes 30 seconds to start, which cannot be changed and is not enough
    on a busy machine: the next attempt finds them in the cache."""
    for attempt in range(1, 6):
        try:
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                object_store_memory=80 * 2**20,
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == 5 or launched.RAY_WAS_SLOW not in str(error):
                raise


def main(out: Path) -> None:
    start_cluster()
    place = Path(fit(first, out).checkpoint.path)
    published = work.build_model()
    published.load_state_dict(torch.load(place / integration.MODEL, weights_only=True))
    files = sorted(str(p.relative_to(place)) for p in place.rglob("*.pt"))
    last = fit(second, out, failures=1)
    found = {
        "published": work.flat(published),
        "files": files,
        "metrics": last.metrics,
        "kept": [p.name for p in (out / "storage" / "run").iterdir() if p.is_dir()],
        "last": Path(last.checkpoint.path).name,
    }
    torch.save(found, out / "driver.pt")
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
