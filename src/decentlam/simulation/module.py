"""A real torch module trained on n simulated nodes in one process, all nodes in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from decentlam.algorithms import Algorithm, check_lr
from decentlam.simulation.simulate import Nodes
from decentlam.topology import Topology, resolve

Loss = Callable[[Any, Tensor], Tensor]
Buffers = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, Buffers]]  # of parameters, buffers, inputs, targets

_LARGE = 4096  # elements of a matrix that is worth a call of its own


class SimulatedModule:
    """n copies of a model, each with its own data, that average as the algorithm says.

    All nodes start from `model`, which is left alone. Every node has its own parameters and its own
    buffers, so batch norm keeps n running statistics as n separate modules would; dropout draws
    differently on every node. Frozen parameters stay as they are, tied ones count once. A parameter
    that a step does not use has gradient zero.

    `stacked=True` runs all nodes in one call; the model must then be one that `torch.func.vmap` can
    run: no branch may depend on a tensor's values. `stacked=False` runs one node after another.
    None chooses: models with convolutions one after another on the CPU, where stacking makes them
    about half as fast, others stacked. `autocast=torch.bfloat16` is for the forward pass.

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
        *,
        stacked: bool | None = None,
        autocast: torch.dtype | None = None,
        **hyper: Any,
    ) -> None:
        """`num_nodes` may be left out when `topology` is a Topology; the rest as in `simulate`."""
        topology = resolve(topology, num_nodes)
        self.num_nodes = topology.num_nodes
        self._model = copy.deepcopy(model)
        self._loss = _Loss(self._model, autocast)
        trained = {name: p for name, p in self._loss.named_parameters() if _is_trained(p)}
        self._nodes = Nodes(
            algorithm,
            topology,
            _flat(trained).expand(self.num_nodes, -1),
            momentum,
            weight_decay=weight_decay,
            layers=[p.numel() for p in trained.values()],
            adaptive=[p.ndim > 1 for p in trained.values()],
            **hyper,
        )
        self._gradient = torch.empty_like(self.x)
        self._parameters = _views(self.x, trained)
        self._gradients = _views(self._gradient, trained)
        self.buffers: Buffers = {  # by name, (n, ...)
            name: buffer.detach().expand(self.num_nodes, *buffer.shape).clone()
            for name, buffer in self._model.named_buffers()
        }
        self._counters = _batch_norm_counters(self._model)
        self.stacked = not _slow_stacked(self._model) if stacked is None else stacked
        self.lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._lr = check_lr(lr)

    @property
    def x(self) -> Tensor:
        """All parameters that are trained, (n, d), in the order of `model.named_parameters()`."""
        return self._nodes.x

    def step(
        self,
        loss_fn: Loss,
        inputs: Tensor,
        targets: Tensor,
        lr: float | None = None,
        micro_batch: int | None = None,
    ) -> Tensor:
        """One training step of all nodes; returns their losses before it, (n,).

        Node i takes the gradient of `loss_fn(model(inputs[i]), targets[i])`, a scalar. `lr` holds
        for this step only. With `micro_batch` a node takes so many samples at a time and adds the
        gradients up; the loss is then the mean over the samples, `loss_fn` being a mean over its
        own. If a gradient is not finite, nothing has changed.
        """
        for name, data in (("inputs", inputs), ("targets", targets)):
            if not isinstance(data, Tensor) or data.ndim < 1 or len(data) != self.num_nodes:
                got = tuple(data.shape) if isinstance(data, Tensor) else type(data).__name__
                raise ValueError(
                    f"{name} must be a tensor ({self.num_nodes}, batch, ...) with one batch per "
                    f"node, got {got}; torch.stack the batches of the nodes"
                )
        run = self._run_stacked if self.stacked else self._run_in_turn
        losses, buffers = self.x.new_zeros(self.num_nodes), self.buffers
        for k, (x, y, share) in enumerate(_pieces(inputs, targets, micro_batch)):
            backward = partial(self._backward, share, k == 0)
            part, buffers = run(backward, partial(self._call, loss_fn), x, y, buffers)
            losses.add_(part, alpha=share)
        self._nodes.step(self._gradient, self.lr if lr is None else lr)
        self.buffers = buffers
        return losses

    def _call(
        self, loss_fn: Loss, parameters: Buffers, buffers: Buffers, x: Tensor, y: Tensor
    ) -> tuple[Tensor, Buffers]:
        """The loss of one node, and its buffers after the forward pass."""
        named = {f"model.{name}": buffer for name, buffer in buffers.items()}
        return functional_call(self._loss, (parameters, named), (loss_fn, x, y))

    def _backward(
        self, share: float, first: bool, call: Call, node: Any, buffers: Buffers, *batch: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Losses and buffers of a call; `share` of its gradients is added to those of the node.

        `node` is an index of the nodes: one, or all of them for a call that takes all.
        """
        leaves = {n: p[node].detach().requires_grad_() for n, p in self._parameters.items()}
        # The forward pass writes into the buffers it is given: these are copies.
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        with torch.enable_grad():
            losses, after = call(leaves, copies, *batch)
            # Zero where the loss does not depend on a parameter.
            gradients = torch.autograd.grad(
                losses.sum(), list(leaves.values()), materialize_grads=True
            )
        _add(gradients, [total[node] for total in self._gradients.values()], share, first)
        return losses.detach(), {name: buffer.detach() for name, buffer in after.items()}

    def _run_stacked(
        self, backward: Callable[..., Any], call: Call, x: Tensor, y: Tensor, buffers: Buffers
    ) -> tuple[Tensor, Buffers]:
        """Losses (n,) of all nodes in one call, and the buffers after it.

        Autograd sees the stacked operations: one backward for all nodes, without vmap.
        """
        given = {n: buffer[0] if n in self._counters else buffer for n, buffer in buffers.items()}
        in_dims = {name: None if name in self._counters else 0 for name in buffers}
        stacked = vmap(call, in_dims=(0, in_dims, 0, 0), randomness="different")
        losses, after = backward(stacked, slice(None), given, x, y)
        return losses, {name: buffer.contiguous() for name, buffer in after.items()}

    def _run_in_turn(
        self, backward: Callable[..., Any], call: Call, x: Tensor, y: Tensor, buffers: Buffers
    ) -> tuple[Tensor, Buffers]:
        """The same, one node after another."""
        losses, after = zip(
            *(
                backward(call, i, {name: buffer[i] for name, buffer in buffers.items()}, x[i], y[i])
                for i in range(self.num_nodes)
            ),
            strict=True,
        )
        return torch.stack(losses), {
            name: torch.stack([own[name] for own in after]) for name in buffers
        }

    def node(self, rank: int) -> nn.Module:
        """An ordinary module: a copy of the model as it is on node `rank`."""
        if not 0 <= rank < self.num_nodes:
            raise ValueError(f"there are nodes 0 to {self.num_nodes - 1}; there is no {rank}")
        return self._copy(self.x[rank], {name: b[rank] for name, b in self.buffers.items()})

    def averaged(self) -> nn.Module:
        """An ordinary module with the mean over the nodes of parameters and floating buffers.

        Buffers of whole numbers, such as batch norm's count of batches, are those of node 0.
        """
        means = {
            name: buffer.mean(0) if buffer.is_floating_point() else buffer[0]
            for name, buffer in self.buffers.items()
        }
        return self._copy(self.x.mean(0), means)

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes' parameters from their average."""
        return self._nodes.consensus_distance()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that `load_state_dict` needs to go on to the bit, but for torch's random
        state: a model with dropout needs `torch.get_rng_state()` too."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return {"nodes": self._nodes.state_dict(), "buffers": buffers, "lr": self.lr}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        given = {name: tuple(buffer.shape) for name, buffer in saved["buffers"].items()}
        expected = {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}
        if given != expected:
            raise ValueError(
                f"the saved state has buffers {given}, but this model has {expected}; build both "
                "with the same model and number of nodes"
            )
        self._nodes.load_state_dict(saved["nodes"])
        for name, buffer in self.buffers.items():
            buffer.copy_(saved["buffers"][name])
        self.lr = saved["lr"]

    @torch.no_grad()
    def _copy(self, x: Tensor, buffers: Mapping[str, Tensor]) -> nn.Module:
        module = copy.deepcopy(self._model)
        trained = [p for p in module.parameters() if _is_trained(p)]
        for p, piece in zip(trained, x.split([p.numel() for p in trained]), strict=True):
            p.copy_(piece.view_as(p))
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        return module


class _Loss(nn.Module):
    """From a batch to its loss and to the buffers after the forward pass."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, loss_fn: Loss, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Buffers]:
        if self.autocast is None:
            loss = loss_fn(self.model(inputs), targets)
        else:
            with torch.autocast(inputs.device.type, self.autocast):
                loss = loss_fn(self.model(inputs), targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return one number per node, got {got}; try .mean()")
        # Read here, inside functional_call, so that buffers that were replaced are seen as well as
        # those that were written to.
        return loss, dict(self.model.named_buffers())


def _add(gradients: Sequence[Tensor], totals: Sequence[Tensor], share: float, first: bool) -> None:
    """Adds `share` of the gradients to the totals, which start with the first."""
    for g, total in zip(gradients, totals, strict=True):
        if not first:
            total.add_(g, alpha=share)
            continue
        # A linear layer's gradient comes out transposed. Torch transposes single matrices in
        # blocks, in half the time that it takes for a stack of them.
        if g.ndim == 3 and g[0].numel() >= _LARGE and not g.is_contiguous():
            for one, other in zip(total, g, strict=True):
                one.copy_(other)
        else:
            total.copy_(g)
        if share != 1.0:
            total.mul_(share)


def _pieces(
    inputs: Tensor, targets: Tensor, micro_batch: int | None
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """The batches of all nodes in pieces, each with its share of the samples."""
    if micro_batch is None:
        yield inputs, targets, 1.0
        return
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch must be a whole number above 0 or None, got {micro_batch!r}")
    for x, y in zip(inputs.split(micro_batch, 1), targets.split(micro_batch, 1), strict=True):
        yield x, y, x.shape[1] / inputs.shape[1]


def _slow_stacked(model: nn.Module) -> bool:
    """Convolutions of n nodes in one call are one in n groups, which the CPU is slow at."""
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    return on_cpu and any(isinstance(module, _ConvNd) for module in model.modules())


def _is_trained(p: Tensor) -> bool:
    return p.requires_grad and p.numel() > 0


def _flat(trained: Mapping[str, Tensor]) -> Tensor:
    if not trained:
        raise ValueError("the model has no parameter to train; set requires_grad on some")
    kinds = sorted({str(p.dtype) for p in trained.values()})
    if len(kinds) > 1:
        raise ValueError(
            f"the parameters have several precisions, {', '.join(kinds)}; try model.float()"
        )
    return torch.cat([p.detach().reshape(-1) for p in trained.values()])


def _views(whole: Tensor, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns (n, d) as parameters, (n, ...) by name."""
    pieces = whole.split([p.numel() for p in trained.values()], dim=1)
    return {
        name: piece.view(len(whole), *p.shape)
        for (name, p), piece in zip(trained.items(), pieces, strict=True)
    }


def _batch_norm_counters(model: nn.Module) -> set[str]:
    """Counts of batches, the same on all nodes. They are given to the nodes as one number, for
    batch norm without momentum divides by it."""
    prefixes = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    names = {f"{prefix}.num_batches_tracked".removeprefix(".") for prefix in prefixes}
    return names & {name for name, _ in model.named_buffers()}
