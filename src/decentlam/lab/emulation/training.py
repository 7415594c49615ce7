"""Ways to train a model on n processes, each as `build(model, loss, bucket_bytes) -> Training`."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decentlam
from decentlam.lab.emulation.models import Loss
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.options import usual_bucket_bytes
from decentlam.runtime.bucket import Bucket
from decentlam.topology import Topology, resolve

LR, MOMENTUM = 1e-4, 0.5  # small, so that no topology can diverge while it is timed


class Steps(Protocol):
    """What an iteration calls of an optimizer."""

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class Training:
    """One iteration per call; adds up forward and step(), and what of it was waiting."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Steps | None,
        after: Callable[[], None] | None = None,
        buckets: Callable[[], list[int]] = list,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.after = model, loss, optimizer, after
        self.buckets = buckets  # bytes of each message, known after the first iterations
        self.forward_seconds = self.step_seconds = 0.0
        self._close = close

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

    def close(self) -> None:
        """Nothing is under way any more."""
        if self._close is not None:
            self._close()

    @property
    def wait_seconds(self) -> float:
        """What our optimizers say they stood still for messages; others do not tell."""
        if isinstance(self.optimizer, DecentralizedOptimizer):
            return self.optimizer.statistics.total_wait_seconds
        return 0.0


Build = Callable[[nn.Module, Loss, int | None], Training]  # bytes of a bucket; None: the usual


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, foreach=True)


def local_only(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
    """No communication: nobody can be faster."""
    return Training(model, loss, _sgd(model.parameters()))


def ddp(**options: Any) -> Build:
    def build(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
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

    def build(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
        given = {"lr": LR, "momentum": MOMENTUM, "stable": "refuse", **options}
        given["bucket_bytes"] = bucket_bytes
        optimizer = cls(model.parameters(), topology=topology, **given)
        return Training(model, loss, optimizer, buckets=lambda: sizes(optimizer.runtime.buckets))

    def sizes(buckets: list[Bucket]) -> list[int]:
        return [bucket.x.nbytes for bucket in buckets]

    return build


def as_it_comes(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
    """DecentLaM as somebody writes it who reads nothing but the README."""
    optimizer = decentlam.DecentLaM(model.parameters(), lr=LR, momentum=0.9)

    def buckets() -> list[int]:
        return [bucket.x.nbytes for bucket in optimizer.runtime.buckets]

    return Training(model, loss, optimizer, buckets=buckets)


def raw_exchange(peers: int) -> Build:
    """The limit without overlap: one flat buffer after a local step, receives posted first."""

    def build(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
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


class BareBucket:
    """Parameters laid out one after the other, a plain SGD, and one message on its way."""

    def __init__(self, number: int, params: list[nn.Parameter], topology: Topology) -> None:
        self.number, self.params, self.topology = number, params, topology
        self.flat = torch.cat([p.detach().reshape(-1) for p in params])
        for p, part in zip(params, self.flat.split([p.numel() for p in params]), strict=True):
            p.data = part.view(p.shape)
        self.inbox = torch.empty_like(self.flat)
        self.sgd = _sgd(params)
        self.left = len(params)  # that have no gradient yet

    def receive(self, step: int) -> None:
        (self.peer,) = self.topology.neighbors(dist.get_rank(), step)
        self.weight = self.topology.row(dist.get_rank(), step)[self.peer]
        self.works = [dist.irecv(self.inbox, self.peer, tag=self.number)]

    def send(self) -> None:
        self.works.append(dist.isend(self.flat, self.peer, tag=self.number))

    def mix(self) -> None:
        for work in self.works:
            assert work is not None
            work.wait()
        self.flat.lerp_(self.inbox, self.weight)


class BareExchange:
    """The least that a bucketed exchange with one peer does: post receives, send the parameters
    where they are, mix, and take a step of SGD. Nothing is checked.

    A bucket is updated and sent when its gradient is there, and mixed in step() (DmSGD); or, if
    `early`, mixed, updated and sent anew when its gradient is there (AWC-DmSGD).
    """

    def __init__(self, params: list[nn.Parameter], size: int, topology: str, early: bool) -> None:
        net = resolve(topology, dist.get_world_size())
        filled: list[list[nn.Parameter]] = [[]]
        for p in reversed(params):
            if filled[-1] and sum(q.nbytes for q in filled[-1]) + p.nbytes > size:
                filled.append([])
            filled[-1].append(p)
        self.buckets = [BareBucket(number, chosen, net) for number, chosen in enumerate(filled)]
        self.early, self.count, self.begun = early, 0, False
        for bucket in self.buckets:
            if early:
                bucket.receive(0)
                bucket.send()
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(lambda _, b=bucket: self.on_gradient(b))

    @torch.no_grad()
    def on_gradient(self, bucket: BareBucket) -> None:
        if not (self.early or self.begun):
            for each in self.buckets:
                each.receive(self.count)
        self.begun = True
        bucket.left -= 1
        if bucket.left:
            return
        bucket.left = len(bucket.params)
        if self.early:
            bucket.mix()
        bucket.sgd.step()
        if self.early:
            bucket.receive(self.count + 1)
        bucket.send()

    @torch.no_grad()
    def step(self) -> None:
        for bucket in () if self.early else self.buckets:
            bucket.mix()
        self.count, self.begun = self.count + 1, False

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.sgd.zero_grad()

    def close(self) -> None:
        """Messages under way arrive: gloo breaks the connection of one that is dropped."""
        for bucket in self.buckets if self.early else ():
            bucket.mix()


def bare_exchange(topology: str, early: bool) -> Build:
    def build(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
        params = list(model.parameters())
        size = bucket_bytes or usual_bucket_bytes(sum(p.nbytes for p in params))
        bare = BareExchange(params, size, topology, early)
        sizes = [bucket.flat.nbytes for bucket in bare.buckets]
        return Training(model, loss, bare, None, lambda: sizes, bare.close)

    return build


def decent_dp(topology: str) -> Build:
    """decent-dp, an AWC method, with its default buckets."""

    def build(model: nn.Module, loss: Loss, bucket_bytes: int | None = None) -> Training:
        importlib.import_module("loguru").logger.disable("decent_dp")
        wrapper = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel

        def make_optimizer(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            return _sgd([p for _, p in params])

        size = {} if bucket_bytes is None else {"bucket_size_in_mb": bucket_bytes / 2**20}
        wrapped = wrapper(model, make_optimizer, topology=topology, _local_world_size=1, **size)
        wrapped.train()

        def buckets() -> list[int]:
            return [sum(p.nbytes for p in bucket) for bucket in wrapped._param_buckets]

        return Training(wrapped, loss, None, buckets=buckets)

    return build
