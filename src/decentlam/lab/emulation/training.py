"""Ways to train a model on n processes, each as `build(model, loss) -> Training`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from decentlam.lab.emulation.models import Loss
from decentlam.layout import Bucket
from decentlam.optimizer import DecentralizedOptimizer

LR, MOMENTUM = 1e-4, 0.5  # small, so that no topology can diverge while it is timed


class Training:
    """One iteration per call; adds up forward and step(), and what of it was waiting."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        after: Callable[[], None] | None = None,
        buckets: Callable[[], list[int]] = list,
    ) -> None:
        self.model, self.loss, self.optimizer, self.after = model, loss, optimizer, after
        self.buckets = buckets  # bytes of each message, known after the first iterations
        self.forward_seconds = self.step_seconds = 0.0

    def __call__(self) -> None:
        if self.optimizer is None:  # the wrapper does everything in backward
            self.loss(self.model).backward()
            return
        self.optimizer.zero_grad()
        begun = time.perf_counter()
        loss = self.loss(self.model)
        self.forward_seconds += time.perf_counter() - begun
        loss.backward()
        begun = time.perf_counter()
        self.optimizer.step()
        self.step_seconds += time.perf_counter() - begun
        if self.after is not None:
            self.after()

    @property
    def wait_seconds(self) -> float:
        """What our optimizers say they stood still for messages; others do not tell."""
        if isinstance(self.optimizer, DecentralizedOptimizer):
            return self.optimizer.statistics.total_wait_seconds
        return 0.0


Build = Callable[[nn.Module, Loss], Training]


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, foreach=True)


def local_only(model: nn.Module, loss: Loss) -> Training:
    """No communication: nobody can be faster."""
    return Training(model, loss, _sgd(model.parameters()))


def ddp(**options: Any) -> Build:
    def build(model: nn.Module, loss: Loss) -> Training:
        wrapped = DistributedDataParallel(model, **options)
        parameters = list[Tensor](model.parameters())[::-1]  # as backward completes them
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, wrapped.bucket_bytes_cap]

        def buckets() -> list[int]:
            found, _ = dist._compute_bucket_assignment_by_size(parameters, limits)
            return [sum(parameters[i].nbytes for i in bucket) for bucket in found]

        return Training(wrapped, loss, _sgd(model.parameters()), buckets=buckets)

    return build


def ours(cls: Any, topology: str, **options: Any) -> Build:
    """An optimizer of this library, as it is named: another stable form is never chosen for it."""

    def build(model: nn.Module, loss: Loss) -> Training:
        given = {"lr": LR, "momentum": MOMENTUM, "stable": "refuse", **options}
        optimizer = cls(model.parameters(), topology=topology, **given)
        return Training(model, loss, optimizer, buckets=lambda: sizes(optimizer._buckets))

    def sizes(buckets: list[Bucket]) -> list[int]:
        return [bucket.x.nbytes for bucket in buckets]

    return build


def raw_exchange(peers: int) -> Build:
    """The limit without overlap: one flat buffer after a local step, receives posted first."""

    def build(model: nn.Module, loss: Loss) -> Training:
        params = list(model.parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in params])
        start = 0
        for p in params:
            p.data = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        n, rank = dist.get_world_size(), dist.get_rank()
        if peers == 1 and n % 2:
            raise ValueError(f"{n} nodes do not form pairs")
        others = [rank ^ 1] if peers == 1 else [(rank - 1) % n, (rank + 1) % n]
        inbox = [torch.empty_like(flat) for _ in others]

        def exchange() -> None:
            works = [dist.irecv(b, j) for b, j in zip(inbox, others, strict=True)]
            works += [dist.isend(flat, j) for j in others]
            for work in works:
                assert work is not None
                work.wait()
            with torch.no_grad():
                flat.mul_(1 / (peers + 1))
                for buffer in inbox:
                    flat.add_(buffer, alpha=1 / (peers + 1))

        return Training(model, loss, _sgd(params), exchange, lambda: [flat.nbytes])

    return build


def decent_dp(topology: str) -> Build:
    """decent-dp, an AWC method, with its default buckets."""

    def build(model: nn.Module, loss: Loss) -> Training:
        importlib.import_module("loguru").logger.disable("decent_dp")
        wrapper = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel

        def make_optimizer(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            return _sgd([p for _, p in params])

        wrapped = wrapper(model, make_optimizer, topology=topology, _local_world_size=1)
        wrapped.train()

        def buckets() -> list[int]:
            return [sum(p.nbytes for p in bucket) for bucket in wrapped._param_buckets]

        return Training(wrapped, loss, None, buckets=buckets)

    return build
