"""One node per process: a torch.optim.Optimizer whose messages travel while backward runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim.optimizer import ParamsT

from decentlam import evaluation
from decentlam.algorithms import Algorithm
from decentlam.construction import Construction
from decentlam.exchange.network import communication_device
from decentlam.options import Options
from decentlam.pace import Mode
from decentlam.simulate import check_lr
from decentlam.statistics import StepStatistics
from decentlam.topology import Topology

log = logging.getLogger(__name__)


class DecentralizedOptimizer(Construction):
    """Runs any `Algorithm` on the processes of a torch.distributed group, one node each.

    Parameters live in flat buckets. A bucket's message is formed and sent as soon as backward has
    its gradients; `step()` waits for the neighbors' and updates. With `overlap=False` everything
    happens in `step()`, which clipping, GradScaler and skipping non-finite gradients need.
    On one machine neighbors read messages in memory; `shared_memory=False` sends them there too.
    `message_dtype=torch.bfloat16` sends half the bytes, as differences to what neighbors know.
    The method classes (`DecentLaM`, `DmSGD`, ...) are this class with their algorithm filled in.
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step: neighbors need answers

    def __init__(
        self,
        params: ParamsT,
        algorithm: Algorithm,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        topology: str | Topology = "symmetric-exponential",
        overlap: Mode = "auto",
        bucket_bytes: int | None = None,
        max_grad_norm: float | None = None,
        nonfinite: str = "raise",
        processes_per_node: int = 1,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = 600.0,
        stable: str = "refuse",
        shared_memory: bool = True,
        message_dtype: torch.dtype | None = None,
    ) -> None:
        check_lr(lr)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, got {weight_decay!r}")
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        if hasattr(algorithm, "beta"):
            defaults["momentum"] = algorithm.beta
            defaults["nesterov"] = getattr(algorithm, "nesterov", False)
        self._options = Options(
            topology,
            overlap,
            bucket_bytes,
            max_grad_norm,
            nonfinite,
            processes_per_node,
            timeout_seconds,
            stable,
            shared_memory,
            message_dtype,
        )
        self._algorithm = self._method = algorithm
        self._ready = False
        super().__init__(params, defaults)
        Joinable.__init__(self)
        self._attach(process_group, agree=True)

    # Accumulation, evaluation, statistics -------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates gradients; nothing is sent."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @contextlib.contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, parameters and the model's floating buffers are their mean over all nodes.

        Every process must enter. Afterwards everything is restored to the bit.
        """
        self._check_quiet("average the model")
        with evaluation.averaged([b.x for b in self._buckets], model, self.network):
            yield

    def merge(self, model: nn.Module | None = None) -> None:
        """Sets every node to the exact mean of all, parameters and buffers: the end of a run."""
        self._check_quiet("merge the nodes")
        self._finish_rounds()
        evaluation.average_([b.x for b in self._buckets], model, self.network)

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes' parameters from their average."""
        self._check_quiet("measure the consensus distance")
        return evaluation.consensus_distance([b.x for b in self._buckets], self.network)

    @property
    def statistics(self) -> StepStatistics:
        """What the last step cost: time waited, bytes sent, share of the exchange hidden."""
        return self._statistics

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this process holds for training, by kind."""
        return {
            "parameters": sum(b.x.nbytes for b in self._buckets),
            "gradients": sum(f.held_gradient_bytes() for f in self._flights),
            "state": sum(t.nbytes for f in self._flights for t in f.state.values()),
            "messages": sum(f.held_message_bytes() for f in self._flights)
            + self.exchange.outbox_bytes(),
            "received": self.exchange.memory_bytes(),
        }

    # State -----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._ending is None or not set_to_none:
            self.finish()
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None  # asks for nothing, so that the parameter may stay late

    def state_dict(self) -> dict[str, Any]:
        self.finish()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_quiet("load a state")
        self._finish_rounds()
        super().load_state_dict(state_dict)
        for flight in self._flights:
            flight.load_state({p: self.state.get(p, {}) for p in flight.bucket.params})
            self._publish_state(flight)

    def __getstate__(self) -> dict[str, Any]:
        self.finish()
        return {
            **super().__getstate__(),
            "_options": self._options,
            "_method": self._method,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = "_options" in state  # unpickled or deep-copied, not load_state_dict
        self._ready = False if fresh else self._ready
        super().__setstate__(state)
        if fresh:
            Joinable.__init__(self)
            self._attach(None, agree=False)

    # Uneven inputs (torch.distributed.algorithms.Join) -------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.network.processes_per_node > 1:
            raise ValueError(
                "Join works with one process per node; with processes_per_node="
                f"{self.network.processes_per_node} give every process the same number of batches"
            )
        return _AnswerNeighbors(self)

    @property
    def join_device(self) -> torch.device:
        return communication_device(self.network, self._buckets[0].x.device)

    @property
    def join_process_group(self) -> Any:
        return self.network.group


class _AnswerNeighbors(JoinHook):
    """A node without data goes on mixing, with a zero gradient, until all have finished."""

    def __init__(self, optimizer: DecentralizedOptimizer) -> None:
        self.optimizer = optimizer

    def main_hook(self) -> None:
        self.optimizer._step(absent=True)
        self.optimizer.finish()  # nobody will look at the parameters
