"""The ten recursions once more, in float64 matrix form with the papers' letters.

Nothing of the library is used: x, g, m are (n, d) arrays, W(k) is a dense (n, n) array, gamma(k)
the learning rate. Where a paper divides by gamma, so does this file; around gamma = 0 it follows
the library's promise: the step is plain gossip, and the next one starts from what gossip moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Run:
    """Everything a recursion needs to know."""

    W: Callable[[int], Array]
    x0: Array
    gradient: Callable[[Array, int], Array]
    gamma: Callable[[int], float]
    steps: int
    beta: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    layers: list[int] | None = None  # for LARS
    hyper: dict = field(default_factory=dict)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps))

    def g(self, x: Array, k: int) -> Array:
        return self.gradient(x, k) + self.weight_decay * x

    def ahead(self, g: Array, m: Array) -> Array:
        """The direction of a step once m holds beta m + g."""
        return g + self.beta * m if self.nesterov else m


def trajectory(name: str, run: Run) -> list[Array]:
    """x after every step."""
    return list(RECURSIONS[name](run))


def dsgd(run: Run) -> Iterator[Array]:
    x = run.x0
    for k in run:
        x = run.W(k) @ (x - run.gamma(k) * run.g(x, k))
        yield x


def dmsgd(run: Run) -> Iterator[Array]:
    """Algorithm 1 of the paper."""
    x, m = run.x0, np.zeros_like(run.x0)
    for k in run:
        g = run.g(x, k)
        m = run.beta * m + g
        x = run.W(k) @ (x - run.gamma(k) * run.ahead(g, m))
        yield x


def da_dmsgd(run: Run) -> Iterator[Array]:
    """Yu, Jin and Yang 2019: the momentum is averaged like the model."""
    x, m = run.x0, np.zeros_like(run.x0)
    for k in run:
        g = run.g(x, k)
        h = run.beta * m + g
        x = run.W(k) @ (x - run.gamma(k) * run.ahead(g, h))
        m = run.W(k) @ h
        yield x


def awc_dmsgd(run: Run) -> Iterator[Array]:
    if run.hyper.get("heavy_ball"):
        # Balu et al. 2020: x+ = W x - gamma g + beta (x - x-), a momentum step along
        # g + (x - W x) / gamma.
        yield from _momentum_along(run, lambda W, x, g, gamma: g + (x - W @ x) / gamma)
        return
    x, m = run.x0, np.zeros_like(run.x0)
    for k in run:
        g = run.g(x, k)
        m = run.beta * m + g
        x = run.W(k) @ x - run.gamma(k) * run.ahead(g, m)
        yield x


def decentlam(run: Run) -> Iterator[Array]:
    """Algorithm 2 of the paper with its corrected gradient, W g + (I - W) x / gamma."""
    yield from _momentum_along(run, lambda W, x, g, gamma: W @ g + (x - W @ x) / gamma)


def _momentum_along(run: Run, corrected: Callable[..., Array]) -> Iterator[Array]:
    """Momentum SGD whose gradient is corrected(W, x, g, gamma)."""
    x, m = run.x0, np.zeros_like(run.x0)
    moved = None  # by the plain gossip of the step before, if that step was one
    for k in run:
        gamma, g, W = run.gamma(k), run.g(x, k), run.W(k)
        if gamma == 0:
            moved = x - W @ x
            x = W @ x
        else:
            if moved is not None:
                m, moved = moved / gamma, None
            g = corrected(W, x, g, gamma)
            m = run.beta * m + g
            x = x - gamma * run.ahead(g, m)
        yield x


def decentlam_steady(run: Run) -> Iterator[Array]:
    """Momentum SGD on m = v / gamma, plus what mixing took away: a share at once, and its mean."""
    x, m, mean = run.x0, np.zeros_like(run.x0), np.zeros_like(run.x0)
    share = run.hyper.get("share", min(0.5, 2 * (1 - run.beta)))
    b = run.beta * (1 - share)
    mu = run.hyper.get("mu", 4 * b / (1 + b) ** 2)
    weight = 1 / run.beta if run.nesterov and run.beta else 1.0
    moved = None
    for k in run:
        gamma, g, W = run.gamma(k), run.g(x, k), run.W(k)
        if gamma == 0:
            moved = x - W @ x
            x = W @ x
        else:
            if moved is not None:
                taken, moved = moved / gamma, None
                mean = (1 - mu) * taken
                m = weight * ((1 - share) * mean + share * taken)
            m = run.beta * m + g
            z = x - gamma * run.ahead(g, m)
            x = W @ z
            taken = (z - x) / gamma
            mean = mu * mean + (1 - mu) * taken
            m = m + weight * ((1 - share) * mean + share * taken)
        yield x


def decentlam_exact(run: Run) -> Iterator[Array]:
    """Momentum SGD along g less what it has of its own, q = y / gamma, which mixing tells."""
    x, m, q = run.x0, np.zeros_like(run.x0), np.zeros_like(run.x0)
    moved = None
    for k in run:
        gamma, g, W = run.gamma(k), run.g(x, k), run.W(k)
        if gamma == 0:
            moved = x - W @ x
            x = W @ x
        else:
            if moved is not None:
                m, q, moved = moved / (2 * gamma), -moved / (20 * gamma), None
            m = run.beta * m + (g - q)
            z = x - gamma * run.ahead(g - q, m)
            x = W @ z
            m = m + (z - x) / (2 * gamma)
            q = q - (z - x) / (20 * gamma)
        yield x


def gt_dmsgd(run: Run) -> Iterator[Array]:
    """Momentum along y, which sums up the changes of all gradients."""
    x, m, mixed_y, last_g = run.x0, *(np.zeros_like(run.x0) for _ in range(3))
    for k in run:
        g = run.g(x, k)
        y = mixed_y + g - last_g
        m = run.beta * m + y
        x = run.W(k) @ (x - run.gamma(k) * run.ahead(y, m))
        mixed_y, last_g = run.W(k) @ y, g
        yield x


def qg_dmsgd(run: Run) -> Iterator[Array]:
    """Lin et al. 2021, heavy-ball variant."""
    x, q = run.x0, np.zeros_like(run.x0)
    mu = run.hyper.get("mu", run.beta)
    moved = None
    for k in run:
        gamma, g, W = run.gamma(k), run.g(x, k), run.W(k)
        if gamma == 0:
            moved = (1 - mu) * (x - W @ x)
            x = W @ x
        else:
            if moved is not None:
                q, moved = moved / gamma, None
            new = W @ (x - gamma * run.ahead(g, run.beta * q + g))
            q = mu * q + (1 - mu) * (x - new) / gamma
            x = new
        yield x


def d2_dmsgd(run: Run) -> Iterator[Array]:
    """Exact diffusion with momentum; it never divides by gamma."""
    x, m, p = run.x0, np.zeros_like(run.x0), None
    for k in run:
        g = run.g(x, k)
        m = run.beta * m + g
        Wbar = (np.eye(len(x)) + run.W(k)) / 2
        new_p = x - run.gamma(k) * run.ahead(g, m)
        x = Wbar @ (new_p if p is None else new_p + x - p)
        p = new_p
        yield x


def slowmo(run: Run) -> Iterator[Array]:
    """Wang et al. 2020 over DmSGD or local SGD: mix first, then average exactly, in two steps."""
    tau, slow_beta = run.hyper.get("tau", 48), run.hyper.get("slow_beta", 0.5)
    alpha, inner = run.hyper.get("alpha", 1.0), run.hyper.get("inner_momentum", "keep")
    local = run.hyper.get("base", "dmsgd") == "local"
    x, m, u = run.x0, np.zeros_like(run.x0), np.zeros_like(run.x0)
    start, moved = x, None
    for k in run:
        if k % tau == 0:
            start = x
        gamma, g = run.gamma(k), run.g(x, k)
        m = run.beta * m + g
        x = x - gamma * run.ahead(g, m)
        if not local:
            x = run.W(k) @ x
        if k % tau == tau - 1:
            a = np.broadcast_to(x.mean(axis=0), x.shape)
            if gamma == 0:
                moved = start - a
                x = start - alpha * moved
            else:
                if moved is not None:
                    u, moved = moved / gamma, None
                u = slow_beta * u + (start - a) / gamma
                x = start - alpha * gamma * u
            if inner == "reset":
                m = np.zeros_like(m)
            elif inner == "average":
                m = np.broadcast_to(m.mean(axis=0), m.shape)
        yield x


def pmsgd(run: Run) -> Iterator[Array]:
    x, m = run.x0, np.zeros_like(run.x0)
    for k in run:
        g = np.broadcast_to(run.g(x, k).mean(axis=0), x.shape)
        m = run.beta * m + g
        x = x - run.gamma(k) * run.ahead(g, m)
        yield x


def pmsgd_lars(run: Run) -> Iterator[Array]:
    """You et al. 2017, layer by layer; all nodes hold the same model, so one row is enough."""
    trust, decay = run.hyper.get("trust", 0.001), run.weight_decay
    ends = np.cumsum(run.layers if run.layers else [run.x0.shape[1]])
    x, m = run.x0[0].copy(), np.zeros(run.x0.shape[1])
    for k in run:
        slope = run.gradient(np.broadcast_to(x, run.x0.shape), k).mean(axis=0)
        g = np.empty_like(x)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            w, dw = x[begin:end], slope[begin:end]
            size, steepness = np.sqrt((w * w).sum()), np.sqrt((dw * dw).sum())
            rate = trust * size / (steepness + decay * size) if size and steepness else 1.0
            g[begin:end] = rate * (dw + decay * w)
        m = run.beta * m + g
        x = x - run.gamma(k) * run.ahead(g, m)
        yield np.broadcast_to(x, run.x0.shape)


RECURSIONS: dict[str, Callable[[Run], Iterator[Array]]] = {
    "pmsgd": pmsgd,
    "pmsgd-lars": pmsgd_lars,
    "dsgd": dsgd,
    "dmsgd": dmsgd,
    "da-dmsgd": da_dmsgd,
    "awc-dmsgd": awc_dmsgd,
    "slowmo": slowmo,
    "qg-dmsgd": qg_dmsgd,
    "d2-dmsgd": d2_dmsgd,
    "decentlam": decentlam,
    "decentlam-exact": decentlam_exact,
    "decentlam-steady": decentlam_steady,
    "gt-dmsgd": gt_dmsgd,
}
