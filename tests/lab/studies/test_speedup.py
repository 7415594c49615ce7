"""The study of the linear speed-up."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decentlam.lab.studies import speedup


@pytest.mark.system
def test_error_falls_as_one_over_n():
    setting = dataclasses.replace(speedup.recipe(), nodes=(1, 4, 16), steps=1000, b=0.5)
    slopes = {
        (r["corollary"], r["method"]): r["fitted_slope"]
        for r in speedup.table(speedup.run(setting))
    }
    for method in ("pmsgd", "decentlam"):
        assert -0.6 < slopes["corollary 1", method] < -0.4
        assert -1.1 < slopes["corollary 2", method] < -0.85


def test_speedup_problems_have_one_optimum_and_known_constants():
    setting = speedup.recipe()
    for n in (1, 2, 8):
        problem = speedup.diagonal(setting, n)
        assert problem.pull.mean(0).abs().max() < 1e-15
        torch.testing.assert_close(problem.H.mean(0), problem.curvature)
        assert problem.mu <= problem.H.min() and problem.H.max() <= problem.L
        size = problem.pull.view(n, setting.runs, -1).square().sum(2).mean().sqrt().item()
        assert size == pytest.approx(setting.b if n > 1 else 0)
