"""The paper's regression: who ends where, and how fast."""

from __future__ import annotations

import pytest

from decentlam.lab.studies import regression
from decentlam.lab.studies.study import Record


@pytest.fixture(scope="module")
def paper() -> dict[str, Record]:
    """The paper's regression, n = 8, mesh, lr 0.001, momentum 0.8: the limits by method."""
    records = regression.run(regression.recipe(seed=0))
    return {r["method"]: r for r in records if r["kind"] == "limit"}


def test_decentlam_ends_where_dsgd_ends_and_where_the_closed_form_says(paper):
    final = paper["decentlam"]["final"]
    assert final == pytest.approx(paper["dsgd"]["final"], rel=1e-6)
    assert final == pytest.approx(paper["decentlam"]["closed_form"], rel=1e-6)
    assert final == pytest.approx(paper["qg-dmsgd"]["final"], rel=1e-6)


@pytest.mark.parametrize("method", ["dmsgd", "da-dmsgd", "awc-dmsgd"])
def test_momentum_variants_end_at_their_own_larger_closed_form(paper, method: str):
    assert paper[method]["final"] == pytest.approx(paper[method]["closed_form"], rel=1e-6)
    assert paper[method]["final"] > 4 * paper["decentlam"]["final"]


def test_methods_without_bias_reach_round_off(paper):
    assert paper["d2-dmsgd"]["final"] < 1e-24
    assert paper["pmsgd"]["final"] < 1e-24


def test_decentlam_is_as_fast_as_dmsgd_and_dsgd_is_not(paper):
    steps = {method: r["steps_to_target"] for method, r in paper.items()}
    assert steps["decentlam"] <= 1.15 * steps["dmsgd"]
    assert steps["dsgd"] > 2 * steps["dmsgd"]


def test_steps_to_counts_the_last_crossing():
    assert regression.steps_to([3.0, 0.5, 2.0, 0.5, 0.1], 1.0) == 3
    assert regression.steps_to([0.5, 0.5], 1.0) == 0
    assert regression.steps_to([3.0, 2.0], 1.0) is None
    assert regression.steps_to([0.5, float("nan")], 1.0) is None
