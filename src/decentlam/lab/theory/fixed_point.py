"""Where each method stops on quadratics with full gradients: one linear system, no iteration.

Every method's limit on a static W solves

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

import torch
from torch import Tensor

from decentlam.lab.theory.quadratic import Quadratic
from decentlam.topology import Topology


def fixed_point(
    method: str, topology: Topology, hessians: Tensor, linear: Tensor, lr: float, beta: float = 0.9
) -> Tensor:
    """Return the models (n, d) where the method stops; grad f_i(x) = hessians_i x - linear_i.

    Whether the method gets there is another matter: too large an lr diverges.

    >>> import torch
    >>> from decentlam.topology import ring
    >>> targets = torch.tensor([[0.0], [2.0]])
    >>> x = fixed_point("awc-dmsgd", ring(2), torch.ones(2, 1, 1), targets, lr=0.1, beta=0.0)
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
    quadratic = Quadratic(hessians, linear)
    W = topology.weights(0)
    return quadratic.x_star + lr * _scaled_offset(quadratic, W, COUPLINGS[method](W, beta), lr)


def _unbiased(W: Tensor, beta: float) -> Tensor:
    return torch.zeros_like(W)


def _as_dsgd(W: Tensor, beta: float) -> Tensor:
    return W


# C of each method; see the head of this file.
COUPLINGS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "pmsgd": _unbiased,
    "dsgd": _as_dsgd,
    "dmsgd": lambda W, beta: W / (1 - beta),
    "da-dmsgd": lambda W, beta: torch.linalg.solve(torch.eye(len(W)).to(W) - beta * W, W),
    "awc-dmsgd": lambda W, beta: torch.eye(len(W)).to(W) / (1 - beta),
    "qg-dmsgd": _as_dsgd,
    "d2-dmsgd": _unbiased,
    "gt-dmsgd": _unbiased,
    "decentlam": _as_dsgd,
    "decentlam-steady": _as_dsgd,
    "decentlam-exact": _unbiased,
}


def _scaled_offset(quadratic: Quadratic, W: Tensor, C: Tensor, lr: float) -> Tensor:
    """Return y = (x - x*) / lr, (n, d), to full accuracy at every lr, also 0.

    With g = grad f(x*) the system reads ((I-W) + lr C H) y = -C g. W and C are doubly stochastic
    up to a factor c, so its average over nodes, J times it, is lr c J H y = 0: nearly singular for
    small lr. Here that part is divided by lr c.
    """
    n, d = quadratic.linear.shape
    J = torch.full_like(W, 1.0 / n)
    rest = C - C.sum() * J / n  # C without its average
    pull = torch.einsum("ij,jab->iajb", lr * rest + J, quadratic.hessians)
    network = torch.kron(torch.eye(n, dtype=W.dtype) - W, torch.eye(d, dtype=W.dtype))
    y = torch.linalg.solve(
        network + pull.reshape(n * d, n * d), -(rest @ quadratic.pull).reshape(-1)
    )
    return y.reshape(n, d)
