"""The recursions of the text study against torch.optim, the library, and numbers by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import decentlam
from decentlam.lab.studies.text_methods import (
    DECAY,
    METHODS,
    LocalAdamW,
    Moves,
    local_steps,
    noloco,
)
from decentlam.topology import bipartite_random_match

N, D, STEPS = 4, 6, 24
LAYERS = [slice(0, 4), slice(4, 6)]
PAIRS = bipartite_random_match(N, seed=3)


def start() -> Tensor:
    return torch.randn(1, D, dtype=torch.float64, generator=seeded(1)).repeat(N, 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients() -> Tensor:
    return torch.randn(STEPS, N, D, dtype=torch.float64, generator=seeded(2))


def lr(step: int) -> float:
    return 0.01 * (1 + step % 3)


def follow(moves: Moves, x: Tensor) -> tuple[list[Tensor], float]:
    """Return x after every step, and what a node sent in all."""
    next(moves)
    found, sent = [], 0.0
    for k, g in enumerate(gradients()):
        sent += moves.send((g, lr(k)))
        found.append(x.clone())
    return found, sent


def local_training(rows: range, mean: bool = False) -> list[Tensor]:
    """torch.optim.AdamW on each node alone, or on the mean gradient."""
    x = [start()[i].requires_grad_() for i in rows]
    optimizers = [torch.optim.AdamW([p], weight_decay=DECAY) for p in x]
    found = []
    for k, g in enumerate(gradients()):
        for i, p, optimizer in zip(rows, x, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = lr(k)
            p.grad = g.mean(0) if mean else g[i]
            optimizer.step()
        found.append(torch.stack([p.detach().clone() for p in x]))
    return found


def close(one: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b.expand_as(a), rtol=0, atol=1e-12)


def test_the_inner_optimizer_is_torch_adamw() -> None:
    x = start()
    inner, found = LocalAdamW(x), []
    for k, g in enumerate(gradients()):
        inner.step(x, g, lr(k))
        found.append(x.clone())
    close(found, local_training(range(N)))


def test_all_reduce_is_torch_adamw_on_the_mean_gradient() -> None:
    x = start()
    found, sent = follow(METHODS["all-reduce"].moves(x, PAIRS, LAYERS), x)
    close(found, local_training(range(1), mean=True))
    assert sent == pytest.approx(STEPS * 1.5)


def test_adamw_is_the_librarys_on_simulated_nodes() -> None:
    x = start()
    found, sent = follow(METHODS["adamw"].moves(x, PAIRS, LAYERS), x)
    nodes = decentlam.Nodes("adamw", PAIRS, start(), 0.9, weight_decay=DECAY, layers=[4, 2])
    expected = []
    for k, g in enumerate(gradients()):
        nodes.step(g, lr(k))
        expected.append(nodes.x.clone())
    close(found, expected)
    assert sent == pytest.approx(STEPS * (1 + 1 / 17))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_near_the_minimum_of_equal_quadratics(name: str) -> None:
    """DiLoCo's momentum still swings; the others have arrived."""
    x = torch.full((N, D), 2.0)
    moves = METHODS[name].start(x, LAYERS, seed=0)
    for k in range(400):
        moves.send((x - 0.5, 0.05 * (1 - k / 400)))
    assert (x - 0.5).abs().max() < (0.5 if "diloco" in name else 0.05)


def test_local_steps_by_hand() -> None:
    """Every step x = adamw(x) - lr e; every second x+ = W x, e += 0.2 (x - x+) / (sum of lr)."""
    x = start()
    found, sent = follow(local_steps(x, PAIRS, LAYERS, every=2), x)
    y, e, expected = start().numpy(), np.zeros((N, D)), []
    m, v = np.zeros((N, D)), np.zeros((N, D))
    for k, g in enumerate(gradients().numpy()):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        p = (m / (1 - 0.9 ** (k + 1))) / (np.sqrt(v / (1 - 0.999 ** (k + 1))) + 1e-8)
        y = y - lr(k) * DECAY * y - lr(k) * p - lr(k) * e
        if k % 2:
            w = PAIRS.weights(k // 2).numpy()
            e = e + 0.2 * (y - w @ y) / (lr(k) + lr(k - 1))
            y = w @ y
            told = 2 ** (np.round(4 * np.log2(v)) / 4)
            v = np.diag(w)[:, None] * v + (w - np.diag(np.diag(w))) @ told
            np.testing.assert_allclose(e.sum(0), 0, atol=1e-13)
        expected.append(torch.from_numpy(y.copy()))
    close(found, expected)
    assert sent == pytest.approx(STEPS / 2 * 1.25)


def test_diloco_by_hand_on_one_round() -> None:
    """After 12 steps D = start - mean; m = D; start -= 0.7 (D + 0.9 D)."""
    x = start()
    found, sent = follow(METHODS["diloco-4"].moves(x, PAIRS, LAYERS), x)
    moved = start()[0] - local_training(range(N))[3].mean(0)
    close([found[3]], [start()[0] - 0.7 * 1.9 * moved])
    assert sent == pytest.approx(STEPS / 4 * 1.5)


def test_noloco_is_decentlam_outside() -> None:
    """With outer lr 1, d+ = b d + (W x - start) is DecentLaM's v+ = b v + (start - W x) turned."""
    x = start()
    found, _ = follow(noloco(x, PAIRS, LAYERS, every=1, outer_lr=1.0), x)
    y, v, expected = start(), torch.zeros(N, D, dtype=torch.float64), []
    inner = LocalAdamW(y)
    for k, g in enumerate(gradients()):
        ahead = y.clone()
        inner.step(ahead, g, lr(k))
        v = 0.5 * v + (y - PAIRS.weights(k) @ ahead)
        y = y - v
        expected.append(y)
    close(found, expected)
