"""One optimizer class per method: `DecentLaM(model.parameters(), lr=0.4, ...)`.

Every class is a torch.optim.Optimizer, with a page in docs/methods: what it does, when to use it,
what it costs. Besides its own arguments it takes the keywords of
`decentlam.options.OptimizerOptions`, such as topology, overlap and weight_decay. One process alone
runs momentum SGD, whatever the method; with `AdamW` and `PmAdamW` it runs Adam.

In the equations W averages with the neighbors, g is the gradient with weight decay, and beta is the
`momentum`. `nesterov` is Nesterov's momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Unpack

from torch.optim.optimizer import ParamsT

from decentlam import algorithms
from decentlam.algorithms import Algorithm
from decentlam.algorithms.adamw import check_betas
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.options import CommonOptions, OptimizerOptions, show_options


class _MomentumOptimizer(DecentralizedOptimizer):
    """An optimizer of a method that has SGD's momentum and no arguments of its own."""

    _kind: ClassVar[Callable[[float, bool], Algorithm]]

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, type(self)._kind(momentum, nesterov), lr, **options)


@show_options(stable="auto")
class DecentLaM(_MomentumOptimizer):
    """DecentLaM: large-batch momentum without the bias that momentum adds to decentralized SGD.

        v+ = beta v + x - W (x - lr g);    x+ = x - v+

    This is Algorithm 2 of the paper with v = lr m, so that nothing is divided by lr. `stable` is
    "auto": on changing topologies, where Algorithm 2 would diverge, `SteadyDecentLaM` runs instead,
    or `ExactDecentLaM` if each node has two peers per step.

    When not: close to the largest stable learning rate on a ring or mesh; check with
    `decentlam.growth(..., lr=, curvature=)`.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.DecentLaM(model.parameters(), lr=0.1, momentum=0.9, topology="ring")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> opt.step()
    """

    _kind = algorithms.DecentLaM


@show_options()
class ExactDecentLaM(_MomentumOptimizer):
    """DecentLaM without bias, for changing topologies: each node learns how its gradient differs.

        u = lr g - y;    z = x - u - beta v;    x+ = W z
        v+ = beta v + u + (z - x+) / 2;    y+ = y - (z - x+) / 20

    When not: with one peer per step, or on a one-peer hypercube of 16 nodes or more. `DecentLaM`
    chooses it where it helps.
    """

    _kind = algorithms.ExactDecentLaM


@show_options(stable="auto")
class SteadyDecentLaM(DecentralizedOptimizer):
    """DecentLaM for changing topologies: its momentum sees a running mean of what mixing does.

        z = x - lr g - beta v;    x+ = W z;    s+ = mu s + (1 - mu) (z - x+)
        v+ = beta v + lr g + c (z - x+) + (1 - c) s+

    When not: on fixed topologies, where `DecentLaM` reaches a better model at the same cost.

    Args:
        mu: The coefficient of the running mean. docs/methods/decentlam-steady.md derives the
            default.
        share: c, the share that enters momentum directly. Default: 2 (1 - beta), at most 0.5; half
            of that on large networks that mix slowly.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        mu: float | None = None,
        share: float | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        algorithm = algorithms.SteadyDecentLaM(momentum, nesterov, mu, share)
        super().__init__(params, algorithm, lr, **options)


@show_options()
class PmSGD(DecentralizedOptimizer):
    """Parallel momentum SGD: the exact average of all gradients, as DDP with torch.optim.SGD.

        m+ = beta m + mean(g);    x+ = x - lr m+

    When not: on slow networks. This is the baseline that the other methods are compared with. The
    topology is not used.

    Args:
        lars: Scale each layer's gradient by trust |x| / (|mean(g)| + weight_decay |x|): PmSGD+LARS.
        trust: LARS's coefficient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        lars: bool = False,
        trust: float = 0.001,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, algorithms.PmSGD(momentum, nesterov, lars, trust), lr, **options)


@show_options()
class DSGD(DecentralizedOptimizer):
    """Decentralized SGD: a gradient step, then the average with the neighbors.

        x+ = W (x - lr g)

    When not: for deep networks, which need momentum to train in few steps.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, **options: Unpack[OptimizerOptions]
    ) -> None:
        super().__init__(params, algorithms.DSGD(), lr, **options)


@show_options()
class DmSGD(_MomentumOptimizer):
    """Decentralized momentum SGD: a momentum step, then the average. Algorithm 1 of the paper.

        m+ = beta m + g;    x+ = W (x - lr m+)

    When not: with different data on each node, large batches or a large lr. Its bias grows with
    1 / (1 - beta)^2; `DecentLaM` costs the same without that.
    """

    _kind = algorithms.DmSGD


@show_options()
class DADmSGD(_MomentumOptimizer):
    """DmSGD that averages the momentum too: doubly averaged.

        h = beta m + g;    x+ = W (x - lr h);    m+ = W h

    When not: on slow networks. It sends two models per message.
    """

    _kind = algorithms.DADmSGD


@show_options()
class AWCDmSGD(DecentralizedOptimizer):
    """DmSGD that averages the model while the gradient is computed: average with computation.

        m+ = beta m + g;    x+ = W x - lr m+

    The message needs no gradient, so it travels during the whole forward and backward.

    When not: with different data or large batches. Its bias is the largest of all methods here.

    Args:
        heavy_ball: The form x+ = W x - lr g + beta (x - x-) of Balu et al.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        heavy_ball: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        algorithm = algorithms.AWCDmSGD(momentum, nesterov, heavy_ball)
        super().__init__(params, algorithm, lr, **options)


@show_options()
class SlowMo(DecentralizedOptimizer):
    """tau steps of DmSGD or local SGD, then an exact average a and a step with slow momentum.

        u+ = slow_beta u + (x0 - a) / lr;    x = x0 - alpha lr u+

    x0 is the model at the beginning of the tau steps.

    When not: if even an occasional all-reduce is too expensive.

    Args:
        tau: Steps from one exact average to the next.
        slow_beta: The slow momentum.
        alpha: The slow learning rate.
        base: "dmsgd", or "local" to send nothing between exact averages.
        inner_momentum: What to do with m at the exact average: "keep", "reset" or "average" it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        tau: int = 48,
        slow_beta: float = 0.5,
        alpha: float = 1.0,
        base: Literal["dmsgd", "local"] = "dmsgd",
        inner_momentum: Literal["keep", "reset", "average"] = "keep",
        **options: Unpack[OptimizerOptions],
    ) -> None:
        algorithm = algorithms.SlowMo(
            momentum, nesterov, tau, slow_beta, alpha, base, inner_momentum
        )
        super().__init__(params, algorithm, lr, **options)


@show_options()
class QGDmSGD(DecentralizedOptimizer):
    """DmSGD whose momentum follows the model's own displacement: quasi-global momentum.

        x+ = W (x - lr (beta q + g));    q+ = mu q + (1 - mu) (x - x+) / lr

    When not: if you train for few steps. With mu = beta it moves no further than SGD without
    momentum, so it needs a larger learning rate.

    Args:
        mu: The coefficient of the running mean q. Default: beta.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        mu: float | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, algorithms.QGDmSGD(momentum, nesterov, mu), lr, **options)


@show_options(topology="symmetric-exponential")
class D2DmSGD(_MomentumOptimizer):
    """Exact diffusion with momentum: no bias if nodes see different data.

        m+ = beta m + g;    p+ = x - lr m+;    x+ = (I + W)/2 (p+ + x - p)

    When not: on changing topologies, or with noisy gradients, because its correction accumulates
    their noise.
    """

    _kind = algorithms.D2DmSGD


@show_options(topology="symmetric-exponential")
class GTDmSGD(_MomentumOptimizer):
    """Gradient tracking with momentum: no bias if nodes see different data.

        y = c + g - g-;    m+ = beta m + y;    x+ = W (x - lr m+);    c+ = W y

    When not: at a large lr or high momentum, where it diverges; see docs/stability.md. It sends two
    models per message.
    """

    _kind = algorithms.GTDmSGD


@show_options(stable="auto")
class AdamW(DecentralizedOptimizer):
    """AdamW for decentralized training: for transformers, in place of torch.optim.AdamW.

        V = beta2 V + (1 - beta2) g^2;    p = g / (sqrt(V / (1 - beta2^t)) + eps)
        z = x - lr weight_decay x - u,    u = the momentum of lr p;    x+ = W z

    The gradient is divided by its second moment before momentum (LaProp's order), and the momentum
    is that of `SteadyDecentLaM`. A seventeenth of the second moments is averaged in every step, so
    a step sends 1.06 models.

    When not: if the network is fast enough for an all-reduce. Use `PmAdamW` or DDP there.

    Args:
        lr: The learning rate. Start with the one you use with DDP, then try up to twice that.
        betas: The coefficients of the running means of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled: every step subtracts lr * weight_decay * x.
        second_moment: "slices" averages a slice of them per step; "local" averages none, which
            saves the 6 % and is only right if all nodes see the same kind of data.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        second_moment: Literal["slices", "local"] = "slices",
        **options: Unpack[CommonOptions],
    ) -> None:
        _refuse_sgd(type(self).__name__, options)
        algorithm = algorithms.AdamW(*check_betas(betas), eps, second_moment)
        super().__init__(params, algorithm, lr, weight_decay=weight_decay, **options)


@show_options()
class PmAdamW(DecentralizedOptimizer):
    """AdamW on the exact average of all gradients, as DDP with torch.optim.AdamW.

    The arguments are those of `AdamW`. When not: on slow networks. This is the baseline that
    `AdamW` is compared with. The topology is not used.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Unpack[CommonOptions],
    ) -> None:
        _refuse_sgd(type(self).__name__, options)
        algorithm = algorithms.PmAdamW(*check_betas(betas), eps)
        super().__init__(params, algorithm, lr, weight_decay=weight_decay, **options)


def _refuse_sgd(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what torch.optim has for SGD, or for Adam and not here, with the cure."""
    if "momentum" in options:
        raise TypeError(f"{name} has no argument momentum; its first beta is: betas=(0.9, 0.999)")
    if options.get("amsgrad"):
        raise TypeError(f"{name} has no argument amsgrad; leave it out")
