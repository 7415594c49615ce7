"""Several optimizers share processes and groups without mixing up their messages."""

from __future__ import annotations

import pytest
import runs
import runs_several
import runs_steps
import torch
from runs import Scenarios, assert_equal

N = 4
scenarios = Scenarios(N)


GANS = [
    (("decentlam", "decentlam"), True),
    (("pmsgd", "pmsgd"), True),
    (("awc-dmsgd", "dmsgd"), True),
    (("decentlam", "pmsgd"), False),
]
for methods, overlap in GANS:
    scenarios.add(f"gan {methods} {overlap}", runs_several.gan, methods=methods, overlap=overlap)
for methods in (("decentlam", "dmsgd"), ("pmsgd", "pmsgd")):
    scenarios.add(f"halves {methods}", runs_several.halves, methods=methods)
for alive in (True, False):
    scenarios.add(f"replaced {alive}", runs_several.replaced, kept_alive=alive)
DROPPED = [("awc-dmsgd", "step"), ("awc-dmsgd", "backward"), ("decentlam", "backward")]
for method, after in DROPPED:
    scenarios.add(f"dropped {method} {after}", runs_several.dropped, method=method, after=after)
scenarios.add("subgroup", runs_several.subgroup)


@pytest.mark.parametrize(("methods", "overlap"), GANS)
def test_two_optimizers_in_turn(methods: tuple[str, str], overlap: bool) -> None:
    assert_equal(
        scenarios.outcomes(f"gan {methods} {overlap}"), runs_several.simulate_gan(methods, N)
    )


@pytest.mark.parametrize("methods", [("decentlam", "dmsgd"), ("pmsgd", "pmsgd")])
def test_two_optimizers_share_a_backward(methods: tuple[str, str]) -> None:
    """The quadratic is a sum over parameters: each half runs as if it were alone."""
    both = [runs_steps.simulate(method, N, 5) for method in methods]
    front = sum(torch.Size(shape).numel() for shape in runs.Quadratic.SHAPES[:2])
    expected = [torch.cat([a[:, :front], b[:, front:]], dim=1) for a, b in zip(*both, strict=True)]
    assert_equal(scenarios.outcomes(f"halves {methods}"), expected)


@pytest.mark.parametrize("alive", [True, False])
def test_new_optimizer_takes_the_model_over(alive: bool) -> None:
    assert_equal(scenarios.outcomes(f"replaced {alive}"), runs_steps.simulate("decentlam", N, 5))


@pytest.mark.parametrize(("method", "after"), DROPPED)
def test_group_survives_an_optimizer_dropped_with_messages_under_way(
    method: str, after: str
) -> None:
    assert_equal(
        scenarios.outcomes(f"dropped {method} {after}"), runs_steps.simulate("dmsgd", N, 3)
    )


def test_two_networks_side_by_side() -> None:
    results = scenarios.outcomes("subgroup")
    expected = runs_steps.simulate("decentlam", 2, 5)
    assert_equal(results[::2], expected)
    assert_equal(results[1::2], expected)
