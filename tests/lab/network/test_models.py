"""The models that are trained while they are timed."""

from __future__ import annotations

import itertools
import time

import torch

from decentlam.lab.network.models import sleeping


def test_a_sleeping_model_finishes_its_gradients_layer_by_layer() -> None:
    model = sleeping(parameters=101, seconds=0.3, layers=4)
    arrived: list[tuple[int, float]] = []
    for k, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(
            lambda _, k=k: arrived.append((k, time.perf_counter()))
        )
    begun = time.perf_counter()
    loss = model(torch.ones(1)).sum()
    middle = time.perf_counter()
    loss.backward()
    assert middle - begun >= 0.1 and time.perf_counter() - middle >= 0.2
    assert [k for k, _ in arrived] == [3, 2, 1, 0]
    times = [middle, *(at for _, at in arrived)]
    assert all(b - a >= 0.2 / 4 for a, b in itertools.pairwise(times))
    # loss = 1 + sum over layers of weight[0]
    for p in model.parameters():
        expected = torch.zeros(p.shape)
        expected[0] = 1.0
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=0)
    assert sum(p.numel() for p in model.parameters()) == 101
