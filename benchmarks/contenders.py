"""Ways to train a model on n processes, each as `build(model, loss) -> step()`, and models."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import decentlam

Loss = Callable[[nn.Module], Tensor]
Step = Callable[[], None]
Build = Callable[[nn.Module, Loss], Step]

LR, MOMENTUM = 1e-4, 0.5  # small, so that no topology can diverge while it is timed


class ConvNet(nn.Module):
    """0.27M parameters and much arithmetic: bound by compute."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 16, 32, 32, 64, 64, 96)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2 if b > a > 3 else 1, padding=1)
            for a, b in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for b in widths[1:])
        self.head = nn.Linear(widths[-1], 10)
        self.extra = nn.Linear(widths[-1], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(F.relu(self.extra(x.mean(dim=(2, 3)))))


def transformer(width: int, depth: int) -> nn.Module:
    """12 width^2 depth parameters and short sequences: bound by communication."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def make_model(name: str) -> tuple[nn.Module, Loss]:
    """The model, alike in all processes, and its loss on this process's batch."""
    torch.manual_seed(0)
    if name == "convnet-0.2M":
        model: nn.Module = ConvNet()
        shape = (16, 3, 32, 32)
    elif name == "transformer-9.5M":
        model, shape = transformer(512, 3), (2, 16, 512)
    elif name == "transformer-25M":
        model, shape = transformer(512, 8), (2, 16, 512)
    else:
        raise ValueError(f"unknown model {name!r}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return model, lambda m: m(batch).square().mean()


def _loop(model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, foreach=True)


def local_only(model: nn.Module, loss: Loss) -> Step:
    """No communication: nobody can be faster."""
    return _loop(model, loss, _sgd(model))


def ddp(**options: bool) -> Build:
    def build(model: nn.Module, loss: Loss) -> Step:
        return _loop(DistributedDataParallel(model, **options), loss, _sgd(model))

    return build


def ours(cls: type, topology: str, **options: object) -> Build:
    def build(model: nn.Module, loss: Loss) -> Step:
        optimizer = cls(model.parameters(), lr=LR, momentum=MOMENTUM, topology=topology, **options)
        return _loop(model, loss, optimizer)

    return build


def raw_exchange(peers: int) -> Build:
    """The limit: one flat buffer, receives posted first, weighted sum, after a local SGD step."""

    def build(model: nn.Module, loss: Loss) -> Step:
        params = list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        start = 0
        for p in params:
            p.data = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        optimizer = _sgd(model)
        n, rank = dist.get_world_size(), dist.get_rank()
        others = [rank ^ 1] if peers == 1 else [(rank - 1) % n, (rank + 1) % n]
        inbox = [torch.empty_like(flat) for _ in others]

        def step() -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            works = [dist.irecv(b, j) for b, j in zip(inbox, others, strict=True)]
            works += [dist.isend(flat, j) for j in others]
            for work in works:
                assert work is not None
                work.wait()
            with torch.no_grad():
                flat.mul_(1 / (peers + 1))
                for buffer in inbox:
                    flat.add_(buffer, alpha=1 / (peers + 1))

        return step

    return build


def decent_dp(topology: str) -> Build:
    """decent-dp, if it is installed."""

    def build(model: nn.Module, loss: Loss) -> Step:
        from decent_dp.ddp import DecentralizedDataParallel

        def make_optimizer(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for _, p in params], lr=LR, momentum=MOMENTUM, foreach=True)

        wrapped = DecentralizedDataParallel(
            model, make_optimizer, topology=topology, _local_world_size=1
        )
        wrapped.train()

        def step() -> None:
            loss(wrapped).backward()

        return step

    return build


def contenders(with_decent_dp: bool) -> dict[str, Build]:
    lam = decentlam.DecentLaM
    one_peer, ring = "one-peer-symmetric-exponential", "ring"
    table: dict[str, Build] = {
        "local only (limit)": local_only,
        "DDP": ddp(),
        "DDP, bucket views": ddp(gradient_as_bucket_view=True),
        "raw exchange, 1 peer": raw_exchange(1),
        "raw exchange, 2 peers": raw_exchange(2),
        "PmSGD": ours(decentlam.PmSGD, ring),
        "DecentLaM one-peer, overlap": ours(lam, one_peer),
        "DecentLaM one-peer, no overlap": ours(lam, one_peer, overlap=False),
        "DecentLaM ring, overlap": ours(lam, ring),
        "DecentLaM ring, no overlap": ours(lam, ring, overlap=False),
        "DecentLaM sym. exponential, no overlap": ours(lam, "symmetric-exponential", overlap=False),
        "AWC-DmSGD one-peer": ours(decentlam.AWCDmSGD, "one-peer-exponential"),
    }
    if with_decent_dp:
        table["decent-dp ring (1 peer)"] = decent_dp("ring")
        table["decent-dp one-peer-exp"] = decent_dp("one-peer-exp")
    return table
