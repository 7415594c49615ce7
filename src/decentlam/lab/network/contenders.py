"""The ways to train that are timed side by side, and how each is built."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import decentlam
from decentlam.lab.network.models import Loss
from decentlam.optimizer import DecentralizedOptimizer

LOCAL, BASE = "local only (limit)", "DDP"  # what the others are compared with
LR, MOMENTUM = 1e-4, 0.5  # small, so that no topology can diverge while it is timed
WARM_UP_STEPS = 3
_AUTO_STEPS = 35  # overlap="auto", the default, tries both of its modes during 33 steps
_EVERY = 16  # local steps; time as many iterations, or a multiple
_ONE_PEER = "one-peer-symmetric-exponential"


class Steps(Protocol):
    """The methods of an optimizer that an iteration calls."""

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class Training:
    """A training loop body; counts the seconds in `step()` and those spent waiting there."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Steps | None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self.model, self.loss, self.optimizer, self.after_step = model, loss, optimizer, after_step
        self.step_seconds = 0.0

    def __call__(self) -> None:
        if self.optimizer is None:  # the wrapper does everything in backward
            self.loss(self.model).backward()
            return
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        begun = time.perf_counter()
        self.optimizer.step()
        self.step_seconds += time.perf_counter() - begun
        if self.after_step is not None:
            self.after_step()

    @property
    def wait_seconds(self) -> float:
        """The seconds that our optimizers waited for messages; 0 for all others."""
        if isinstance(self.optimizer, DecentralizedOptimizer | decentlam.LocalSteps):
            return self.optimizer.statistics.total_wait_seconds
        return 0.0


Inner = Callable[[Any], torch.optim.Optimizer]  # of parameters: what torch trains with
Build = Callable[[nn.Module, Loss, Inner], Training]

INNER: dict[str, Inner] = {
    "sgd": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=LR, foreach=True),
}


def _local(model: nn.Module, loss: Loss, inner: Inner) -> Training:
    return Training(model, loss, inner(model.parameters()))


def _ddp(hook: Any = None, **options: Any) -> Build:
    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        wrapped = DistributedDataParallel(model, **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return Training(wrapped, loss, inner(model.parameters()))

    return build


def _ours(cls: Any, topology: str, **options: Any) -> Build:
    """Build an optimizer exactly as named; no other stable form is chosen for it."""

    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        chosen = {"lr": LR, "momentum": MOMENTUM, "stable": "refuse", **options}
        return Training(model, loss, cls(model.parameters(), topology=topology, **chosen))

    return build


def _adamw(**options: Any) -> Build:
    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        return Training(model, loss, decentlam.AdamW(model.parameters(), lr=LR, **options))

    return build


def _readme(**options: Any) -> Build:
    """Build DecentLaM with the arguments that the README shows."""

    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        optimizer = decentlam.DecentLaM(model.parameters(), lr=LR, momentum=0.9, **options)
        return Training(model, loss, optimizer)

    return build


def _monitored(model: nn.Module, loss: Loss, inner: Inner) -> Training:
    """Build the same, watched as `decentlam train` watches it."""
    training = _readme()(model, loss, inner)
    optimizer: Any = training.optimizer
    own = tempfile.mkdtemp(prefix="decentlam-")
    watch = decentlam.monitor(optimizer, optimizer.network.gather(own)[0])

    def logged(model: nn.Module) -> Tensor:
        value = loss(model)
        watch.log(loss=value)
        return value

    weakref.finalize(training, shutil.rmtree, own)
    training.loss = logged
    return training


def _local_steps(every: int = _EVERY, **options: Any) -> Build:
    """Build local steps of the optimizer that the limit runs with."""

    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        optimizer = decentlam.LocalSteps(inner(model.parameters()), every, **options)
        return Training(model, loss, optimizer)

    return build


def _decent_dp(topology: str) -> Build:
    """Build decent-dp, an AWC method, with its default buckets."""

    def build(model: nn.Module, loss: Loss, inner: Inner) -> Training:
        importlib.import_module("loguru").logger.disable("decent_dp")
        wrapper = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel

        def make_optimizer(params: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
            return inner([p for _, p in params])

        wrapped = wrapper(model, make_optimizer, topology=topology, _local_world_size=1)
        wrapped.train()
        return Training(wrapped, loss, None)

    return build


def _raw_exchange(model: nn.Module, loss: Loss, inner: Inner) -> Training:
    """Build the limit without overlap: one flat message to one peer after a local step."""
    params = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.view(p.shape)
    if dist.get_world_size() % 2:
        raise ValueError(f"{dist.get_world_size()} nodes do not form pairs")
    peer, inbox = dist.get_rank() ^ 1, torch.empty_like(flat)

    def exchange() -> None:
        for work in (dist.irecv(inbox, peer), dist.isend(flat, peer)):  # receives posted first
            assert work is not None
            work.wait()
        flat.lerp_(inbox, 0.5)

    return Training(model, loss, inner(params), exchange)


class Contender(NamedTuple):
    """A way to train."""

    build: Build
    warm_up: int = WARM_UP_STEPS  # iterations that are not timed
    every: int = 1  # iterations after which they repeat: only their mean counts all
    optimizer: str | None = None  # the only one of INNER that it is compared with; None: any


_LAM = decentlam.DecentLaM
_SGD = partial(Contender, optimizer="sgd")
_ADAMW = partial(Contender, optimizer="adamw")

CONTENDERS: dict[str, Contender] = {
    LOCAL: Contender(_local),
    BASE: Contender(_ddp()),
    "DDP, 1 MB buckets": Contender(_ddp(bucket_cap_mb=1)),
    "DDP, bf16 hook": Contender(_ddp(bf16_compress_hook)),
    "raw exchange, 1 peer": Contender(_raw_exchange),
    "PmSGD": _SGD(_ours(decentlam.PmSGD, "ring", overlap=True)),
    "DmSGD ring": _SGD(_ours(decentlam.DmSGD, "ring", overlap=True)),
    "DecentLaM ring, overlap": _SGD(_ours(_LAM, "ring", overlap=True)),
    "DecentLaM one-peer, no overlap": _SGD(_ours(_LAM, _ONE_PEER, overlap=False)),
    "DecentLaM one-peer, overlap": _SGD(_ours(_LAM, _ONE_PEER, overlap=True)),
    "DecentLaM one-peer, overlap, float16": _SGD(
        _ours(_LAM, _ONE_PEER, overlap=True, message_dtype=torch.float16)
    ),
    "DecentLaM as it comes": _SGD(_readme(), _AUTO_STEPS),
    "DecentLaM as it comes, monitored": _SGD(_monitored, _AUTO_STEPS),
    "DecentLaM as it comes, shared_memory=False": _SGD(_readme(shared_memory=False), _AUTO_STEPS),
    "DecentLaM as it comes, float16": _SGD(_readme(message_dtype=torch.float16), _AUTO_STEPS),
    "AWC-DmSGD one-peer": _SGD(_ours(decentlam.AWCDmSGD, "one-peer-exponential", overlap=True)),
    "AdamW, one peer": _ADAMW(_adamw(overlap=True)),
    "AdamW, one peer, float16": _ADAMW(_adamw(overlap=True, message_dtype=torch.float16)),
    "AdamW, two peers, float16": _ADAMW(
        _adamw(overlap=True, topology="two-random-matches", message_dtype=torch.float16)
    ),
    "LocalSteps every 4": _ADAMW(_local_steps(4), 4, 4),
    "LocalSteps every 16": Contender(_local_steps(), _EVERY, _EVERY),
    "LocalSteps every 16, delay 8": Contender(_local_steps(delay=8), _EVERY, _EVERY),
    "LocalSteps every 16, delay 8, float16": Contender(
        _local_steps(delay=8, message_dtype=torch.float16), _EVERY, _EVERY
    ),
    "DiLoCo every 16": _ADAMW(
        _local_steps(outer=decentlam.algorithms.PmSGD(0.9, nesterov=True), outer_lr=0.7),
        *(_EVERY, _EVERY),
    ),
    "NoLoCo every 16": _ADAMW(
        _local_steps(outer=decentlam.algorithms.DecentLaM(0.5), outer_lr=0.7), _EVERY, _EVERY
    ),
    # What decent-dp calls a ring has one peer that changes, too.
    "decent-dp ring (1 peer)": Contender(_decent_dp("ring")),
    "decent-dp one-peer-exp": Contender(_decent_dp("one-peer-exp")),
}


def has_decent_dp() -> bool:
    return importlib.util.find_spec("decent_dp") is not None


def available(optimizer: str = "sgd") -> dict[str, Contender]:
    """Return the contenders that are installed here and go with this optimizer."""
    return {
        name: contender
        for name, contender in CONTENDERS.items()
        if (has_decent_dp() or not name.startswith("decent-dp"))
        and contender.optimizer in (None, optimizer)
    }


def choose(only: tuple[str, ...], optimizer: str = "sgd") -> dict[str, Contender]:
    """Return the named contenders and the two that all are compared with; without names, all."""
    known = available(optimizer)
    for name in only:
        if name not in known:
            missing = " (decent-dp is not installed)" if name.startswith("decent-dp") else ""
            raise ValueError(
                f"unknown contender {name!r}{missing}; choose from {'; '.join(known)}, which go "
                f"with {optimizer}"
            )
    wanted = {LOCAL, BASE, *(only or known)}
    return {name: contender for name, contender in known.items() if name in wanted}
