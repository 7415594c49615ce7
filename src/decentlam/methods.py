"""One optimizer class per method of the paper: `DecentLaM(model.parameters(), lr=0.4, ...)`."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from decentlam import algorithms
from decentlam.algorithms import Algorithm
from decentlam.optimizer import DecentralizedOptimizer


class Method(DecentralizedOptimizer):
    """What the methods share: one node alone has nobody to average with, and is momentum SGD."""

    def _alone(self, algorithm: Algorithm) -> Algorithm:
        if isinstance(algorithm, algorithms.PmSGD):
            return algorithm
        beta, nesterov = getattr(algorithm, "beta", 0.0), getattr(algorithm, "nesterov", False)
        return algorithms.PmSGD(beta, nesterov)


class DSGD(Method):
    """x+ = W (x - lr g). Options as in `DecentralizedOptimizer`."""

    def __init__(self, params: ParamsT, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, algorithms.DSGD(), lr, **options)


class PmSGD(Method):
    """m+ = beta m + mean(g); x+ = x - lr m+, what DDP with SGD does; `lars=True` adds LARS."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        lars: bool = False,
        trust: float = 0.001,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.PmSGD(momentum, nesterov, lars, trust), lr, **options)


class DmSGD(Method):
    """m+ = beta m + g; x+ = W (x - lr m+), Algorithm 1 of the paper."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.DmSGD(momentum, nesterov), lr, **options)


class DADmSGD(Method):
    """DmSGD that averages the momentum too (two payloads per message)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.DADmSGD(momentum, nesterov), lr, **options)


class AWCDmSGD(Method):
    """m+ = beta m + g; x+ = W x - lr m+; the exchange runs during forward and backward."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        heavy_ball: bool = False,
        **options: Any,
    ) -> None:
        algorithm = algorithms.AWCDmSGD(momentum, nesterov, heavy_ball)
        super().__init__(params, algorithm, lr, **options)


class SlowMo(Method):
    """tau DmSGD (or local) steps, then an exact average and a step of slow momentum."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        tau: int = 48,
        slow_beta: float = 0.5,
        alpha: float = 1.0,
        base: str = "dmsgd",
        inner_momentum: str = "keep",
        **options: Any,
    ) -> None:
        algorithm = algorithms.SlowMo(
            momentum, nesterov, tau, slow_beta, alpha, base, inner_momentum
        )
        super().__init__(params, algorithm, lr, **options)


class QGDmSGD(Method):
    """DmSGD whose momentum follows the model's own displacement (quasi-global momentum)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        mu: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.QGDmSGD(momentum, nesterov, mu), lr, **options)


class D2DmSGD(Method):
    """Exact diffusion with momentum: no inconsistency bias at all."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.D2DmSGD(momentum, nesterov), lr, **options)


class GTDmSGD(Method):
    """DmSGD along a tracked gradient: no inconsistency bias where it converges (two payloads)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, algorithms.GTDmSGD(momentum, nesterov), lr, **options)


class DecentLaM(Method):
    """v+ = beta v + x - W (x - lr g); x+ = x - v+, Algorithm 2 of the paper with v = lr m.

    Where weights that change would make it diverge, `stable="auto"` runs `SteadyDecentLaM`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        stable: str = "auto",
        **options: Any,
    ) -> None:
        algorithm = algorithms.DecentLaM(momentum, nesterov)
        super().__init__(params, algorithm, lr, stable=stable, **options)


class SteadyDecentLaM(Method):
    """DecentLaM whose momentum sees only the mean of what mixing does: for changing weights."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = False,
        mu: float | None = None,
        share: float | None = None,
        **options: Any,
    ) -> None:
        algorithm = algorithms.SteadyDecentLaM(momentum, nesterov, mu, share)
        super().__init__(params, algorithm, lr, **options)
