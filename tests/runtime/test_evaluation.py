"""averaged, eval and train, merge, and the consensus distance."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from decentlam.checkpoint import save_checkpoint
from decentlam.network import heartbeat as watch
from tests.helpers.processes import Group, Scenarios, every, message_of
from tests.helpers.quadratic import build, flat, same, start, train

N = 4
scenarios = Scenarios(N)


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def different_calls(process_group: Group, directory: str) -> tuple[list[str], float]:
    """Process 0 makes another call than the others, again and again; then all make the same."""
    node = dist.get_rank(process_group)
    model = Normed(seed=node)
    optimizer = build("decentlam", model, process_group)

    def average(model: nn.Module | None = None) -> None:
        with optimizer.averaged(model):
            pass

    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (average, optimizer.consensus_distance),
        (lambda: average(model), average),  # with the buffers of the model, and without
        (optimizer.consensus_distance, optimizer.merge),
        (average, lambda: save_checkpoint(directory, model=model, optimizer=optimizer)),
    ]
    errors = [message_of(pair[min(node, 1)]) for pair in pairs]
    return errors, optimizer.consensus_distance()


@scenarios.run(different_calls, [{"directory": "never written"}])
def test_who_makes_another_call_than_the_others_is_told_so(results: Any) -> None:
    """What one process sends in one call must not become a number in another's."""
    for errors, distance in results:
        for error in errors:
            assert error.startswith("RuntimeError: all processes must make this call together")
            assert "processes [0] " in error and "[1, 2, 3] " in error, error
        assert "[1, 2, 3] measure the consensus distance" in errors[0]
        assert "numbers); [1, 2, 3] average the model (" in errors[1]
        assert distance == 0.0  # and goes on: they start equal


def another_model(process_group: Group) -> tuple[Tensor, Tensor, Tensor, str]:
    """Return an EMA of a node's model, its mean over the nodes, what is left afterwards, and what
    is said about the model of another optimizer."""
    node, model, optimizer = start(process_group, "decentlam")
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for step in range(3):
        train(optimizer, model, node, range(step, step + 1))
        ema.update_parameters(model)
    before = flat(ema)
    with optimizer.averaged(ema):
        mean = flat(ema)
    after = flat(ema)
    _, other, _ = start(process_group, "decentlam")
    return before, mean, after, message_of(lambda: optimizer.eval(other))


@scenarios.run(another_model)
def test_an_ema_is_averaged_as_a_model_of_its_own(results: list[Any]) -> None:
    expected = torch.stack([before for before, *_ in results]).mean(0)
    for before, mean, after, said in results:
        assert (mean - expected).abs().max() < 1e-12
        assert torch.equal(before, after)
        assert "belong to another optimizer of decentlam, and none to this one" in said


def evaluate(process_group: Group, method: str, overlap: bool) -> dict[str, Any]:
    node = dist.get_rank(process_group)
    model = Normed(seed=node)
    optimizer = build(method, model, process_group, overlap=overlap)

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * node + step)
        x = (1 + node) * torch.randn(8, 3, generator=generator, dtype=torch.float64) + node
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    def everything() -> list[Tensor]:
        return [t.detach().clone() for t in model.state_dict().values()]

    train(optimizer, model, node, range(3), loss)
    before = everything()
    with contextlib.suppress(ZeroDivisionError), optimizer.averaged(model):
        raise ZeroDivisionError
    after_exception = everything()
    with optimizer.averaged():  # parameters only
        without_model = everything()
    optimizer.zero_grad()
    loss(model, node, 3).backward()
    too_late = message_of(lambda: optimizer.averaged(model).__enter__())
    optimizer.step()
    before_merge = flat(model)
    distance = optimizer.consensus_distance()
    optimizer.merge(model)
    merged = flat(model)
    merged_distance = optimizer.consensus_distance()
    buffers = [b.clone() for b in model.buffers()]
    train(optimizer, model, node, range(4, 5), loss)
    return {
        "before": before,
        "after exception": after_exception,
        "without model": without_model,
        "too late": too_late,
        "before merge": before_merge,
        "distance": distance,
        "merged": merged,
        "merged distance": merged_distance,
        "merged buffers": buffers,
        "step after merge": flat(model),
    }


def evaluate_twice(process_group: Group, method: str) -> list[dict[str, Any]]:
    """With overlap, and without."""
    return [evaluate(process_group, method, overlap) for overlap in (True, False)]


@scenarios.run(evaluate_twice, every(method=("decentlam", "awc-dmsgd")))
def test_merge_makes_the_mean_the_model_and_the_distance_is_that_from_it(
    both: list[Any], method: str
) -> None:
    results = [r for r, _ in both]
    x = torch.stack([r["before merge"] for r in results])
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()
    assert distance > 1e-3
    for r, later in both:
        assert same(r["before"], r["after exception"])
        # AWC-DmSGD's message needs no gradient, so backward has sent nothing.
        said = "nothing was raised" if method == "awc-dmsgd" else "between backward and step"
        assert said in r["too late"]
        assert r["distance"] == pytest.approx(distance, rel=1e-12)
        assert (r["merged"] - x.mean(0)).abs().max() < 1e-14
        assert torch.equal(r["merged"], results[0]["merged"])
        assert r["merged distance"] < 1e-14
        assert same(r["merged buffers"][:2], results[0]["merged buffers"][:2])
        # The next step starts from there, not from a message that left before, as AWC's does.
        assert torch.equal(r["merged"], later["merged"])
        assert torch.equal(r["step after merge"], later["step after merge"])
        changed = [
            not torch.equal(a, b) for a, b in zip(r["before"], r["without model"], strict=True)
        ]
        del changed[1]  # a bias before the batch norm: but for rounding it has no gradient
        assert changed == [True] * 3 + [False] * 3 + [True] * 2  # 3 buffers of the batch norm


def eval_and_train(process_group: Group, method: str, overlap: str) -> dict[str, Any]:
    """The mean between the two calls, twice over; what is refused there; what is saved there."""
    node = dist.get_rank(process_group)
    place = [tempfile.mkdtemp() if node == 0 else ""]
    dist.broadcast_object_list(place, group_src=0, group=process_group)
    directory = place[0]
    model = Normed(seed=0)
    optimizer = build(method, model, process_group, overlap=overlap)

    def loss(model: nn.Module, node: int, step: int) -> Tensor:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(9 * node + step)).double()
        return (model(x) - x.sum(1, keepdim=True) - node).square().mean()

    def everything() -> list[Tensor]:
        return [t.detach().clone() for t in model.state_dict().values()]

    train(optimizer, model, node, range(2), loss)
    optimizer.train()  # changes nothing
    before = everything()
    optimizer.eval(model)
    optimizer.eval(model)
    inside = everything()
    model.eval()  # or the backward that is refused would leave its traces in the batch norm
    refused = {
        "step": message_of(optimizer.step),
        "backward": message_of(lambda: loss(model, node, 2).backward()),
        "merge": message_of(lambda: optimizer.merge(model)),
        "averaged": message_of(lambda: optimizer.averaged(model).__enter__()),
        "load": message_of(lambda: optimizer.load_state_dict(optimizer.state_dict())),
        "copy": message_of(lambda: copy.deepcopy(optimizer)),
    }
    optimizer.zero_grad()
    decentlam.save_checkpoint(directory, model=model, optimizer=optimizer)
    after_saving = everything()
    model.train()._apply(torch.clone)  # as a trainer that moves the model to its device does
    optimizer.train()
    optimizer.train()
    after = everything()
    train(optimizer, model, node, range(2, 4), loss)
    end = everything()
    decentlam.load_checkpoint(directory, model=model, optimizer=optimizer)
    loaded = everything()
    train(optimizer, model, node, range(2, 4), loss)
    return {
        "before": before,
        "inside": inside,
        "refused": refused,
        "after saving": after_saving,
        "after": after,
        "end": end,
        "loaded": loaded,
        "resumed": everything(),
    }


@scenarios.run(
    eval_and_train,
    [{"method": "decentlam", "overlap": "none"}, {"method": "awc-dmsgd", "overlap": "backward"}],
)
def test_between_eval_and_train_every_node_is_the_mean_and_saves_its_own(results: Any) -> None:
    for values in zip(*(r["before"] for r in results), results[0]["inside"], strict=True):
        own, mean = torch.stack(values[:N]), values[N]
        if own.is_floating_point():
            assert (mean - own.mean(0)).abs().max() < 1e-14
    for r in results:
        assert same(r["inside"], results[0]["inside"]) and same(r["inside"], r["after saving"])
        assert same(r["before"], r["after"]) and same(r["before"], r["loaded"])
        assert same(r["end"], r["resumed"])
        for what, error in r["refused"].items():
            assert "Call optimizer.train() on every process first" in error, what
    assert not same(results[0]["before"], results[1]["before"])


def restored(process_group: Group) -> bool:
    """Averaging fails on every process, because one of them cannot take part."""
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(2))
    before = flat(model)
    dist.barrier()

    real, averages = dist.all_reduce, []

    def fails_at_the_third(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        averages.append(tensor)
        if len(averages) == 3:
            raise RuntimeError("Connection closed by peer")
        return real(tensor, *args, **kwargs)

    dist.all_reduce = fails_at_the_third
    watching, watch._current = watch._current, None  # as over MPI: it would look for a cause
    try:
        for name in ("statistics", "more", "most"):
            model.register_buffer(name, torch.ones(3, dtype=torch.float64))

        def average() -> None:
            with optimizer.averaged(model):
                raise AssertionError("not reached")

        error = message_of(average)
    finally:
        dist.all_reduce, watch._current = real, watching
    assert "Connection closed" in error, error
    return torch.equal(flat(model), before)


@scenarios.run(restored)
def test_averaging_that_fails_leaves_every_parameter_as_it_was(results: list[bool]) -> None:
    assert results == [True] * N


def averaged_half(process_group: Group) -> tuple[float, float]:
    """The mean of float16 numbers whose sum is infinite."""
    _, model, optimizer = start(process_group, "decentlam")
    model.register_buffer("large", torch.full((2,), 20_000.0, dtype=torch.float16))
    with optimizer.averaged(model):
        inside = model.large[0].item()
    return inside, model.large[0].item()


@scenarios.run(averaged_half)
def test_averages_of_half_precision_do_not_overflow(results: Any) -> None:
    assert results == [(20_000.0, 20_000.0)] * N


def test_evaluation_may_begin_in_inference_mode_and_end_outside() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = decentlam.DmSGD([p], lr=0.1)
    with torch.inference_mode():
        optimizer.eval()
    optimizer.train()
    p.sum().backward()
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((2,), 0.9))
