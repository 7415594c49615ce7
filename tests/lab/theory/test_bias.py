"""The orders of the bias."""

from __future__ import annotations

import pytest

from decentlam.lab import theory


def test_orders_of_the_inconsistency_bias():
    # lr^2 b2 / (1-rho)^2 = 0.01 * 3 / 0.25 = 0.12, and 1/(1-beta)^2 = 25 times as much.
    at = {"lr": 0.1, "beta": 0.8, "rho": 0.5, "b2": 3.0}
    for method in ("dsgd", "decentlam", "qg-dmsgd"):
        assert theory.inconsistency_bias(method, **at) == pytest.approx(0.12)
    for method in ("dmsgd", "da-dmsgd", "awc-dmsgd"):
        assert theory.inconsistency_bias(method, **at) == pytest.approx(3.0)
    assert theory.inconsistency_bias("d2-dmsgd", **at) == 0
    with pytest.raises(ValueError, match="no order for the inconsistency bias of 'slowmo'"):
        theory.inconsistency_bias("slowmo", **at)
