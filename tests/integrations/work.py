"""One small piece of work for all frameworks: model, data, optimizer, and a plain loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import decentlam

EPOCHS = 2
SILENCE_SECONDS = 300.0  # on a busy machine a process may not get to say that it is alive
# What a run may ask of its framework, by name.
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip": 0.5},
    "backward": {"overlap": "backward"},
    "clip bfloat16": {"clip": 0.5, "autocast": True},
    "local steps": {"every": 3},
}


def build_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def build_optimizer(
    model: nn.Module, overlap: str = "auto", every: int | None = None, **options: Any
) -> Any:
    if every is not None:
        return local_steps(model, every)
    return decentlam.DecentLaM(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        topology="ring",
        overlap=overlap,
        heartbeat_seconds=SILENCE_SECONDS,
        **options,
    )


def local_steps(model: nn.Module, every: int) -> decentlam.LocalSteps:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return decentlam.LocalSteps(
        inner, every, topology="ring", heartbeat_seconds=SILENCE_SECONDS, shared_memory=False
    )


def build_data(seed: int, size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 8, generator=generator)
    return TensorDataset(x, (x[:, :4] + 0.3 * x[:, 4:]).argmax(1))


def flat(model: nn.Module) -> Tensor:
    """Parameters and buffers of this process."""
    return torch.cat([t.detach().reshape(-1).double() for t in model.state_dict().values()])


def save(out: Path, case: str, model: nn.Module, val: float) -> None:
    torch.save({"x": flat(model), "val": float(val)}, out / f"{case}-{dist.get_rank()}.pt")


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def evaluate(model: nn.Module, loader: Any) -> float:
    """The mean over all processes of the mean loss of their batches."""
    model.eval()
    with torch.no_grad():
        total = torch.stack([F.cross_entropy(model(x), y) for x, y in loader]).mean()
    dist.all_reduce(total)
    model.train()
    return total.item() / dist.get_world_size()


def train_epoch(
    model: nn.Module,
    optimizer: Any,
    loader: Any,
    accumulate: int,
    clip: float | None,
    autocast: bool,
) -> None:
    for number, (x, y) in enumerate(loader):
        last = (number + 1) % accumulate == 0
        with contextlib.nullcontext() if last else optimizer.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
        if last:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def sharded(data: TensorDataset, shuffle: bool) -> Any:
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=shuffle))


def train_plain(
    accumulate: int = 1,
    clip: float | None = None,
    overlap: str = "auto",
    autocast: bool = False,
    every: int | None = None,
    *,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    loader_of: Callable[..., Any] = sharded,
) -> tuple[nn.Module, float]:
    """What a user of torchrun writes."""
    model = prepare(build_model())
    optimizer = build_optimizer(model, overlap=overlap, every=every)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = loader_of(build_data(0, 256), shuffle=True)
    val_loader = loader_of(build_data(1, 64), shuffle=False)
    val = 0.0
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader, accumulate, clip, autocast)
        scheduler.step()
        with optimizer.averaged(model), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            val = evaluate(model, val_loader)
    return model, val


if __name__ == "__main__":
    torch.set_num_threads(1)
    decentlam.init(backend="gloo")
    for name, options in CASES.items():
        save(Path(sys.argv[1]), name, *train_plain(**options))
