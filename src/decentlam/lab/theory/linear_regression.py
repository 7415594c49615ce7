"""The paper's linear regression: n nodes, each with its own data, one common optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from decentlam.lab.theory.quadratic import Quadratic

Gradient = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, eq=False)
class LinearRegression:
    """f_i(x) = |A_i x - b_i|^2 / 2 on node i, float64."""

    A: Tensor  # (n, rows, d)
    b: Tensor  # (n, rows)

    @cached_property
    def quadratic(self) -> Quadratic:
        """The same functions by Hessian and linear part: x* and b^2 live there."""
        return Quadratic(self.A.mT @ self.A, (self.A.mT @ self.b.unsqueeze(2)).squeeze(2))

    @property
    def x_star(self) -> Tensor:
        return self.quadratic.x_star

    @property
    def start(self) -> Tensor:
        """All nodes at zero, (n, d)."""
        return torch.zeros_like(self.quadratic.linear)

    def gradient(self, x: Tensor, step: int = 0) -> Tensor:
        """Return the full gradient of every node, (n, d); the same at every step."""
        return self.quadratic.gradient(x)

    def noisy(self, sigma: float, seed: int = 0) -> Gradient:
        """Return the full gradient plus Gaussian noise with E|noise|^2 = sigma^2 on every node.

        The noise is a function of (seed, step), whatever was asked for before.
        """

        def gradient(x: Tensor, step: int) -> Tensor:
            noise = torch.from_numpy(np.random.default_rng([seed, step]).standard_normal(x.shape))
            return self.gradient(x).add_(noise, alpha=sigma / x.shape[1] ** 0.5)

        return gradient

    def with_heterogeneity(self, factor: float) -> LinearRegression:
        """Return the same x* and Hessians with every grad f_i(x*), hence b, times `factor`."""
        at_optimum = self.A @ self.x_star
        return LinearRegression(self.A, at_optimum + factor * (self.b - at_optimum))

    def bias(self, x: Tensor) -> float:
        """Return (1/n) sum |x_i - x*|^2."""
        return (x - self.x_star).square().sum(1).mean().item()

    def relative_error(self, x: Tensor) -> float:
        """Return (1/n) sum |x_i - x*|^2 / |x*|^2, the y-axis of Figures 2 and 3."""
        return self.bias(x) / self.x_star.square().sum().item()


def linear_regression(
    num_nodes: int = 8, rows: int = 50, dim: int = 30, noise: float = 0.01, seed: int = 0
) -> LinearRegression:
    """Return A_i and x_o Gaussian, b_i = A_i x_o + noise; equal seeds give equal data.

    >>> linear_regression(seed=0).A.shape
    torch.Size([8, 50, 30])
    """
    if min(num_nodes, rows, dim) < 1 or rows < dim:
        raise ValueError(
            "linear_regression needs at least 1 node and rows >= dim >= 1, so that every node's "
            f"problem has one solution; got {num_nodes} nodes, {rows} rows, dim {dim}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a whole number of 0 or more, got {seed!r}")
    draw = np.random.default_rng(seed)
    x_o = draw.standard_normal(dim)
    A = draw.standard_normal((num_nodes, rows, dim))
    b = A @ x_o + noise * draw.standard_normal((num_nodes, rows))
    return LinearRegression(torch.from_numpy(A), torch.from_numpy(b))
