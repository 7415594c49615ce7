"""The lab's problems and studies: the paper's claims, and files that others can read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from decentlam import TOPOLOGIES, topology
from decentlam.lab import draw
from decentlam.lab.problems import linear_regression
from decentlam.lab.studies import STUDIES, bias, regression, speedup
from decentlam.lab.study import Record, fitted_slope, markdown, perform, plain

PNG = b"\x89PNG\r\n"


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
    assert bias.STUDY.figures(records).keys() == {"bias"}


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


def test_regression_data_depends_on_the_seed_alone():
    first, again, other = (linear_regression(4, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first.A, again.A) and torch.equal(first.b, again.b)
    assert not torch.equal(first.b, other.b)
    at_optimum = first.gradient(first.x_star.expand_as(first.start))
    assert at_optimum.mean(0).norm() < 1e-12
    # The gradient is the textbook one, A'(A x - b).
    x = torch.ones_like(first.start)
    residual = first.A @ x.unsqueeze(2) - first.b.unsqueeze(2)
    torch.testing.assert_close(first.gradient(x), (first.A.mT @ residual).squeeze(2))


def test_heterogeneity_scales_b_and_nothing_else():
    problem = linear_regression(8, seed=3)
    scaled = problem.with_heterogeneity(10.0)
    torch.testing.assert_close(scaled.x_star, problem.x_star, rtol=1e-10, atol=1e-12)
    assert scaled.quadratic.b2 == pytest.approx(100 * problem.quadratic.b2, rel=1e-8)
    assert torch.equal(scaled.A, problem.A)


def test_noise_has_the_given_size_and_depends_on_seed_and_step():
    problem = linear_regression(4)
    noisy, x = problem.noisy(sigma=2.0, seed=5), problem.start
    noise = torch.stack([noisy(x, step) - problem.gradient(x) for step in range(2000)])
    assert noise.square().sum(2).mean().item() == pytest.approx(4.0, rel=0.02)
    assert torch.equal(noisy(x, 3), problem.noisy(2.0, 5)(x, 3))
    assert not torch.equal(noisy(x, 3), noisy(x, 4))


def test_sampled_gradients_are_unbiased():
    problem = linear_regression(4)
    sampled, x = problem.sampled(batch=10, seed=0), problem.start
    mean = torch.stack([sampled(x, step) for step in range(4000)]).mean(0)
    full = problem.gradient(x)
    assert (mean - full).norm() < 0.05 * full.norm()
    with pytest.raises(ValueError, match="batch must be from 1 to 50"):
        problem.sampled(51)


@pytest.mark.system
def test_a_run_directory_holds_recipe_records_table_and_figures(tmp_path: Path):
    study = STUDIES["regression"]
    recipe = dataclasses.replace(study.recipe(seed=2), methods=("dsgd", "decentlam"), steps=60)
    result = perform(study, recipe, tmp_path)
    names = {path.name for path in result.files}
    assert {"recipe.json", "records.jsonl", "table.md", "figure3.png", "methods.svg"} <= names
    described = json.loads((tmp_path / "recipe.json").read_text())
    assert described["recipe"]["seed"] == 2
    assert {"torch", "numpy", "decentlam", "commit"} <= described["versions"].keys()
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert records == plain(study.run(recipe, lambda *_: None))
    assert (tmp_path / "methods.png").read_bytes().startswith(PNG)
    assert "| dsgd |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_can_be_drawn(name: str):
    figure = draw.draw(TOPOLOGIES[name](8))
    assert len(figure.axes) == min(TOPOLOGIES[name](8).period or 4, 4)


def test_drawings_of_small_and_lazy_networks(tmp_path: Path):
    for network in (topology.ring(1), topology.ring(2), topology.mesh(8).lazy(0.5)):
        assert draw.positions(network).shape == (network.num_nodes, 2)
        draw.draw(network)
    with pytest.raises(ValueError, match="up to 512 nodes, got 513"):
        draw.draw(topology.ring(513))


def test_helpers():
    assert fitted_slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    assert markdown([{"a_b": 1.23456, "c": None}]) == "| a b | c |\n| --- | --- |\n| 1.235 | - |\n"
    assert plain({"x": (float("nan"), 1)}) == {"x": [None, 1]}
