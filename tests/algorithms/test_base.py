"""The contract of an algorithm: every entry of ALGORITHMS through the same checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import decentlam
from decentlam.algorithms import ALGORITHMS, Algorithm, PmSGD, Reach, Step, make, reaches
from tests.helpers.refusals import Refusal, assert_refused, each_refused
from tests.helpers.trajectories import ADAM_METHODS, METHODS, MOMENTUM_METHODS, method_id


def random_state(algorithm: Algorithm, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(buffer) for name, buffer in algorithm.init(x).items()}


def test_no_algorithm_is_left_out() -> None:
    assert {*ADAM_METHODS, *(name for name, _ in METHODS)} == ALGORITHMS.keys()


@pytest.mark.parametrize("index", [0, 3, 47])
@pytest.mark.parametrize("shape", [(6,), (4, 6)], ids=["one node", "stacked"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_message_writes_nothing(
    method: tuple[str, dict], shape: tuple[int, ...], index: int
) -> None:
    torch.manual_seed(0)
    algorithm = make(method[0], **method[1])
    x, g = torch.randn(shape), torch.randn(shape)
    state = random_state(algorithm, x)
    before = [tensor.clone() for tensor in (x, g, *state.values())]
    message = algorithm.message(x, g, state, Step(index, 0.1))
    for tensor, old in zip((x, g, *state.values()), before, strict=True):
        assert torch.equal(tensor, old)
    payloads = message if isinstance(message, tuple) else (message,)
    assert len(payloads) == algorithm.payloads(index)
    assert all(payload.shape == x.shape and payload.dtype == x.dtype for payload in payloads)


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_update_writes_no_g(method: tuple[str, dict]) -> None:
    torch.manual_seed(0)
    algorithm = make(method[0], **method[1])
    x, g = torch.randn(4, 6), torch.randn(4, 6)
    state, step = random_state(algorithm, x), Step(3, 0.1)
    message = algorithm.message(x, g, state, step)
    mixed = (
        tuple(payload.clone() for payload in message)
        if isinstance(message, tuple)
        else message.clone()
    )
    before = g.clone()
    algorithm.update(x, g, mixed, state, step)
    assert torch.equal(g, before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_has_the_declared_names_and_starts_at_zero_or_at_x(name: str) -> None:
    algorithm = make(name)
    x = torch.randn(3, 4, dtype=torch.float64)
    state = algorithm.init(x)
    assert tuple(state) == algorithm.buffers
    for buffer in state.values():
        assert buffer.shape == x.shape and buffer.dtype == x.dtype
        assert not buffer.any() or torch.equal(buffer, x)  # SlowMo remembers where it began


@pytest.mark.parametrize("name", MOMENTUM_METHODS)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.9"])
def test_momentum_outside_zero_to_one_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        make(name, momentum=value)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", [m for m in METHODS if m[0] != "dsgd"], ids=method_id)
def test_alone_every_method_is_momentum_sgd(method: tuple[str, dict], nesterov: bool) -> None:
    """Or LARS, if that is the method; a slow momentum is left out too."""
    name, hyper = method
    algorithm = make(name, momentum=0.7, nesterov=nesterov, **hyper)
    expected = algorithm if name == "pmsgd-lars" else PmSGD(0.7, nesterov)
    assert algorithm.alone() == expected
    assert all(form.alone() == expected for form in algorithm.steady())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_awc_forms_its_message_without_the_gradient(name: str) -> None:
    algorithm, x = make(name), torch.randn(2, 3)
    state = random_state(algorithm, x)
    messages = [
        algorithm.message(x, torch.full_like(x, value), state, Step(0, 0.1)) for value in (0.0, 1.0)
    ]
    same = all(
        torch.equal(a, b)
        for a, b in zip(*(m if isinstance(m, tuple) else (m,) for m in messages), strict=True)
    )
    assert same == (not algorithm.needs_gradient) == (name == "awc-dmsgd")


@dataclass(frozen=True)
class Sometimes(Algorithm):
    """Gossip in every third step."""

    period: ClassVar[int] = 3

    def reach(self, index: int) -> Reach:
        return Reach.NEIGHBORS if index % 3 == 0 else Reach.NOBODY

    def message(self, x, g, state, step):  # type: ignore[no-untyped-def]
        return x - step.lr * g

    def update(self, x, g, mixed, state, step):  # type: ignore[no-untyped-def]
        x.copy_(mixed)


def test_a_long_period_is_known_whole() -> None:
    assert reaches(decentlam.algorithms.SlowMo(tau=20_000)) == {Reach.EVERYONE, Reach.NEIGHBORS}


def test_a_period_that_is_not_so_is_refused() -> None:
    class Wrong(Sometimes):
        period: ClassVar[int] = 2

    with pytest.raises(ValueError, match=r"Wrong: reach\(\d+\) is .* period"):
        decentlam.simulate(Wrong(), "ring", torch.zeros(4, 1), lambda x, k: x, 0.1, 1)


def test_a_method_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class above is the file; this is the line. Everything else follows."""
    monkeypatch.setitem(decentlam.ALGORITHMS, "sometimes", Sometimes)
    target = torch.arange(8.0).double()[:, None]
    x = decentlam.simulate(
        "sometimes", "ring", torch.zeros(8, 1).double(), lambda x, k: x - target, 0.1, 300
    )
    assert abs(x.mean().item() - 3.5) < 1e-9
    nodes = decentlam.SimulatedModule(nn.Linear(2, 1), "sometimes", "ring", 4, lr=0.1)
    nodes.step(nn.functional.mse_loss, torch.ones(4, 3, 2), torch.ones(4, 3, 1))
    assert 0 < decentlam.growth("sometimes", decentlam.topology.ring(8)) < 1
    weight = nn.Parameter(torch.ones(1))
    optimizer = decentlam.DecentralizedOptimizer([weight], Sometimes(), lr=0.5)
    weight.square().sum().backward()
    optimizer.step()
    assert weight.item() == 0.0


REFUSALS: list[Refusal] = [
    ("mu 1", lambda: make("qg-dmsgd", mu=1.0), ValueError, ["QGDmSGD", "mu", "[0, 1)", "got 1.0"]),
    ("set already too", lambda: make(make("dmsgd"), nesterov=True), ValueError,
     ["DmSGD(", "already", "nesterov", "constructor"]),
    ("tau 0", lambda: make("slowmo", tau=0), ValueError, ["SlowMo", "tau", "1 or more", "got 0"]),
    ("tau a float", lambda: make("slowmo", tau=2.0), ValueError, ["tau", "whole number", "2.0"]),
    ("alpha 0", lambda: make("slowmo", alpha=0.0), ValueError, ["alpha", "above 0", "0.0", "1 is"]),
    ("unknown base", lambda: make("slowmo", base="adam"), ValueError,
     ["base", "'adam'", "dmsgd, local"]),
    ("unknown inner momentum", lambda: make("slowmo", inner_momentum="drop"), ValueError,
     ["inner_momentum", "'drop'", "keep, reset, average"]),
    ("trust 0", lambda: make("pmsgd-lars", trust=0), ValueError, ["trust", "above 0", "got 0"]),
    ("lars a number", lambda: make("pmsgd-lars", lars=1), ValueError, ["lars", "True or False"]),
]  # fmt: skip


@each_refused(REFUSALS)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    assert_refused(call, kind, words)
