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

SlowMo has no such equation: its models keep moving inside a window of tau steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decentlam.lab.theory.quadratic import Quadratic
from decentlam.topology import Topology

_METHODS = (
    "awc-dmsgd",
    "d2-dmsgd",
    "da-dmsgd",
    "decentlam",
    "decentlam-exact",
    "decentlam-steady",
    "dmsgd",
    "dsgd",
    "gt-dmsgd",
    "pmsgd",
    "qg-dmsgd",
    "slowmo",
)


def fixed_point(
    method: str,
    topology: Topology,
    hessians: Tensor,
    linear: Tensor,
    lr: float,
    beta: float = 0.9,
    *,
    tau: int = 48,
) -> Tensor:
    """Return the models (n, d) where the method stops; grad f_i(x) = hessians_i x - linear_i.

    slowmo's models are those right after an exact average, taken every `tau` steps. Whether the
    method gets there is another matter: too large an lr diverges.

    >>> import torch
    >>> from decentlam.topology import ring
    >>> targets = torch.tensor([[0.0], [2.0]])
    >>> x = fixed_point("awc-dmsgd", ring(2), torch.ones(2, 1, 1), targets, lr=0.1, beta=0.0)
    >>> [round(value, 4) for value in x.flatten().tolist()]  # (1 + lr) (x - x*) = lr (target - x*)
    [0.9091, 1.0909]
    """
    quadratic = Quadratic(hessians, linear)
    W = _static_weights(method, topology, quadratic)
    if not 0 <= lr < math.inf or not 0 <= beta < 1:
        raise ValueError(f"lr must be 0 or more and beta in [0, 1), got lr = {lr}, beta = {beta}")
    if method == "slowmo":
        return quadratic.x_star + _slowmo_offset(quadratic, W, lr, beta, tau)
    C = _coupling(method, W, beta)
    return quadratic.x_star + lr * _scaled_offset(quadratic, W, C, lr)


def _coupling(method: str, W: Tensor, beta: float) -> Tensor:
    """Return C of the method, (n, n); see the head of this file."""
    eye = torch.eye(len(W), dtype=W.dtype)
    if method in ("dsgd", "qg-dmsgd", "decentlam", "decentlam-steady"):
        return W
    if method == "dmsgd":
        return W / (1 - beta)
    if method == "da-dmsgd":
        return torch.linalg.solve(eye - beta * W, W)
    if method == "awc-dmsgd":
        return eye / (1 - beta)
    return torch.zeros_like(W)


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


def _slowmo_offset(quadratic: Quadratic, W: Tensor, lr: float, beta: float, tau: int) -> Tensor:
    """Return x - x*, (n, d), right after an exact average.

    One inner step is affine in s = (x - x*, m): m+ = beta m + H (x - x*) + g, x+ = V (x - lr m+)
    with V the mixing and g = grad f(x*). tau - 1 of them, then one with the exact average in place
    of V, map a window's start to its end; the slow momentum rests when both are equal. So the
    fixed point does not depend on slow_beta and alpha.
    """
    J = torch.full_like(W, 1.0 / len(W))
    inner = _affine_step(quadratic, W, lr, beta)
    last = _affine_step(quadratic, J, lr, beta)
    window = last @ torch.linalg.matrix_power(inner, tau - 1)
    size = len(window) - 1
    rest = torch.eye(size, dtype=W.dtype) - window[:size, :size]
    s = torch.linalg.solve(rest, window[:size, size])
    return s[: size // 2].reshape_as(quadratic.linear)


def _affine_step(quadratic: Quadratic, V: Tensor, lr: float, beta: float) -> Tensor:
    """Return (x, m, 1) -> (V (x - lr m+), m+, 1), m+ = beta m + H x + g, as one matrix."""
    n, d = quadratic.linear.shape
    eye = torch.eye(d, dtype=V.dtype)
    V = torch.kron(V, eye)
    H = torch.block_diag(*quadratic.hessians)
    g = quadratic.pull.reshape(-1, 1)
    x_row = torch.cat([V - lr * V @ H, -lr * beta * V, -lr * V @ g], 1)
    m_row = torch.cat([H, beta * torch.eye(n * d, dtype=V.dtype), g], 1)
    one = torch.zeros(1, 2 * n * d + 1, dtype=V.dtype)
    one[0, -1] = 1.0
    return torch.cat([x_row, m_row, one])


def _static_weights(method: str, topology: Topology, quadratic: Quadratic) -> Tensor:
    """Return W; refuse what has no fixed point."""
    if method == "pmsgd-lars":
        raise ValueError(
            "pmsgd-lars has no fixed point: LARS makes every step lr * trust * |x| long, however "
            "small the gradient; try pmsgd"
        )
    if method not in _METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(_METHODS)}")
    if not topology.static:
        raise ValueError(
            f"{topology!r} changes with the step, so the models keep moving and have no fixed "
            "point; try a static topology such as symmetric-exponential"
        )
    if topology.num_nodes != quadratic.num_nodes:
        raise ValueError(
            f"{topology!r} has {topology.num_nodes} nodes, but there are {quadratic.num_nodes} "
            "functions; give one per node"
        )
    directed = method not in (
        "decentlam",
        "decentlam-exact",
        "decentlam-steady",
        "d2-dmsgd",
    )
    if not directed and not topology.symmetric:
        raise ValueError(
            f"{method} needs symmetric weights; {topology!r} is directed. "
            f"Try symmetric_exponential({topology.num_nodes})."
        )
    return topology.weights(0)
