"""One optimizer class per method: `DecentLaM(model.parameters(), lr=0.4, ...)`.

Every class is a torch.optim.Optimizer. Besides its own arguments it takes the keywords of
`decentlam.options.OptimizerOptions`, such as topology, overlap and weight_decay. One process alone
runs momentum SGD, whatever the method; with `AdamW` and `PmAdamW` it runs Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from torch.optim.optimizer import ParamsT

from decentlam import algorithms
from decentlam.algorithms.adamw import check_betas
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.options import CommonOptions, OptimizerOptions, show_options


@show_options(stable="auto")
class DecentLaM(DecentralizedOptimizer):
    """DecentLaM: large-batch momentum without the bias that momentum adds to decentralized SGD.

        v+ = beta v + x - W (x - lr g);    x+ = x - v+

    This is Algorithm 2 of the paper with v = lr m, so that nothing is divided by lr.

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`. `stable` defaults to "auto": on changing topologies, where
            Algorithm 2 would diverge, `SteadyDecentLaM` runs instead, or `ExactDecentLaM` if each
            node has two peers per step.

    When not: close to the largest stable learning rate on a ring or mesh; check with
    `decentlam.growth(..., lr=, curvature=)`. If all nodes see the same data distribution, DmSGD
    does as well.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.DecentLaM(model.parameters(), lr=0.1, momentum=0.9, topology="ring")
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> opt.step()

    Reference: Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training,
    ICCV 2021.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        options.setdefault("stable", "auto")
        super().__init__(params, algorithms.DecentLaM(momentum, nesterov), lr, **options)


@show_options()
class ExactDecentLaM(DecentralizedOptimizer):
    """DecentLaM without bias, for changing topologies: each node learns how its gradient differs.

        u = lr g - y;    z = x - u - beta v;    x+ = W z
        v+ = beta v + u + (z - x+) / 2;    y+ = y - (z - x+) / 20

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`.

    When not: with one peer per step, or on a one-peer hypercube of 16 nodes or more. `DecentLaM`
    chooses it where it helps.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.ExactDecentLaM(model.parameters(), lr=0.1, topology="two-random-matches")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, algorithms.ExactDecentLaM(momentum, nesterov), lr, **options)


@show_options(stable="auto")
class SteadyDecentLaM(DecentralizedOptimizer):
    """DecentLaM for changing topologies: its momentum sees a running mean of what mixing does.

        z = x - lr g - beta v;    x+ = W z;    s+ = mu s + (1 - mu) (z - x+)
        v+ = beta v + lr g + c (z - x+) + (1 - c) s+

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        mu: The coefficient of the running mean. docs/methods/decentlam-steady.md derives the
            default.
        share: c, the share that enters momentum directly. Default: 2 (1 - beta), at most 0.5.
        options: See `OptimizerOptions`. `stable` defaults to "auto": on large networks that mix
            slowly, half the share is used.

    When not: on fixed topologies, where `DecentLaM` reaches a better model at the same cost.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.SteadyDecentLaM(model.parameters(), lr=0.1, topology="one-peer-exponential")
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
        options.setdefault("stable", "auto")
        algorithm = algorithms.SteadyDecentLaM(momentum, nesterov, mu, share)
        super().__init__(params, algorithm, lr, **options)


@show_options()
class PmSGD(DecentralizedOptimizer):
    """Parallel momentum SGD: the exact average of all gradients, as DDP with torch.optim.SGD.

        m+ = beta m + mean(g);    x+ = x - lr m+

    With `lars=True` each layer's gradient is scaled by trust |x| / (|mean(g)| + weight_decay |x|):
    PmSGD+LARS.

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        lars: Scale the learning rate of each layer.
        trust: LARS's coefficient.
        options: See `OptimizerOptions`; the topology is not used.

    When not: on slow networks. This is the baseline that the other methods are compared with.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.PmSGD(model.parameters(), lr=0.1, momentum=0.9, lars=True)

    Reference for LARS: You, Gitman, Ginsburg, Large batch training of convolutional networks, 2017.
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

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        options: See `OptimizerOptions`.

    When not: for deep networks, which need momentum to train in few steps.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.DSGD(model.parameters(), lr=0.1, topology="ring")

    Reference: Lian et al., Can decentralized algorithms outperform centralized algorithms?, 2017.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, **options: Unpack[OptimizerOptions]
    ) -> None:
        super().__init__(params, algorithms.DSGD(), lr, **options)


@show_options()
class DmSGD(DecentralizedOptimizer):
    """Decentralized momentum SGD: a momentum step, then the average. Algorithm 1 of the paper.

        m+ = beta m + g;    x+ = W (x - lr m+)

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`.

    When not: with different data on each node, large batches or a large lr. Its bias grows with
    1 / (1 - beta)^2; `DecentLaM` costs the same without that.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.DmSGD(model.parameters(), lr=0.1, momentum=0.9, topology="ring")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, algorithms.DmSGD(momentum, nesterov), lr, **options)


@show_options()
class DADmSGD(DecentralizedOptimizer):
    """DmSGD that averages the momentum too: doubly averaged.

        h = beta m + g;    x+ = W (x - lr h);    m+ = W h

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`.

    When not: on slow networks. It sends two models per message.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.DADmSGD(model.parameters(), lr=0.1, momentum=0.9, topology="ring")

    Reference: Yu, Jin, Yang, On the linear speedup analysis of communication efficient momentum SGD
    for distributed non-convex optimization, 2019.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(params, algorithms.DADmSGD(momentum, nesterov), lr, **options)


@show_options()
class AWCDmSGD(DecentralizedOptimizer):
    """DmSGD that averages the model while the gradient is computed: average with computation.

        m+ = beta m + g;    x+ = W x - lr m+

    The message needs no gradient, so it travels during the whole forward and backward.

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        heavy_ball: The form x+ = W x - lr g + beta (x - x-) of Balu et al.
        options: See `OptimizerOptions`.

    When not: with different data or large batches. Its bias is the largest of all methods here.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.AWCDmSGD(model.parameters(), lr=0.1, momentum=0.9, topology="ring")

    Reference: Balu et al., Decentralized deep learning using momentum-accelerated consensus, 2020.
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

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta of the inner steps.
        nesterov: Nesterov's momentum in the inner steps.
        tau: Steps from one exact average to the next.
        slow_beta: The slow momentum.
        alpha: The slow learning rate.
        base: "dmsgd", or "local" to send nothing between exact averages.
        inner_momentum: What to do with m at the exact average: "keep", "reset" or "average" it.
        options: See `OptimizerOptions`.

    When not: if even an occasional all-reduce is too expensive.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.SlowMo(model.parameters(), lr=0.1, tau=12, base="local")

    Reference: Wang et al., SlowMo: Improving communication-efficient distributed SGD with slow
    momentum, 2020.
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

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        mu: The coefficient of the running mean q. Default: beta.
        options: See `OptimizerOptions`.

    When not: if you train for few steps. With mu = beta it moves no further than SGD without
    momentum, so it needs a larger learning rate.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.QGDmSGD(model.parameters(), lr=0.1, momentum=0.9, mu=0.5)

    Reference: Lin et al., Quasi-global momentum: Accelerating decentralized deep learning on
    heterogeneous data, 2021.
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
class D2DmSGD(DecentralizedOptimizer):
    """Exact diffusion with momentum: no bias if nodes see different data.

        m+ = beta m + g;    p+ = x - lr m+;    x+ = (I + W)/2 (p+ + x - p)

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`. `topology` defaults to "symmetric-exponential".

    When not: on changing topologies, or with noisy gradients, because its correction accumulates
    their noise.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.D2DmSGD(model.parameters(), lr=0.1, momentum=0.9, topology="mesh")

    Reference: Yuan, Alghunaim, Ying, Sayed, On the influence of bias-correction on distributed
    stochastic optimization, 2020.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        options.setdefault("topology", "symmetric-exponential")
        super().__init__(params, algorithms.D2DmSGD(momentum, nesterov), lr, **options)


@show_options(topology="symmetric-exponential")
class GTDmSGD(DecentralizedOptimizer):
    """Gradient tracking with momentum: no bias if nodes see different data.

        y = c + g - g-;    m+ = beta m + y;    x+ = W (x - lr m+);    c+ = W y

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        momentum: beta.
        nesterov: Nesterov's momentum.
        options: See `OptimizerOptions`. `topology` defaults to "symmetric-exponential".

    When not: at a large lr or high momentum, where it diverges; see docs/stability.md. It sends two
    models per message.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.GTDmSGD(model.parameters(), lr=0.01, momentum=0.8, topology="ring")

    Reference: Xu, Zhu, Soh, Xie, Augmented distributed gradient methods for multi-agent
    optimization under uncoordinated constant stepsizes, 2015.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        options.setdefault("topology", "symmetric-exponential")
        super().__init__(params, algorithms.GTDmSGD(momentum, nesterov), lr, **options)


@show_options(stable="auto")
class AdamW(DecentralizedOptimizer):
    """AdamW for decentralized training: for transformers, in place of torch.optim.AdamW.

        V = beta2 V + (1 - beta2) g^2;    p = g / (sqrt(V / (1 - beta2^t)) + eps)
        z = x - lr weight_decay x - u,    u = the momentum of lr p;    x+ = W z

    The gradient is divided by its second moment before momentum (LaProp's order), and the momentum
    is that of `SteadyDecentLaM`. A seventeenth of the second moments is averaged in every step, so
    a step sends 1.06 models.

    Args:
        params: Parameters or param groups.
        lr: The learning rate. Start with the one you use with DDP, then try up to twice that.
        betas: The coefficients of the running means of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled: every step subtracts lr * weight_decay * x.
        second_moment: "slices" averages a slice of them per step; "local" averages none, which
            saves the 6 % and is only right if all nodes see the same kind of data.
        options: See `OptimizerOptions`. `stable` defaults to "auto".

    When not: if the network is fast enough for an all-reduce. Use `PmAdamW` or DDP there.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> opt.step()

    Reference for the order: Ziyin, Wang, Ueda, LaProp: Separating momentum and adaptivity in Adam,
    2020.
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
        options.setdefault("stable", "auto")
        algorithm = algorithms.AdamW(*check_betas(betas), eps, second_moment)
        super().__init__(params, algorithm, lr, weight_decay=weight_decay, **options)


@show_options()
class PmAdamW(DecentralizedOptimizer):
    """AdamW on the exact average of all gradients, as DDP with torch.optim.AdamW.

    Args:
        params: Parameters or param groups.
        lr: The learning rate.
        betas: The coefficients of the running means of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled: every step subtracts lr * weight_decay * x.
        options: See `OptimizerOptions`; the topology is not used.

    When not: on slow networks. This is the baseline that `AdamW` is compared with.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> opt = decentlam.PmAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    Reference: Loshchilov, Hutter, Decoupled weight decay regularization, 2019.
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
