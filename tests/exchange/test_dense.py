"""Mixing by dense and by sparse products."""

from __future__ import annotations

import numpy as np
import torch

import decentlam
from decentlam import topology


def test_sparse_and_dense_mixing_agree() -> None:
    """Above 64 nodes the exchange switches to a sparse product."""
    torch.manual_seed(0)
    for n in (64, 65, 100):
        net, x0 = topology.symmetric_exponential(n), torch.randn(n, 3, dtype=torch.float64)
        x = decentlam.simulate("dsgd", net, x0, lambda x, k: torch.zeros_like(x), 0.1, 4)
        np.testing.assert_allclose(
            x, np.linalg.matrix_power(net.weights().numpy(), 4) @ x0.numpy(), rtol=0, atol=1e-13
        )
