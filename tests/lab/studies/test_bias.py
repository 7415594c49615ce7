"""The study of the inconsistency bias."""

from __future__ import annotations

import pytest

from decentlam.lab.studies import bias


def test_bias_follows_the_laws_and_the_closed_form():
    records = bias.run(bias.recipe(quick=True))
    slopes = {(r["bias_against"], r["method"]): r["measured_slope"] for r in bias.table(records)}
    assert 1.8 < slopes["1/(1-beta)", "dmsgd"] < 2.05
    assert abs(slopes["1/(1-beta)", "decentlam"]) < 0.01
    assert 1.6 < slopes["lr", "dmsgd"] < 2.05
    assert 1.85 < slopes["lr", "decentlam"] < 2.05
    assert 1.6 < slopes["1/(1-rho)", "decentlam"] < 2.4
    assert slopes["b^2", "dmsgd"] == pytest.approx(1, abs=1e-3)
    for r in records:
        assert r["measured"] == pytest.approx(r["closed_form"], rel=2e-3)
