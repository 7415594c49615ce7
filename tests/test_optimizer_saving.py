"""One process without a group: saving, loading and copying as torch's optimizers do."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from one_node import MOMENTUM_METHODS, Net, assert_close, beside_sgd, build, flat, train
from torch.optim import lr_scheduler

import decentlam


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_resumed_run_is_the_same_to_the_bit() -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

    def start() -> tuple[Net, Any, Any]:
        model = Net()
        optimizer = build("DecentLaM", model.parameters(), **hyper)
        return model, optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 12)

    model, optimizer, scheduler = start()
    uninterrupted = train(model, optimizer, range(20), scheduler)
    model, optimizer, scheduler = start()
    train(model, optimizer, range(10), scheduler)
    saved = through_a_file([x.state_dict() for x in (model, optimizer, scheduler)])
    model, optimizer, scheduler = start()
    train(model, optimizer, range(3), scheduler)  # whatever was there before is replaced
    for x, state in zip((model, optimizer, scheduler), saved, strict=True):
        x.load_state_dict(state)
    resumed = train(model, optimizer, range(10, 20), scheduler)
    for a, b in zip(resumed, uninterrupted[10:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("method", "how"),
    [*((method, "pickle") for method in MOMENTUM_METHODS), ("SlowMo", "deepcopy")],
)
def test_copy_goes_on_like_the_original(method: str, how: str) -> None:
    model = Net()
    optimizer = build(method, model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(5))
    both = (model, optimizer)
    twin, twin_optimizer = (
        pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    )
    assert type(twin_optimizer) is type(optimizer) and twin_optimizer.method == optimizer.method
    ours = train(model, optimizer, range(5, 10))
    theirs = train(twin, twin_optimizer, range(5, 10))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(flat(model), ours[0])  # and is a copy: neither disturbed the other


def test_state_dict_has_torchs_form() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    assert set(saved) == {"state", "param_groups"}
    trained = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert sorted(saved["state"]) == trained
    for i, p in enumerate(model.parameters()):
        for value in saved["state"].get(i, {}).values():
            assert value.shape == p.shape


def test_model_loaded_after_construction_is_what_trains() -> None:
    other = Net()
    train(other, decentlam.DmSGD(other.parameters(), lr=0.3), range(3))
    ours, optimizer, theirs, reference = beside_sgd()
    for model in (ours, theirs):
        model.load_state_dict(other.state_dict())
    assert_close([flat(ours)], [flat(other)])
    assert_close(train(ours, optimizer, range(5)), train(theirs, reference, range(5)))
