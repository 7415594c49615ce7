"""The contract of an algorithm: every entry of ALGORITHMS through the same checks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from trajectories import METHODS, MOMENTUM_METHODS, Problem, method_id, with_zeros

import decentlam
from decentlam import topology
from decentlam.algorithms import ALGORITHMS, Algorithm, PmSGD, Reach, Step, lr_ratio, make
from decentlam.simulation.simulate import Nodes, column_blocks


def random_state(algorithm: Algorithm, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(buffer) for name, buffer in algorithm.init(x).items()}


def test_no_algorithm_is_left_out() -> None:
    assert {name for name, _ in METHODS} == ALGORITHMS.keys()


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


@pytest.mark.parametrize(
    "method",
    [method for method in METHODS if not make(method[0], **method[1]).update_reads_g],
    ids=method_id,
)
@pytest.mark.parametrize("index", [0, 3, 47])
def test_an_update_that_reads_no_g_says_so_truly(method: tuple[str, dict], index: int) -> None:
    """Who says so is not given one with weight decay."""
    torch.manual_seed(0)
    algorithm = make(method[0], **method[1])
    x, g, step = torch.randn(6), torch.randn(6), Step(index, 0.1)
    state = random_state(algorithm, x)
    message = algorithm.message(x, g, state, step)
    found = []
    for given in (g, torch.full_like(g, math.nan)):
        mixed = tuple(m + 1 for m in message) if isinstance(message, tuple) else message + 1
        new, buffers = x.clone(), {name: t.clone() for name, t in state.items()}
        algorithm.update(new, given, mixed, buffers, step)
        found.append([new, *buffers.values()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lr", [0.1, 1e-17, 1e-40, 0.0])  # schedules end near zero
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_update_is_the_same_with_what_the_runtime_has_at_hand(
    method: tuple[str, dict], dtype: torch.dtype, lr: float
) -> None:
    """The mix may lie in the memory of x, and the own message may be there to read."""
    torch.manual_seed(0)
    algorithm, step = make(method[0], **method[1]), Step(3, lr, lr_ratio=0.5)
    x, g, other = (torch.randn(6, dtype=dtype) for _ in range(3))
    state = random_state(algorithm, x)
    message = algorithm.message(x, g, state, step)
    payloads = message if isinstance(message, tuple) else (message,)
    mixes = [torch.lerp(payload, other, 0.5) for payload in payloads]
    found = []
    for at_hand in (False, True):
        own_x, own_state = x.clone(), {name: t.clone() for name, t in state.items()}
        mixed = [mix.clone() for mix in mixes]
        if at_hand and algorithm.replaces_x:
            mixed[0] = own_x.copy_(mixed[0])
        sent = payloads[0].clone() if at_hand and len(payloads) == 1 else None
        given = tuple(mixed) if len(mixed) > 1 else mixed[0]
        algorithm.update(own_x, g, given, own_state, step.at(sent=sent))
        found.append([own_x, *own_state.values()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_stacked_run_is_the_row_by_row_run(method: tuple[str, dict]) -> None:
    """The two functions serve (n, d) and (d,) alike: here n nodes keep separate tensors."""
    name, hyper = method
    algorithm, net, problem = make(name, **hyper), topology.mesh(6), Problem(6)
    x0 = problem.start(equal=True)
    stacked = Nodes(algorithm, net, x0, weight_decay=0.1)
    rows = [row.clone() for row in x0]
    states = [algorithm.init(row) for row in rows]
    W = net.weights()
    previous_lr = sync_lr = None
    for k in range(13):
        lr = [0.05, 0.0, 0.02][k % 3]
        gradient = problem.torch_gradient(torch.stack(rows), k) + 0.1 * torch.stack(rows)
        step = Step(k, lr, lr_ratio(lr, previous_lr), lr_ratio(lr, sync_lr), 0.1)
        messages = [
            algorithm.message(x, g, state, step)
            for x, g, state in zip(rows, gradient, states, strict=True)
        ]
        reach = algorithm.reach(k)
        for i, (x, state) in enumerate(zip(rows, list(states), strict=True)):
            mixed = mix_for(i, messages, W, reach)
            rows[i] = x.clone()
            algorithm.update(rows[i], gradient[i], mixed, state, step)
        stacked.step(problem.torch_gradient(stacked.x, k), lr)
        previous_lr = lr
        sync_lr = lr if reach is Reach.EVERYONE else sync_lr
        np.testing.assert_allclose(stacked.x, torch.stack(rows), rtol=0, atol=1e-12)


def mix_for(node: int, messages: list, W: torch.Tensor, reach: Reach):
    if isinstance(messages[0], tuple):
        return tuple(
            mix_for(node, list(payloads), W, reach) for payloads in zip(*messages, strict=True)
        )
    if reach is Reach.NOBODY:
        return messages[node].clone()
    if reach is Reach.EVERYONE:
        return torch.stack(messages).mean(0)
    return torch.stack([w * message for w, message in zip(W[node], messages, strict=True)]).sum(0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_has_the_declared_names_and_starts_at_zero_or_at_x(name: str) -> None:
    algorithm = make(name)
    x = torch.randn(3, 4, dtype=torch.float64)
    state = algorithm.init(x)
    assert tuple(state) == algorithm.buffers
    for buffer in state.values():
        assert buffer.shape == x.shape and buffer.dtype == x.dtype
        assert not buffer.any() or torch.equal(buffer, x)  # SlowMo remembers where it began


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_precisions_stay_what_they_are_and_agree(name: str) -> None:
    problem = Problem(8)
    x0 = problem.start(equal=True)
    double, single = (
        decentlam.simulate(name, "ring", x0.to(dtype), problem.torch_gradient, 0.05, 50)
        for dtype in (torch.float64, torch.float32)
    )
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    np.testing.assert_allclose(single.double(), double, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_repeat_to_the_bit_and_leave_x0_alone(name: str) -> None:
    problem = Problem(8)
    x0 = problem.start()
    before = x0.clone()

    def run() -> torch.Tensor:
        return decentlam.simulate(
            name, "bipartite-random-match", x0, problem.torch_gradient, 0.05, 30, momentum=0.3
        )

    assert torch.equal(run(), run())
    assert torch.equal(x0, before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_resuming_from_a_saved_state_repeats_to_the_bit(name: str) -> None:
    problem = Problem(8)
    hyper = {"tau": 4} if name == "slowmo" else {}
    first = Nodes(name, "ring", problem.start(equal=True), 0.8, weight_decay=0.1, **hyper)
    for k in range(10):
        first.step(problem.torch_gradient(first.x, k), with_zeros(k))
    saved = first.state_dict()
    second = Nodes(name, "ring", torch.zeros(8, 3).double(), 0.8, weight_decay=0.1, **hyper)
    second.load_state_dict(saved)
    for k in range(10, 20):
        for nodes in (first, second):
            nodes.step(problem.torch_gradient(nodes.x, k), with_zeros(k))
    assert torch.equal(first.x, second.x)
    assert not torch.equal(first.x, saved["x"])  # what was saved is a copy


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not make(name).layerwise])
def test_blocks_of_columns_do_not_change_the_run(name: str) -> None:
    """Wide models are stepped block by block; the same columns alone must give the same."""
    torch.manual_seed(0)
    x0, target = torch.randn(4, 200_000), torch.randn(4, 200_000)
    assert len(column_blocks(x0)) > 2 and sum(column_blocks(x0)) == 200_000
    wide = decentlam.simulate(name, "ring", x0, lambda x, k: x - target, 0.1, 3)
    tail = decentlam.simulate(name, "ring", x0[:, -500:], lambda x, k: x - target[:, -500:], 0.1, 3)
    np.testing.assert_allclose(wide[:, -500:], tail, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MOMENTUM_METHODS)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.9", None])
def test_momentum_outside_zero_to_one_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        make(name, beta=value)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("method", [m for m in METHODS if m[0] != "dsgd"], ids=method_id)
def test_alone_every_method_is_momentum_sgd(method: tuple[str, dict], nesterov: bool) -> None:
    """Or LARS, if that is the method; a slow momentum is left out too."""
    name, hyper = method
    algorithm = make(name, momentum=0.7, nesterov=nesterov, **hyper)
    expected = algorithm if name == "pmsgd-lars" else PmSGD(0.7, nesterov)
    assert algorithm.alone() == expected
    assert all(form.alone() == expected for form in algorithm.steady())


def test_alone_dsgd_is_sgd() -> None:
    assert make("dsgd").alone() == PmSGD(0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_hyper_parameters_are_fixed_once_set(name: str) -> None:
    algorithm = make(name)
    for entry in dataclasses.fields(algorithm):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, entry.name, 0.5)


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
