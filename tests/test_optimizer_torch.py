"""One process without a group: a drop-in for torch.optim.SGD, with all that torch expects."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

import decentlam

pytestmark = pytest.mark.timeout(120)

Factory = Callable[..., torch.optim.Optimizer]
MOMENTUM_METHODS: dict[str, tuple[Factory, dict[str, Any]]] = {
    "PmSGD": (decentlam.PmSGD, {}),
    "DmSGD": (decentlam.DmSGD, {}),
    "DADmSGD": (decentlam.DADmSGD, {}),
    "AWCDmSGD": (decentlam.AWCDmSGD, {}),
    "AWCDmSGD heavy ball": (decentlam.AWCDmSGD, {"heavy_ball": True}),
    "SlowMo": (decentlam.SlowMo, {"tau": 3}),
    "SlowMo local": (decentlam.SlowMo, {"tau": 3, "base": "local"}),
    "QGDmSGD": (decentlam.QGDmSGD, {}),
    "D2DmSGD": (decentlam.D2DmSGD, {}),
    "DecentLaM": (decentlam.DecentLaM, {}),
}
every_method = pytest.mark.parametrize("method", MOMENTUM_METHODS)


def build(method: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    constructor, hyper = MOMENTUM_METHODS[method]
    return constructor(params, bucket_bytes=100, **hyper, **options)


class Net(nn.Module):
    """Two layers, one parameter that the loss may leave out, one frozen."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, dtype=dtype)
        self.second = nn.Linear(8, 3, dtype=dtype)
        self.sometimes = nn.Parameter(torch.ones(3, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, everything: bool = True) -> Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y * self.sometimes + self.frozen if everything else y


def loss_of(model: nn.Module, step: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 4, generator=generator, dtype=dtype)
    y = torch.randn(16, 3, generator=generator, dtype=dtype)
    return nn.functional.mse_loss(model(x, **options), y)


def train(model: nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> list[Tensor]:
    trajectory = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([loss.detach()] if plateau else []))
        trajectory.append(flat(model))
    return trajectory


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> None:
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a - b).abs().max() < tolerance, f"step {step}"


# The same numbers as torch.optim.SGD ------------------------------------------------------------


@every_method
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_node_is_momentum_sgd(
    method: str, nesterov: bool, weight_decay: float, overlap: bool
) -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": weight_decay}
    ours, theirs = Net(), Net()
    optimizer = build(method, ours.parameters(), overlap=overlap, **hyper)
    reference = torch.optim.SGD(theirs.parameters(), **hyper)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


@every_method
def test_one_node_is_momentum_sgd_in_float32(method: str) -> None:
    ours, theirs = Net(torch.float32), Net(torch.float32)
    optimizer = build(method, ours.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)), 1e-5)


def test_dsgd_on_one_node_is_sgd() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DSGD(ours.parameters(), lr=0.1, weight_decay=0.05)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.05)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


@every_method
def test_parameter_without_gradient_is_left_alone(method: str) -> None:
    """No decay, no momentum while it is unused, and its momentum waits for it."""
    ours, theirs = Net(), Net()
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
    optimizer = build(method, ours.parameters(), **hyper)
    reference = torch.optim.SGD(theirs.parameters(), **hyper)
    for step in range(12):
        used = step in (2, 3, 7, 11)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, step, everything=used).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])
        if step < 2:
            assert torch.equal(ours.sometimes, torch.ones(3, dtype=torch.float64))


def test_frozen_parameter_is_left_alone() -> None:
    model = Net()
    train(model, decentlam.DecentLaM(model.parameters(), lr=0.1, weight_decay=0.1), range(3))
    assert torch.equal(model.frozen, torch.ones(3, dtype=torch.float64))


@every_method
def test_groups_have_their_own_lr_decay_and_momentum(method: str) -> None:
    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": model.first.parameters(), "lr": 0.2, "weight_decay": 0.1},
            {"params": model.second.parameters(), "momentum": 0.5, "nesterov": True},
            {"params": [model.sometimes], "momentum": 0.0},
        ]

    ours, theirs = Net(), Net()
    optimizer = build(method, groups(ours), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(groups(theirs), lr=0.05, momentum=0.9)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


@every_method
def test_groups_can_be_changed_between_steps(method: str) -> None:
    ours, theirs = Net(), Net()
    optimizer = build(method, ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        for opt in (optimizer, reference):
            group = opt.param_groups[0]
            group["lr"] = 0.1 / (1 + step) if step % 5 else 0.0
            group["momentum"] = 0.9 if step < 7 else 0.3
            group["weight_decay"] = 0.0 if step < 10 else 0.1
        a = train(ours, optimizer, range(step, step + 1))
        b = train(theirs, reference, range(step, step + 1))
        assert_close(a, b)


@every_method
def test_add_param_group_mid_run(method: str) -> None:
    ours, theirs = Net(), Net()
    optimizer = build(method, ours.first.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.first.parameters(), lr=0.1, momentum=0.9)
    assert_close(train(ours, optimizer, range(4)), train(theirs, reference, range(4)))
    optimizer.zero_grad()
    reference.zero_grad()
    for model in (ours, theirs):
        model.zero_grad()
    optimizer.add_param_group({"params": ours.second.parameters(), "lr": 0.3})
    reference.add_param_group({"params": theirs.second.parameters(), "lr": 0.3})
    assert_close(train(ours, optimizer, range(4, 12)), train(theirs, reference, range(4, 12)))


def one_step_each(model: nn.Module, optimizer: Any, reference: Any, theirs: nn.Module) -> None:
    for m, opt in ((model, optimizer), (theirs, reference)):
        opt.zero_grad()
        loss_of(m, 0).backward()
        opt.step()
    assert_close([flat(model)], [flat(theirs)])


def test_a_group_of_one_process_is_one_node_too() -> None:
    """torchrun --nproc-per-node 1: a group exists, and SGD's rules for unused parameters hold."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours, theirs = Net(), Net()
        hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        optimizer = decentlam.DecentLaM(ours.parameters(), **hyper)
        reference = torch.optim.SGD(theirs.parameters(), **hyper)
        one_step_each(ours, optimizer, reference, theirs)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, 1, everything=False).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])
        with optimizer.averaged(ours):
            assert_close([flat(ours)], [flat(theirs)])
        assert optimizer.consensus_distance() == 0.0
    finally:
        dist.destroy_process_group()


# Schedulers -------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 5, gamma=0.3),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [4, 9], gamma=0.1),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 12),  # 0 at step 12
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 7),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=30),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 0.0, 0.2, step_size_up=4),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda k: k / 5),  # starts at 0
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.1, total_iters=8),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 12),  # stays at 0 from step 12
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(opt, 9)],
        [4],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("method", ["DecentLaM", "QGDmSGD", "SlowMo", "AWCDmSGD heavy ball"])
def test_scheduler_gives_what_it_gives_sgd(scheduler: str, method: str) -> None:
    ours, theirs = Net(), Net()
    optimizer = build(method, ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    a = train(ours, optimizer, range(25), SCHEDULERS[scheduler](optimizer))
    b = train(theirs, reference, range(25), SCHEDULERS[scheduler](reference))
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["momentum"] == reference.param_groups[0]["momentum"]
    assert_close(a, b)


def test_lr_may_be_a_tensor() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    a = train(ours, optimizer, range(8), lr_scheduler.ExponentialLR(optimizer, 0.8))
    b = train(theirs, reference, range(8), lr_scheduler.ExponentialLR(reference, 0.8))
    assert_close(a, b, 1e-8)  # torch multiplies by the float32 lr, we by its float64 value


# Saving, loading, copying -----------------------------------------------------------------------


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_method
def test_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}

    def start() -> tuple[Net, Any, Any]:
        model = Net()
        optimizer = build(method, model.parameters(), **hyper)
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


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@every_method
def test_copy_goes_on_like_the_original(method: str, how: str) -> None:
    model = Net()
    optimizer = build(method, model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(5))
    both = (model, optimizer)
    twin, twin_optimizer = (
        pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    )
    assert type(twin_optimizer) is type(optimizer)
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
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for model in (ours, theirs):
        model.load_state_dict(other.state_dict())
    assert_close([flat(ours)], [flat(other)])
    assert_close(train(ours, optimizer, range(5)), train(theirs, reference, range(5)))


# Hooks, closures, gradients ---------------------------------------------------------------------


def test_all_hooks_of_torch_run_once_in_order() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *arguments: seen.append(what)

    optimizer.register_step_pre_hook(note("before step"))
    optimizer.register_step_post_hook(note("after step"))
    optimizer.register_state_dict_pre_hook(note("before state_dict"))
    optimizer.register_state_dict_post_hook(note("after state_dict"))
    optimizer.register_load_state_dict_pre_hook(note("before load"))
    optimizer.register_load_state_dict_post_hook(note("after load"))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    words = ("step", "state_dict", "load")
    assert seen == [f"{when} {word}" for word in words for when in ("before", "after")]


def test_global_hooks_run_once() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen = []
    handle = register_optimizer_step_post_hook(lambda *arguments: seen.append(1))
    try:
        model = Net()
        train(model, decentlam.DmSGD(model.parameters(), lr=0.1), range(2))
    finally:
        handle.remove()
    assert seen == [1, 1]


def test_state_dict_hook_may_rewrite_what_is_saved() -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))

    def double(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        state = copy.deepcopy(state)
        for values in state["state"].values():
            for value in values.values():
                value.mul_(2)
        return state

    optimizer.register_load_state_dict_pre_hook(double)
    before = {i: copy.deepcopy(s) for i, s in optimizer.state_dict()["state"].items()}
    optimizer.load_state_dict(optimizer.state_dict())
    for i, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(value, 2 * before[i][name])


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        losses = []
        for model, opt in ((ours, optimizer), (theirs, reference)):

            def closure(model: Net = model, opt: Any = opt, step: int = step) -> Tensor:
                opt.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(opt.step(closure))
        assert (losses[0] - losses[1]).abs() < 1e-12
        assert_close([flat(ours)], [flat(theirs)])


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    optimizer.step()
    assert model.first.weight.grad is not None
    optimizer.zero_grad(set_to_none=to_none)
    if to_none:
        assert model.first.weight.grad is None
    else:
        assert not model.first.weight.grad.any()
    loss_of(model, 0).backward()
    expected = torch.autograd.grad(loss_of(model, 0), model.first.weight)[0]
    assert torch.allclose(model.first.weight.grad, expected, atol=1e-15)


def test_gradients_accumulate_over_backwards_as_in_torch() -> None:
    """On one node nothing is sent, so none of these is too late."""
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, step).backward()
            loss_of(model, step + 100).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.param_groups[0]["lr"] *= 0.9
            opt.step()
            opt.step()  # again, with the same gradients
        assert_close([flat(ours)], [flat(theirs)])


def test_backward_may_keep_its_graph() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss = loss_of(model, step)
            grads = torch.autograd.grad(loss, list(model.second.parameters()), create_graph=True)
            (loss + sum(g.square().sum() for g in grads)).backward()
            opt.step()
        assert_close([flat(ours)], [flat(theirs)])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            loss_of(model, step).backward(create_graph=True)
            opt.step()
        assert not any(p.requires_grad for b in optimizer._buckets for p in (b.x, b.g))
        assert_close([flat(ours)], [flat(theirs)])


def test_grad_scaler_with_overflow_skips_as_torch_does() -> None:
    """torch skips the step; here the gradient is zero, which differs only by the momentum."""
    ours, theirs = Net(torch.float32), Net(torch.float32)
    optimizer = decentlam.DecentLaM(ours.parameters(), lr=0.1, momentum=0.0)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            opt.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step == 2:
                model.first.weight.grad[0, 0] = torch.inf
            if step == 4:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_close([flat(ours)], [flat(theirs)], 1e-6)
    assert optimizer.statistics.skipped_steps == 1


def test_optimizer_that_nobody_uses_is_gone() -> None:
    """The parameters keep its hooks, but these must not keep it, its buckets and its state."""
    model = Net()
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    theirs = copy.deepcopy(model)
    second = decentlam.DmSGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    assert_close(train(model, second, range(4)), train(theirs, reference, range(4)))


# Layout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_channels_last_weights_keep_values_and_memory_format(frozen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(not frozen)
    twin = copy.deepcopy(model)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert_close([flat(model)], [flat(twin)])
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        for m, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            m(x.to(memory_format=torch.channels_last)).square().mean().backward()
            opt.step()
    assert_close([flat(model)], [flat(twin)])
    for layer in (model[0], model[2]):
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
        assert not layer.weight.is_contiguous()
    states = [s for p in (model[0].weight, model[2].weight) for s in optimizer.state[p].values()]
    assert len(states) == (1 if frozen else 2)
    assert all(s.is_contiguous(memory_format=torch.channels_last) for s in states)


def test_dtypes_may_be_mixed_in_one_group() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    values = [torch.randn(5, 3).to(dtype) for dtype in dtypes]
    ours = [nn.Parameter(v.clone()) for v in values]
    theirs = [nn.Parameter(v.clone()) for v in values]
    optimizer = decentlam.DecentLaM(ours, lr=0.1, momentum=0.9, weight_decay=0.01)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(5):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            sum((p.double() - 1).square().sum() for p in params).backward()
            opt.step()
    for a, b, dtype in zip(ours, theirs, dtypes, strict=True):
        assert (
            a.dtype == dtype and optimizer.state[a][next(iter(optimizer.state[a]))].dtype == dtype
        )
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert (a - b).abs().max() < tolerance


def test_parameters_larger_than_one_piece() -> None:
    ours = [nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (100_003, 40_001)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = decentlam.DecentLaM(ours, **hyper)
    reference = torch.optim.SGD(theirs, **hyper)
    for step in range(3):
        for params, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            used = params if step != 1 else params[:1]
            sum((p * torch.linspace(0, 1, len(p))).square().sum() for p in used).backward()
            opt.step()
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_everything_frozen() -> None:
    model = Net().requires_grad_(False)
    before = flat(model)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    with optimizer.averaged(model):
        pass
    assert torch.equal(flat(model), before) and optimizer.consensus_distance() == 0.0


def test_scalar_and_empty_parameters() -> None:
    params = [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))]
    optimizer = decentlam.DecentLaM(params, lr=0.1, momentum=0.9, bucket_bytes=1)
    params[0].square().backward()
    optimizer.step()
    assert params[0].item() == pytest.approx(1.6)
    assert params[1].shape == (0, 3)


def test_empty_first_group() -> None:
    model = Net()
    groups = [{"params": []}, {"params": list(model.parameters())}]
    theirs = Net()
    optimizer = decentlam.DecentLaM(groups, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    one_step_each(model, optimizer, reference, theirs)


# Errors that name the parameter -----------------------------------------------------------------


@pytest.fixture
def named() -> Iterator[tuple[Net, Any]]:
    model = Net()
    yield model, decentlam.DecentLaM(model.named_parameters(), lr=0.1)


def test_named_parameters_train(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    theirs = Net()
    reference = torch.optim.SGD(theirs.named_parameters(), lr=0.1, momentum=0.9)
    one_step_each(model, optimizer, reference, theirs)
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "sometimes"


@pytest.mark.parametrize("move", [lambda m: m.float(), lambda m: m.first.half()])
def test_parameter_moved_after_construction(
    named: tuple[Net, Any], move: Callable[[Net], Any]
) -> None:
    model, optimizer = named
    move(model)
    with pytest.raises(RuntimeError, match=r"(first|second)\.bias was moved or converted"):
        optimizer.step()


def test_parameter_given_new_data_after_construction(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    loss_of(model, 0).backward()
    model.second.bias.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"second\.bias was moved"):
        optimizer.step()


def test_parameter_unfrozen_after_construction(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    model.frozen.requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="frozen when the optimizer was built"):
        optimizer.step()


def test_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    _kept = decentlam.DecentLaM(model.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"weight has a sparse gradient.*sparse=False"):
        model(torch.tensor([1, 3])).sum().backward()


def test_step_inside_no_sync_is_refused(named: tuple[Net, Any]) -> None:
    model, optimizer = named
    with optimizer.no_sync():
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="no_sync"):
            optimizer.step()
    optimizer.step()


def test_wrong_state_is_refused() -> None:
    small, large = nn.Linear(2, 2), nn.Linear(3, 3)
    saved = decentlam.DecentLaM(small.parameters(), lr=0.1).state_dict()
    with pytest.raises(ValueError, match="shape"):
        decentlam.DecentLaM(large.parameters(), lr=0.1).load_state_dict(saved)


class Mixed(nn.Module):
    """Large and small parameters in turn, one of them in channels-last order, one often unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(200, 200)  # 40,000 weights: large
        self.conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # 36,864: large
        self.last = nn.Linear(64, 3)
        self.spare = nn.Linear(200, 200)

    def forward(self, x: Tensor, use_spare: bool) -> Tensor:
        x = self.first(x)
        x = self.spare(x) if use_spare else x
        x = x[:, None, :64, None].expand(-1, 64, -1, 3)
        return self.last(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_large_gradients_stay_where_backward_left_them_and_train_as_sgd_does(
    set_to_none: bool, max_grad_norm: float | None
) -> None:
    torch.manual_seed(0)
    ours = Mixed().double()
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = decentlam.DecentLaM(
        ours.parameters(), **options, overlap=False, max_grad_norm=max_grad_norm
    )
    reference = torch.optim.SGD(theirs.parameters(), **options)
    for step in range(5):
        x = torch.randn(4, 200, dtype=torch.float64)
        for model, stepper in ((ours, optimizer), (theirs, reference)):
            stepper.zero_grad(set_to_none=set_to_none)
            model(x, use_spare=step != 2).square().mean().backward()
            if model is theirs and max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        left = {p: p.grad.data_ptr() for p in ours.parameters() if p.grad is not None}
        optimizer.step()
        reference.step()
        if step < 2:  # afterwards the spare layer has a place of its own
            large = [p for p in left if p.numel() >= 1 << 15]
            assert len(large) == 3
            assert all(p.grad.data_ptr() == left[p] for p in large)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
