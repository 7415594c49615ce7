"""Quadratics on n nodes: their gradients, optimum and inconsistency."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Quadratic:
    """f_i(x) = x'H_i x / 2 - l_i'x on node i, in float64.

    >>> import torch
    >>> q = Quadratic(torch.ones(2, 1, 1), torch.tensor([[0.0], [2.0]]))
    >>> q.x_star.tolist(), q.b2
    ([1.0], 1.0)
    """

    hessians: Tensor  # (n, d, d), symmetric
    linear: Tensor  # (n, d)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hessians", self.hessians.double())
        object.__setattr__(self, "linear", self.linear.double())

    def gradient(self, x: Tensor) -> Tensor:
        """Return grad f_i at row i of x, (n, d)."""
        return torch.bmm(self.hessians, x.unsqueeze(2)).squeeze(2).sub_(self.linear)

    @cached_property
    def x_star(self) -> Tensor:
        """The minimizer of the average of all f_i, (d,)."""
        return torch.linalg.solve(self.hessians.mean(0), self.linear.mean(0))

    @cached_property
    def pull(self) -> Tensor:
        """grad f_i(x*), (n, d): what pulls node i away; zero on average, here to the last bit."""
        g = self.gradient(self.x_star.expand_as(self.linear))
        return g - g.mean(0)

    @cached_property
    def b2(self) -> float:
        """b^2 = (1/n) sum |grad f_i(x*)|^2 of Proposition 2."""
        return self.pull.square().sum(1).mean().item()
