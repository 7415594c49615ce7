"""A small transformer on Python's own sources: by Trainer, by Accelerate, and by a plain loop."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerState, TrainingArguments

import decentlam
from tests.integrations import work

LENGTH, BATCH, STEPS = 32, 4, 6
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip": 0.5, "overlap": "none"},
    "backward": {"overlap": "backward"},
    "local steps": {"every": 2},
}


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Stretches of the bytes of some modules of the standard library."""

    def __init__(self, size: int, start: int = 0) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py"))
        self._tokens = torch.tensor(list(text[start : start + size * LENGTH])).view(size, LENGTH)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        labels = self._tokens[i].clone()
        labels[0] = -100  # nothing predicts the first; Trainer would count it all the same
        return {"input_ids": self._tokens[i], "labels": labels}


TRAIN, TEST = Text(256), Text(32, start=60_000)


def build_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def optimizer_of(model: nn.Module, overlap: str, every: int | None) -> Any:
    if every is not None:
        return work.local_steps(model, every)
    return decentlam.DecentLaM(model.parameters(), **options_of(overlap))


def options_of(overlap: str) -> dict[str, Any]:
    return {
        "lr": 0.1,
        "momentum": 0.9,
        "topology": "ring",
        "overlap": overlap,
        "heartbeat_seconds": work.SILENCE_SECONDS,
    }


def batches(data: Text, rank: int) -> list[dict[str, Tensor]]:
    """As Accelerate deals them out: the next batch to the next process."""
    starts = range(rank * BATCH, len(data), 4 * BATCH)
    return [
        torch.utils.data.default_collate([data[i] for i in range(s, s + BATCH)]) for s in starts
    ]


def train_plain(
    accumulate: int = 1, clip: float | None = None, overlap: str = "auto", every: int | None = None
) -> tuple[nn.Module, float]:
    """What a user of torchrun writes."""
    model = build_model()
    optimizer = optimizer_of(model, overlap, every)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (STEPS - k) / STEPS)
    mine = iter(batches(TRAIN, dist.get_rank()))
    for _ in range(STEPS):
        for _ in range(accumulate - 1):
            with optimizer.no_sync():
                (model(**next(mine)).loss / accumulate).backward()
        (model(**next(mine)).loss / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.eval(model)
    val = evaluate(model)
    optimizer.train()
    return model, val


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    total = torch.stack([model(**batch).loss for batch in batches(TEST, dist.get_rank())]).mean()
    dist.all_reduce(total)
    model.train()
    return total.item() / 4


# Trainer ----------------------------------------------------------------------------------------


def arguments(out: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(out),
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "train_sampling_strategy": "sequential",
            "use_cpu": True,
            "report_to": [],
            "logging_steps": 2,
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
            **options,
        }
    )


def trainer_of(
    out: Path,
    model: nn.Module,
    overlap: str = "auto",
    kind: Any = None,
    every: int | None = None,
    **options: Any,
) -> Trainer:
    from decentlam.integrations.huggingface import DecentralizedTrainer

    return (kind or DecentralizedTrainer)(
        model,
        arguments(out, **options),
        train_dataset=TRAIN,
        eval_dataset=TEST,
        **(
            {"optimizer_cls_and_kwargs": (decentlam.DecentLaM, options_of(overlap))}
            if every is None
            else {"optimizers": (work.local_steps(model, every), None)}
        ),
    )


def by_trainer(
    out: Path,
    accumulate: int = 1,
    clip: float | None = None,
    overlap: str = "auto",
    every: int | None = None,
) -> tuple[nn.Module, float]:
    model = build_model()
    trainer = trainer_of(
        out,
        model,
        overlap,
        every=every,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=clip,
    )
    trainer.train()
    val = trainer.evaluate()["eval_loss"]
    trainer.node_optimizer.train()
    return model, val


def resume(out: Path) -> dict[str, Any]:
    """Six steps in one go, and in two, from a checkpoint after an evaluation; with dropout."""
    often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    whole = build_model(dropout=0.2)
    trainer = trainer_of(out / "whole", whole, **often)
    trainer.train()
    checkpoint = out / "whole" / "checkpoint-3"
    torch.manual_seed(1234)  # must not matter
    resumed = build_model(dropout=0.2)
    again = trainer_of(out / "resumed", resumed, **often)
    again.train(resume_from_checkpoint=str(checkpoint))
    trainer.node_optimizer.train()  # the last evaluation left both in eval
    own = work.flat(whole)
    again.node_optimizer.train()
    mean = own.clone()
    dist.all_reduce(mean)
    again.save_model(str(out / "published"))
    dist.barrier()
    published = GPT2LMHeadModel.from_pretrained(out / "published")
    return {
        "whole": own,
        "resumed": work.flat(resumed),
        "mean": mean / 4,
        "published": work.flat(published),
        "files": sorted(p.name for p in checkpoint.iterdir()),
        "gathers": trainer.args.average_tokens_across_devices,
    }


def from_arguments(out: Path) -> dict[str, Any]:
    """What TrainingArguments alone build, and the run that they describe."""
    from decentlam.integrations.huggingface import DecentralizedTrainer

    told = {"learning_rate": 0.003, "weight_decay": 0.1, "adam_beta2": 0.95, "warmup_steps": 2}
    model = build_model()
    args = arguments(out, max_grad_norm=1.0, **told)
    trainer = DecentralizedTrainer(model, args, train_dataset=TRAIN, eval_dataset=TEST)
    trainer.train()
    optimizer = trainer.node_optimizer
    by_sgd = DecentralizedTrainer(
        build_model(), arguments(out, optim="sgd", learning_rate=0.2), train_dataset=TRAIN
    )
    by_sgd.create_optimizer()
    return {
        "kind": type(optimizer).__name__,
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "betas": optimizer.param_groups[0]["betas"],
        "rate": optimizer.param_groups[0]["initial_lr"],
        "last rate": optimizer.param_groups[0]["lr"],
        "logged": sorted({name for row in trainer.state.log_history for name in row}),
        "sgd": (type(by_sgd.node_optimizer).__name__, by_sgd.node_optimizer.param_groups[0]["lr"]),
    }


def refusals(out: Path) -> dict[str, str]:
    from accelerate import Accelerator

    from decentlam.integrations.huggingface import DecentralizedTrainer

    def by_ddp() -> None:
        trainer_of(out, build_model(), kind=Trainer).train()

    def prepared() -> None:
        model = build_model()
        optimizer = decentlam.DecentLaM(model.parameters(), **options_of("none"))
        model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
        model(**batches(TRAIN, dist.get_rank())[0]).loss.backward()
        optimizer.step()

    def by_adam() -> None:
        model = build_model()
        theirs = torch.optim.AdamW(model.parameters())
        DecentralizedTrainer(
            model, arguments(out), train_dataset=TRAIN, optimizers=(theirs, None)
        ).train()

    def by_adafactor() -> None:
        args = arguments(out, optim="adafactor")
        DecentralizedTrainer(build_model(), args, train_dataset=TRAIN).train()

    def two_rates() -> None:
        trainer_of(out, build_model(), learning_rate=0.3).train()

    def clipped() -> None:
        trainer_of(out, build_model(), "backward", max_grad_norm=1.0).train()

    def from_elsewhere() -> None:
        place = out / "elsewhere"
        if dist.get_rank() == 0:
            build_model().save_pretrained(place)
            TrainerState(train_batch_size=BATCH).save_to_json(str(place / "trainer_state.json"))
        dist.barrier()
        trainer_of(out, build_model()).train(resume_from_checkpoint=str(place))

    return {
        "plain Trainer": work.refused(by_ddp),
        "prepare(model)": work.refused(prepared),
        "another optimizer": work.refused(by_adam),
        "another name": work.refused(by_adafactor),
        "two rates": work.refused(two_rates),
        "clip in flight": work.refused(clipped),
        "auto_find_batch_size": work.refused(
            lambda: trainer_of(out, build_model(), auto_find_batch_size=True)
        ),
        "another checkpoint": work.refused(from_elsewhere),
    }


# Accelerate -------------------------------------------------------------------------------------


def by_accelerate(
    accumulate: int = 1, clip: float | None = None, overlap: str = "auto", every: int | None = None
) -> Any:
    """The recipe of docs/huggingface.md: prepare everything but the model."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = build_model().to(accelerator.device)
    node_optimizer = optimizer_of(model, overlap, every)
    scheduler = torch.optim.lr_scheduler.LambdaLR(node_optimizer, lambda k: (STEPS - k) / STEPS)
    optimizer, loader = accelerator.prepare(node_optimizer, DataLoader(TRAIN, batch_size=BATCH))
    steps = 0
    for batch in loader:
        with accelerator.accumulate(node_optimizer):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
                steps += 1
            optimizer.zero_grad()
        if steps == STEPS:
            break
    optimizer.eval()
    val = evaluate(model)
    optimizer.train()
    return model, val


def main(out: Path, what: str) -> None:
    torch.set_num_threads(1)
    if what == "plain":
        decentlam.init(backend="gloo")
        for name, options in CASES.items():
            work.save(out, f"plain-{name}", *train_plain(**options))
        return
    for name, options in CASES.items():
        work.save(out, f"trainer-{name}", *by_trainer(out, **options))
    for name, options in CASES.items():
        work.save(out, f"accelerate-{name}", *by_accelerate(**options))
    results = {
        "resume": resume(out),
        "refusals": refusals(out),
        "arguments": from_arguments(out),
    }
    torch.save(results, out / f"results-{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
