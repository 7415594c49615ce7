"""The work with Lightning's Trainer and Fabric; a script, started by Lightning or by torchrun."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

import decentlam
from decentlam.integrations.lightning import DecentralizedFabricStrategy, DecentralizedStrategy
from tests.integrations import work

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):
    def __init__(
        self,
        overlap: str = "auto",
        dropout: float = 0.0,
        plain_sgd: bool = False,
        every: int | None = None,
    ) -> None:
        super().__init__()
        self.net = work.build_model(dropout)
        self.overlap, self.plain_sgd, self.every = overlap, plain_sgd, every
        self.seen: list[Tensor] = []  # parameters in validation

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if batch_idx == 0:
            self.seen.append(work.flat(self.net))
        self.log("val", F.cross_entropy(self.net(x), y), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.plain_sgd:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)
        optimizer = work.build_optimizer(self.net, overlap=self.overlap, every=self.every)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loaders() -> tuple[Any, Any]:
    train = DataLoader(work.build_data(0, 256), batch_size=8, shuffle=True)
    return train, DataLoader(work.build_data(1, 64), batch_size=8)


def trainer_of(out: Path, strategy: Any = None, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy or DecentralizedStrategy(),
        default_root_dir=out,
        **{**QUIET, "max_epochs": work.EPOCHS, "enable_checkpointing": False, **options},
    )


def fit_case(
    out: Path,
    accumulate: int = 1,
    clip: float | None = None,
    overlap: str = "auto",
    autocast: bool = False,
    every: int | None = None,
) -> tuple[Module, float]:
    module = Module(overlap, every=every)
    precision = "bf16-mixed" if autocast else "32-true"
    trainer = trainer_of(
        out, accumulate_grad_batches=accumulate, gradient_clip_val=clip, precision=precision
    )
    trainer.fit(module, *loaders())
    return module, trainer.callback_metrics["val"].item()


def resume(out: Path) -> dict[str, Any]:
    """Two epochs in one go, and in two; with dropout, and validation that saves in its midst."""
    torch.manual_seed(dist.get_rank())
    whole = Module(dropout=0.3)
    trainer_of(out).fit(whole, *loaders())
    torch.manual_seed(dist.get_rank())
    half = Module(dropout=0.3)
    saving = ModelCheckpoint(
        out / "checkpoints", filename="{epoch}", save_last="link", save_top_k=1
    )
    stopped = trainer_of(out, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    stopped.fit(half, *loaders())
    own = work.flat(half.net)
    mean = own.clone()
    dist.all_reduce(mean)
    torch.manual_seed(1234)  # must not matter
    path = out / "checkpoints" / "last.ckpt"
    resumed = Module(dropout=0.3)
    again = trainer_of(out)
    again.fit(resumed, *loaders(), ckpt_path=path)
    published = Module(dropout=0.3)
    published.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    tested = again.test(resumed, loaders()[1], verbose=False)[0]["val"]
    return {
        "whole": work.flat(whole.net),
        "resumed": work.flat(resumed.net),
        "own at the stop": own,
        "mean at the stop": mean / 4,
        "published": work.flat(published.net),
        "seen at the stop": half.seen[-1],
        "tested": tested,
        "seen in the test": resumed.seen[-1],
        "files": sorted(p.name for p in (out / "checkpoints").iterdir()),
        "steps": again.global_step,
    }


class OwnLoader(Module):
    """With dropout, and a loader that is built when there is a process group."""

    def train_dataloader(self) -> Any:
        return decentlam.ResumableLoader(work.build_data(0, 256), batch_size=8)

    def val_dataloader(self) -> Any:
        return loaders()[1]


def resume_in_an_epoch(out: Path) -> dict[str, Tensor]:
    """From checkpoints after step 5 of 16, in the midst of the first epoch, and after its last."""
    places = {every: out / f"every-{every}" for every in (5, 8)}
    saving = [
        ModelCheckpoint(place, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        for every, place in places.items()
    ]
    torch.manual_seed(dist.get_rank())
    whole = OwnLoader(dropout=0.3)
    trainer_of(out, enable_checkpointing=True, callbacks=saving).fit(whole)
    found = {"whole": work.flat(whole.net)}
    for every, place in places.items():
        torch.manual_seed(1234)  # must not matter
        resumed = OwnLoader(dropout=0.3)
        trainer = trainer_of(out)
        trainer.fit(resumed, ckpt_path=place / f"step={every}.ckpt")
        assert trainer.global_step == 16
        found[f"from step {every}"] = work.flat(resumed.net)
    return found


class TwoOptimizers(Module):
    """One for each layer, both stepped after the same backward."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [work.build_optimizer(self.net[part]) for part in (slice(0, 2), slice(2, None))]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in optimizers:
            optimizer.step()


class FirstEpoch(lightning.Callback):
    """What the first epoch left: the file, a copy of which is kept, and the node's own model."""

    def __init__(self, file: Path, copied: Path) -> None:
        self.file, self.copied = file, copied

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            self.own = work.flat(module.net)
            if trainer.is_global_zero:
                shutil.copy(self.file, self.copied)


class Start(lightning.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.own = work.flat(module.net)


def resume_two_optimizers(out: Path) -> dict[str, Any]:
    """As if killed at the second save, in the midst of validation, before the file was written."""
    file = out / "two" / "only.ckpt"
    first, start = FirstEpoch(file, out / "first.ckpt"), Start()
    saving = ModelCheckpoint(
        file.parent,
        filename=file.stem,
        save_on_train_epoch_end=False,  # but in validation
        enable_version_counter=False,
    )
    trainer_of(out, enable_checkpointing=True, callbacks=[saving, first]).fit(
        TwoOptimizers(), *loaders()
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copy(first.copied, file)
    dist.barrier()
    trainer_of(out, callbacks=[start]).fit(TwoOptimizers(), *loaders(), ckpt_path=file)
    return {
        "own": first.own,
        "loaded": start.own,
        "saves": sorted(p.name for p in Path(f"{file}.nodes", "optimizer-1").iterdir()),
    }


def refusals(out: Path) -> dict[str, str]:
    def fit(module: Module, **options: Any) -> None:
        trainer_of(out, max_steps=3, **options).fit(module, *loaders())

    single = out / "single.ckpt"
    if dist.get_rank() == 0:
        torch.save(
            {
                "state_dict": Module().state_dict(),
                "optimizer_states": [],
                "lr_schedulers": [],
                "pytorch-lightning_version": lightning.__version__,
            },
            single,
        )
    dist.barrier()
    return {
        "ddp": work.refused(lambda: fit(Module(), strategy="ddp")),
        "another optimizer": work.refused(lambda: fit(Module(plain_sgd=True))),
        "an option of ddp": work.refused(
            lambda: DecentralizedStrategy(find_unused_parameters=True)
        ),
        "sync_batchnorm": work.refused(lambda: fit(Module(), sync_batchnorm=True)),
        "clip in flight": work.refused(lambda: fit(Module("backward"), gradient_clip_val=0.001)),
        "remote": work.refused(
            lambda: DecentralizedStrategy().load_checkpoint("s3://bucket/a.ckpt")
        ),
        "another checkpoint": work.refused(
            lambda: trainer_of(out).fit(Module(), *loaders(), ckpt_path=single)
        ),
    }


# Fabric -----------------------------------------------------------------------------------------


def fabric_of() -> lightning.Fabric:
    fabric = lightning.Fabric(accelerator="cpu", devices=4, strategy=DecentralizedFabricStrategy())
    fabric.launch()
    return fabric


def fabric_case(out: Path, accumulate: int = 1, stop_after: int | None = None) -> Any:
    """The plain loop by Fabric; with `stop_after`, new objects go on from that epoch on."""
    fabric = fabric_of()
    model = fabric.setup_module(work.build_model())
    optimizer = fabric.setup_optimizers(work.build_optimizer(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader, val_loader = (fabric.setup_dataloaders(loader) for loader in loaders())
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if stop_after is not None:  # Fabric's loader would begin with the first epoch again
        loader = state["loader"] = decentlam.ResumableLoader(work.build_data(0, 256), batch_size=8)
    if stop_after == 0:
        fabric.load(out / "fabric", state)
    while state["epoch"] < work.EPOCHS:
        for number, (x, y) in enumerate(loader):
            last = (number + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(F.cross_entropy(model(x), y) / accumulate)
            if last:
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        state["epoch"] += 1
        with optimizer.averaged(model):
            val = work.evaluate(model, val_loader)
        if state["epoch"] == stop_after:
            fabric.save(out / "fabric", state)
            return fabric_case(out, accumulate, stop_after=0)
    return model, val


def fabric_refusals() -> dict[str, str]:
    fabric = fabric_of()
    model = fabric.setup_module(work.build_model())
    optimizer = work.build_optimizer(model)
    return {
        "another optimizer": work.refused(
            lambda: fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        ),
        "no model": work.refused(lambda: fabric.save("nowhere", {"optimizer": optimizer})),
        "no state": work.refused(lambda: fabric.load("nowhere")),
    }


def logged(out: Path) -> list[str]:
    """Return the columns that a logger of Lightning gets."""
    logger = CSVLogger(out)
    trainer_of(out, logger=logger, max_steps=3).fit(Module(), *loaders())
    logger.save()
    if dist.get_rank() > 0:
        return []
    return Path(logger.experiment.metrics_file_path).read_text().split("\n")[0].split(",")


def main(out: Path, only: str = "") -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if only:
        work.save(out, f"trainer-{only}", *_net(fit_case(out, **work.CASES[only])))
        return
    for name, options in work.CASES.items():
        work.save(out, f"trainer-{name}", *_net(fit_case(out, **options)))
    rank = dist.get_rank()
    results["resume"] = resume(out)
    results["in an epoch"] = resume_in_an_epoch(out)
    results["two optimizers"] = resume_two_optimizers(out)
    results["refusals"] = refusals(out)
    results["logged"] = logged(out)
    work.save(out, "fabric-usual", *fabric_case(out))
    work.save(out, "fabric-accumulate", *fabric_case(out, accumulate=2))
    work.save(out, "fabric-resumed", *fabric_case(out, stop_after=1))
    results["fabric refusals"] = fabric_refusals()
    torch.save(results, out / f"results-{rank}.pt")


def _net(result: tuple[Module, float]) -> tuple[torch.nn.Module, float]:
    return result[0].net, result[1]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
