"""A real torch module trained on n simulated nodes in one process, one node after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decentlam.algorithms import Algorithm, check_number
from decentlam.errors import NonFiniteError
from decentlam.simulation.simulate import Nodes
from decentlam.topology import Topology, resolve


class SimulatedModule:
    """n copies of a model, each with its own data, that average as the algorithm says.

    All nodes start from `model`, which is left alone. A copy's parameters are a row of `x`, and its
    buffers are its own, so batch norm keeps n running statistics; dropout draws differently on
    every node. Frozen parameters stay as they are, tied ones count once. A parameter that a step
    does not use has gradient zero.

    >>> import torch, decentlam
    >>> nodes = decentlam.SimulatedModule(torch.nn.Linear(3, 1), "decentlam", "ring", 8, lr=0.1)
    >>> inputs, targets = torch.randn(8, 16, 3), torch.randn(8, 16, 1)  # (nodes, batch, ...)
    >>> nodes.step(torch.nn.functional.mse_loss, inputs, targets).shape
    torch.Size([8])
    >>> nodes.averaged()
    Linear(in_features=3, out_features=1, bias=True)
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str | Algorithm,
        topology: str | Topology,
        num_nodes: int | None = None,
        lr: float = 1e-3,
        momentum: float | None = None,
        weight_decay: float = 0.0,
        **hyper: Any,
    ) -> None:
        """`num_nodes` may be left out when `topology` is a Topology; the rest as in `simulate`."""
        topology = resolve(topology, num_nodes)
        self.num_nodes = topology.num_nodes
        self._copies = [copy.deepcopy(model) for _ in range(self.num_nodes)]
        trained = _trained(self._copies[0])
        self._nodes = Nodes(
            algorithm,
            topology,
            _flat(trained).expand(self.num_nodes, -1),
            momentum,
            weight_decay=weight_decay,
            layers=[p.numel() for p in trained],
            adaptive=[p.ndim > 1 for p in trained],
            **hyper,
        )
        self._gradient = torch.zeros_like(self.x)
        for module, row, gradient in zip(self._copies, self.x, self._gradient, strict=True):
            own = _trained(module)
            sizes = [p.numel() for p in own]
            for p, x, g in zip(own, row.split(sizes), gradient.split(sizes), strict=True):
                p.data, p.grad = x.view_as(p), g.view_as(p)
        self.lr = check_number("lr", lr)

    @property
    def x(self) -> Tensor:
        """All parameters that are trained, (n, d), in the order of `model.parameters()`."""
        return self._nodes.x

    def step(
        self,
        loss_fn: Callable[[Any, Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        lr: float | None = None,
    ) -> Tensor:
        """Take one training step of all nodes; return their losses before it, (n,).

        Node i takes the gradient of `loss_fn(model(inputs[i]), targets[i])`, a scalar. `lr` holds
        for this step only. If a gradient is not finite, nothing has changed.
        """
        for name, data in (("inputs", inputs), ("targets", targets)):
            if not isinstance(data, Tensor) or data.ndim < 1 or len(data) != self.num_nodes:
                got = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
                raise ValueError(
                    f"{name} must be a tensor ({self.num_nodes}, batch, ...) with one batch per "
                    f"node, got {got}; torch.stack the batches of the nodes"
                )
        batches = [[(batch, 1.0)] for batch in zip(inputs, targets, strict=True)]
        return self.step_on(lambda model, batch: loss_fn(model(batch[0]), batch[1]), batches, lr)

    def step_on(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Iterable[tuple[Any, float]]],
        lr: float | None = None,
    ) -> Tensor:
        """Do as `step` for batches of any kind: one for each node, in pieces, each with its share.

        The gradients of `loss(model, piece)` add up by these shares.
        """
        self._gradient.zero_()
        losses, before = self.x.new_zeros(self.num_nodes), self._buffers()
        for rank, (module, pieces) in enumerate(zip(self._copies, batches, strict=True)):
            for piece, share in pieces:
                with torch.enable_grad():
                    part = _checked(loss(module, piece))
                    (part * share).backward()  # in place
                losses[rank] += part.detach() * share
        try:
            self._nodes.step(self._gradient, self.lr if lr is None else lr)
        except NonFiniteError:
            self._load_buffers(before)
            raise
        return losses

    def node(self, rank: int) -> nn.Module:
        """Return an ordinary module: a copy of the model as it is on node `rank`."""
        if not 0 <= rank < self.num_nodes:
            raise ValueError(f"there are nodes 0 to {self.num_nodes - 1}; there is no {rank}")
        return copy.deepcopy(self._copies[rank])

    @torch.no_grad()
    def averaged(self) -> nn.Module:
        """Return a module with the mean over the nodes of parameters and floating buffers.

        Buffers of whole numbers, such as batch norm's count of batches, are those of node 0.
        """
        average = self.node(0)
        own = _trained(average)
        for p, x in zip(own, self.x.mean(0).split([p.numel() for p in own]), strict=True):
            p.copy_(x.view_as(p))
        buffers = self._buffers()
        for name, buffer in average.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.stack([of_node[name] for of_node in buffers]).mean(0))
        return average

    def consensus_distance(self) -> float:
        """Return sqrt of the mean squared distance of the nodes' parameters from their average."""
        return self._nodes.consensus_distance()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that `load_state_dict` needs to go on to the bit, but for torch's
        random state: a model with dropout needs `torch.get_rng_state()` too."""
        return {"nodes": self._nodes.state_dict(), "buffers": self._buffers(), "lr": self.lr}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` saved."""
        self._nodes.load_state_dict(saved["nodes"])
        self._load_buffers(saved["buffers"])
        self.lr = saved["lr"]

    def _buffers(self) -> list[dict[str, Tensor]]:
        """Return a copy of the buffers of every node, by name."""
        return [{n: b.detach().clone() for n, b in m.named_buffers()} for m in self._copies]

    @torch.no_grad()
    def _load_buffers(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        for module, saved in zip(self._copies, buffers, strict=True):
            for name, buffer in module.named_buffers():
                buffer.copy_(saved[name])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def _flat(trained: Sequence[Tensor]) -> Tensor:
    if not trained:
        raise ValueError("the model has no parameter to train; set requires_grad on some")
    kinds = sorted({str(p.dtype) for p in trained})
    if len(kinds) > 1:
        raise ValueError(
            f"the parameters have several precisions, {', '.join(kinds)}; try model.float()"
        )
    return torch.cat([p.detach().reshape(-1) for p in trained])


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return one number per node, got {got}; try .mean()")
    return loss
