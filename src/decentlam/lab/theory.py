"""Quadratics on n nodes, and where each method stops on them: one linear system, no iteration.

Every method's limit on a static W with full gradients solves

    (I - W) x = -lr C grad f(x),    grad f_i(x_i) = H_i x_i - l_i

with its own C, a function of W and beta:

    dsgd, decentlam, qg-dmsgd    W                       proof of Proposition 3
    decentlam-steady             W                       v = 0 and x = W (x - lr g) at rest
    dmsgd                        W / (1-beta)            proof of Proposition 2
    da-dmsgd                     W (I - beta W)^-1       m = W (beta m + g) at rest
    awc-dmsgd                    I / (1-beta)
    d2-dmsgd, decentlam-exact    0, so that x_i = x*
    gt-dmsgd, pmsgd              0

SlowMo has no such equation: its models keep moving between two exact averages. Nor has LARS, which
makes every step lr * trust * |x| long, however small the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from decentlam.topology import Topology


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

    @property
    def start(self) -> Tensor:
        """All nodes at zero, (n, d)."""
        return torch.zeros_like(self.linear)

    def gradient(self, x: Tensor, step: int = 0) -> Tensor:
        """Return grad f_i at row i of x, (n, d); the same at every step."""
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

    def with_heterogeneity(self, factor: float) -> Quadratic:
        """Return the same x* and Hessians with every grad f_i(x*), hence b, times `factor`."""
        return Quadratic(self.hessians, self.linear + (1 - factor) * self.pull)

    def bias(self, x: Tensor) -> float:
        """Return (1/n) sum |x_i - x*|^2."""
        return (x - self.x_star).square().sum(1).mean().item()

    def relative_error(self, x: Tensor) -> float:
        """Return (1/n) sum |x_i - x*|^2 / |x*|^2, the y-axis of Figures 2 and 3."""
        return self.bias(x) / self.x_star.square().sum().item()


def linear_regression(
    num_nodes: int = 8, rows: int = 50, dim: int = 30, noise: float = 0.01, seed: int = 0
) -> Quadratic:
    """Return the paper's f_i(x) = |A_i x - b_i|^2 / 2 with A_i and x_o Gaussian, b_i = A_i x_o +
    noise; equal seeds give equal data.

    >>> linear_regression(seed=0).hessians.shape
    torch.Size([8, 30, 30])
    """
    if min(num_nodes, rows, dim) < 1 or rows < dim:
        raise ValueError(
            "linear_regression needs at least 1 node and rows >= dim >= 1, so that every node's "
            f"problem has one solution; got {num_nodes} nodes, {rows} rows, dim {dim}"
        )
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    draw = np.random.default_rng(seed)
    x_o = draw.standard_normal(dim)
    A = draw.standard_normal((num_nodes, rows, dim))
    b = A @ x_o + noise * draw.standard_normal((num_nodes, rows))
    At = torch.from_numpy(A).mT
    return Quadratic(At @ At.mT, (At @ torch.from_numpy(b).unsqueeze(2)).squeeze(2))


def fixed_point(
    method: str, topology: Topology, problem: Quadratic, lr: float, beta: float = 0.9
) -> Tensor:
    """Return the models (n, d) where the method stops.

    Whether the method gets there is another matter: too large an lr diverges.

    >>> import torch
    >>> from decentlam.topology import ring
    >>> problem = Quadratic(torch.ones(2, 1, 1), torch.tensor([[0.0], [2.0]]))
    >>> x = fixed_point("awc-dmsgd", ring(2), problem, lr=0.1, beta=0.0)
    >>> [round(value, 4) for value in x.flatten().tolist()]  # (1 + lr) (x - x*) = lr (target - x*)
    [0.9091, 1.0909]
    """
    if method not in COUPLINGS:
        raise ValueError(
            f"{method!r} has no fixed point in closed form; choose from {', '.join(COUPLINGS)}"
        )
    if not topology.static:
        raise ValueError(
            f"{topology!r} changes with the step, so the models keep moving and have no fixed "
            "point; try a static topology such as symmetric-exponential"
        )
    W = topology.weights(0)
    return problem.x_star + lr * _scaled_offset(problem, W, COUPLINGS[method](W, beta), lr)


# C of each method; see the head of this file.
COUPLINGS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "pmsgd": lambda W, beta: 0 * W,
    "dsgd": lambda W, beta: W,
    "dmsgd": lambda W, beta: W / (1 - beta),
    "da-dmsgd": lambda W, beta: torch.linalg.solve(torch.eye(len(W)).to(W) - beta * W, W),
    "awc-dmsgd": lambda W, beta: torch.eye(len(W)).to(W) / (1 - beta),
    "qg-dmsgd": lambda W, beta: W,
    "d2-dmsgd": lambda W, beta: 0 * W,
    "gt-dmsgd": lambda W, beta: 0 * W,
    "decentlam": lambda W, beta: W,
    "decentlam-steady": lambda W, beta: W,
    "decentlam-exact": lambda W, beta: 0 * W,
}


def _scaled_offset(problem: Quadratic, W: Tensor, C: Tensor, lr: float) -> Tensor:
    """Return y = (x - x*) / lr, (n, d), to full accuracy at every lr, also 0.

    With g = grad f(x*) the system reads ((I-W) + lr C H) y = -C g. W and C are doubly stochastic
    up to a factor c, so its average over nodes, J times it, is lr c J H y = 0: nearly singular for
    small lr. Here that part is divided by lr c.
    """
    n, d = problem.linear.shape
    J = torch.full_like(W, 1.0 / n)
    rest = C - C.sum() * J / n  # C without its average
    pull = torch.einsum("ij,jab->iajb", lr * rest + J, problem.hessians)
    network = torch.kron(torch.eye(n, dtype=W.dtype) - W, torch.eye(d, dtype=W.dtype))
    y = torch.linalg.solve(network + pull.reshape(n * d, n * d), -(rest @ problem.pull).reshape(-1))
    return y.reshape(n, d)
