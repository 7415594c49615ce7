"""What the user may choose about how a method runs is checked at construction."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import decentlam
from decentlam.options import OptimizerOptions, Options
from tests.helpers.quadratic import Quadratic
from tests.helpers.refusals import Refusal, assert_refused, each_refused


def optimizer(group: dict | None = None, **changes: Any) -> decentlam.DecentLaM:
    params = [{"params": [torch.nn.Parameter(torch.zeros(2))], **(group or {})}]
    return decentlam.DecentLaM(params, **{"lr": 0.1, **changes})


REFUSALS: list[Refusal] = [
    ("weight decay beyond float32", lambda: optimizer(weight_decay=1e308), ValueError,
     ["weight_decay", "at most 1e+18", "1e+308"]),
    ("clipping at a vector", lambda: optimizer(max_grad_norm=torch.ones(2)), ValueError,
     ["max_grad_norm", "above 0", "tensor([1., 1.])"]),
    ("weight decay of a group NaN", lambda: optimizer({"weight_decay": math.nan}), ValueError,
     ["weight_decay", "finite", "nan"]),
    ("nesterov a word", lambda: optimizer(nesterov="no"), ValueError,
     ["DecentLaM", "nesterov", "True or False", "'no'"]),
    ("timeout infinite", lambda: optimizer(timeout_seconds=math.inf), ValueError,
     ["timeout_seconds", "at most 1e+08", "inf"]),
    ("clipping beyond what step() can", lambda: optimizer(max_grad_norm=10**29), ValueError,
     ["max_grad_norm", "at most 1e+18", "10000000"]),
    ("a model of other parameters", lambda: optimizer(model=nn.Linear(2, 2)), ValueError,
     ["model=Linear", "none of the optimizer's parameters", "pass the module"]),
    ("group a word", lambda: optimizer(process_group="x"), TypeError,
     ["process_group", "torch.distributed.ProcessGroup", "'x'"]),
    ("lr without end", lambda: optimizer(lr=10**400), ValueError, ["lr", "finite", "1000000"]),
    ("lr beyond writing", lambda: optimizer(lr=10**9999), ValueError, ["lr", "thousands of dig"]),
]  # fmt: skip


@each_refused(REFUSALS)
def test_refuses_with_what_was_given_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: list[str]
) -> None:
    assert_refused(call, kind, words)


@pytest.mark.parametrize("method", [decentlam.PmSGD, decentlam.DecentLaM])
@pytest.mark.parametrize("given", [-1, 0, True, 1.0, ..., {"a": 1}])
def test_a_number_of_processes_that_cannot_be_is_refused(method: Any, given: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"processes_per_node must be .*, got {re.escape(repr(given))}"
    ):
        method(nn.Linear(2, 1).parameters(), lr=0.1, processes_per_node=given)


def test_the_keywords_of_optimizers_are_the_options() -> None:
    names = set(OptimizerOptions.__annotations__) - {
        "weight_decay",
        "process_group",
        "mesh",
        "model",
    }
    assert names == set(Options.__dataclass_fields__)


@pytest.mark.parametrize("overlap", ["iteration", 1, None, 2.0])
def test_unknown_overlap_is_refused_with_the_choices(overlap: Any) -> None:
    with pytest.raises(ValueError, match="choose from 'none', 'backward', 'auto', True or False"):
        decentlam.DecentLaM(nn.Linear(2, 1).parameters(), lr=0.1, overlap=overlap)


def test_true_and_false_are_names_of_overlaps() -> None:
    assert Options(overlap=True) == Options(overlap="backward")
    assert Options(overlap=False) == Options(overlap="none")


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"nonfinite": "skip"}])
def test_what_needs_the_whole_gradient_is_refused_with_overlap(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overlap='none'"):
        decentlam.DecentLaM(Quadratic().parameters(), lr=0.1, overlap=True, **option)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes_per_node": 2}, "processes_per_node=1"),
        ({"topology": decentlam.topology.ring(4)}, "a topology by name"),
        ({}, r"decentlam.init\(elastic=True\)"),
    ],
)
def test_what_elastic_does_not_do_is_refused(options: dict[str, object], words: str) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises((ValueError, RuntimeError), match=words):
        decentlam.DmSGD(model.parameters(), lr=0.1, elastic=True, **options)


@pytest.mark.parametrize("seconds", [0, -1, True, "2", float("nan"), float("inf")])
def test_a_heartbeat_that_cannot_be_is_refused(seconds: object) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="heartbeat_seconds must be"):
        decentlam.DmSGD(model.parameters(), lr=0.1, heartbeat_seconds=seconds)
