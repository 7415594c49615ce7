"""AWC-DmSGD (Balu et al., 2020): the model is averaged while the gradient is still computed."""

from __future__ import annotations

from dataclasses import dataclass

from decentlam.algorithms.pmsgd import MomentumMethod, momentum_step_


@dataclass(frozen=True)
class AWCDmSGD(MomentumMethod):
    """m+ = beta m + g;  x+ = W x - lr m+

    The message is x itself, known before the gradient, so its exchange hides behind forward and
    backward. `heavy_ball` is Balu et al.'s form x+ = W x - lr g + beta (x - x-).
    """

    heavy_ball: bool = False
    buffers = ("m",)  # with heavy_ball: the last displacement x- - x
    needs_gradient = False

    @property
    def needs_symmetric(self) -> bool:  # type: ignore[override]
        return self.heavy_ball

    def message(self, x, g, state, step):
        return x

    def update(self, x, g, mixed, state, step):
        m = state["m"]
        if self.heavy_ball:
            drift = (x - mixed).add_(g, alpha=step.lr)
            m.mul_(self.beta * step.lr_ratio).add_(drift)
            if self.nesterov and step.lr > 0:  # at lr = 0 the step is plain gossip
                x.sub_(drift).sub_(m, alpha=self.beta)
            else:
                x.sub_(m)
        else:
            momentum_step_(x.copy_(mixed), g, m, step.lr, self.beta, self.nesterov)
