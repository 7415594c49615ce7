"""SlowMo's limit on quadratics: the point that a whole window of tau steps maps to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from decentlam.lab.theory.quadratic import Quadratic


def window_offset(
    quadratic: Quadratic,
    W: Tensor,
    lr: float,
    beta: float,
    tau: int = 48,
    base: str = "dmsgd",
    inner_momentum: str = "keep",
) -> Tensor:
    """x - x*, (n, d), right after an exact average.

    One inner step is affine in s = (x - x*, m): m+ = beta m + H (x - x*) + g, x+ = V (x - lr m+)
    with V the mixing and g = grad f(x*). tau - 1 of them, then one with the exact average in place
    of V, map a window's start to its end; the slow momentum rests when both are equal. So the
    fixed point does not depend on slow_beta and alpha.
    """
    eye = torch.eye(len(W), dtype=W.dtype)
    J = torch.full_like(W, 1.0 / len(W))
    mixing = {"dmsgd": W, "local": eye}
    momentum_at_end = {"keep": eye, "reset": torch.zeros_like(W), "average": J}
    if base not in mixing or inner_momentum not in momentum_at_end or tau < 1:
        raise ValueError(
            "slowmo takes base dmsgd or local, inner_momentum keep, reset or average, and tau of 1 "
            f"or more; got {base!r}, {inner_momentum!r} and {tau!r}"
        )
    inner = _affine_step(quadratic, mixing[base], eye, lr, beta)
    last = _affine_step(quadratic, J, momentum_at_end[inner_momentum], lr, beta)
    window = last @ torch.linalg.matrix_power(inner, tau - 1)
    size = len(window) - 1
    rest = torch.eye(size, dtype=W.dtype) - window[:size, :size]
    s = torch.linalg.solve(rest, window[:size, size])
    return s[: size // 2].reshape_as(quadratic.linear)


def _affine_step(quadratic: Quadratic, V: Tensor, U: Tensor, lr: float, beta: float) -> Tensor:
    """(x, m, 1) -> (V (x - lr m+), U m+, 1) with m+ = beta m + H x + g, as one matrix."""
    n, d = quadratic.linear.shape
    eye = torch.eye(d, dtype=V.dtype)
    V, U = torch.kron(V, eye), torch.kron(U, eye)
    H = torch.block_diag(*quadratic.hessians)
    g = quadratic.pull.reshape(-1, 1)
    x_row = torch.cat([V - lr * V @ H, -lr * beta * V, -lr * V @ g], 1)
    m_row = torch.cat([U @ H, beta * U, U @ g], 1)
    one = torch.zeros(1, 2 * n * d + 1, dtype=V.dtype)
    one[0, -1] = 1.0
    return torch.cat([x_row, m_row, one])
