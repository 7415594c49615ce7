"""What processes do while another thread forms their messages and updates their parameters."""

from __future__ import annotations

import _thread
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from runs import HANG_SECONDS, Quadratic, flat
from runs_forward import STEPS, take_steps
from runs_steps import LR, Group, message_of, quadratic_loss, start, train
from torch import Tensor, nn

import decentlam
from decentlam import algorithms


class Dawdling(algorithms.DecentLaM):
    """Its update takes so long that somebody looks in the midst of it."""

    begun, go_on = threading.Event(), threading.Event()
    go_on.set()

    def update(self, x: Tensor, g: Tensor, mixed: Tensor, state: Any, step: Any) -> None:
        self.begun.set()
        assert_(self.go_on.wait(HANG_SECONDS))
        time.sleep(0.01)
        super().update(x, g, mixed, state, step)
        time.sleep(0.01)


def start_dawdling(process_group: Group, overlap: bool | str) -> tuple[int, nn.Module, Any]:
    node = dist.get_rank(process_group)
    model = Quadratic(seed=0)
    optimizer = decentlam.DecentralizedOptimizer(
        model.parameters(), Dawdling(0.6), LR, topology="ring", overlap=overlap,
        bucket_bytes=1000, process_group=process_group, shared_memory=False,
    )  # fmt: skip
    return node, model, optimizer


def dawdling(process_group: Group) -> list[list[Tensor]]:
    """The steps as they should be, and those of updates that another thread is slow to do."""
    found = []
    for overlap in (False, "forward"):
        node, model, optimizer = start_dawdling(process_group, overlap)
        found.append(train(optimizer, model, node, range(STEPS)))
    return found


def interrupted(process_group: Group) -> list[Tensor]:
    """Ctrl-C strikes while somebody waits for the parameters; who looks later sees them whole."""
    found = []
    for overlap in (False, "forward"):
        node, model, optimizer = start_dawdling(process_group, overlap)
        take_steps(optimizer, model, node)
        if overlap:
            timer = threading.Timer(0.005, _thread.interrupt_main)
            try:
                timer.start()
                optimizer.finish()
                time.sleep(HANG_SECONDS)
                raise AssertionError("nothing was interrupted")
            except KeyboardInterrupt:
                timer.join()
        found.append(flat(model))
    return found


def changed_gradient(process_group: Group) -> tuple[str, str]:
    """A gradient kept from before step() is zeroed before its update has begun, or meanwhile."""
    node, model, optimizer = start(process_group, "decentlam", overlap="forward")
    quadratic_loss(model, node, 0).backward()
    kept, zeroed = [p.grad for p in model.parameters()], threading.Event()
    optimizer.runtime._thread.submit(lambda: assert_(zeroed.wait(HANG_SECONDS)))
    optimizer.step()
    torch._foreach_zero_(kept)
    zeroed.set()
    before = message_of(lambda: flat(model))
    node, model, optimizer = start_dawdling(process_group, "forward")
    quadratic_loss(model, node, 0).backward()
    kept = [p.grad for p in model.parameters()]
    Dawdling.begun.clear()
    Dawdling.go_on.clear()
    optimizer.step()
    assert Dawdling.begun.wait(HANG_SECONDS)
    torch._foreach_zero_(kept)
    Dawdling.go_on.set()
    return before, message_of(lambda: flat(model))


def assert_(value: bool) -> None:
    assert value


def twice(process_group: Group) -> str:
    """A script drops the batch whose loss is NaN after backward: what went wrong is told."""
    node, model, optimizer = start(process_group, "decentlam")

    def two_batches() -> None:
        (quadratic_loss(model, node, 0) * torch.nan).backward()
        optimizer.zero_grad()
        quadratic_loss(model, node, 1).backward()

    return message_of(two_batches)
