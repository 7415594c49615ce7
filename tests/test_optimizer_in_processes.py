"""Optimizers of several processes: saved, copied, replaced, side by side, and joined."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import decentlam
from tests.helpers.models import mlp, mlp_loss
from tests.helpers.processes import Group, Scenarios, message_of
from tests.helpers.quadratic import (
    DECAY,
    LR,
    MOMENTUM,
    Loss,
    Quadratic,
    assert_equal,
    build,
    flat,
    quadratic_loss,
    same,
    simulate,
    start,
    train,
)

N = 4
scenarios = Scenarios(N)


# State and copies -------------------------------------------------------------------------------


def resume(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Six steps in one go, and three, saved, loaded into a new model and optimizer, and three."""
    options = {"topology": "one-peer-symmetric-exponential"}
    node, model, optimizer = start(process_group, method, **options)
    whole = train(optimizer, model, node, range(6))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    node, model, optimizer = start(process_group, method, **options)
    train(optimizer, model, node, range(2))  # what is on its way then must not disturb
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return whole[3:], train(optimizer, model, node, range(3, 6))


def twins(process_group: Group, overlap: str, how: str) -> list[list[Tensor]]:
    """A copy made right after a step, whose messages may still be under way, and its original."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    train(optimizer, model, node, range(2))
    optimizer.zero_grad()
    quadratic_loss(model, node, 2).backward()
    optimizer.step()
    both = (model, optimizer)
    twin, theirs = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    return [
        train(theirs, twin, node, range(3, 6)),
        train(optimizer, model, node, range(3, 6)),
    ]


def copied_alone(process_group: Group, method: str) -> tuple[list[list[Tensor]], str]:
    """All copy an optimizer, then one process alone, which must not wait for others, then all. What
    is said of the last copy, whose messages would not meet; a new optimizer can be built."""
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    twin, theirs = copy.deepcopy((model, optimizer))
    assert theirs.network is optimizer.network
    if node == 1:
        copy.deepcopy((model, optimizer))
        pickle.loads(pickle.dumps((model, optimizer)))
    apart, late = copy.deepcopy((model, optimizer))
    _, fresh, new = start(process_group, method)
    train(new, fresh, node, range(2))
    found = [
        train(optimizer, model, node, range(2, 5)),
        train(theirs, twin, node, range(2, 5)),
    ]
    return found, message_of(lambda: train(late, apart, node, range(1)))


def unpickled_subgroup(process_group: Group) -> str:
    """A pickled optimizer of a group of fewer processes cannot find its group again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    _, model, optimizer = start(mine, "decentlam")
    data = pickle.dumps(optimizer)
    optimizer.runtime.close()
    del optimizer, model
    decentlam.network.network._connected.clear()  # as in another process
    return message_of(lambda: pickle.loads(data))


def unpickled_exact(process_group: Group) -> str:
    """Exact averages need a group of their own, which one process alone cannot form."""
    _, model, optimizer = start(dist.group.WORLD, "pmsgd")
    data = pickle.dumps(optimizer)
    optimizer.runtime.close()
    del optimizer, model
    decentlam.network.network._connected.clear()  # as in another process
    return message_of(lambda: pickle.loads(data))


RESUMED = ("decentlam", "awc-dmsgd", "slowmo", "d2-dmsgd", "qg-dmsgd", "da-dmsgd", "pmsgd")
for method in RESUMED:
    scenarios.add(f"resume {method}", resume, method=method)
COPIED = [("none", "deepcopy"), ("backward", "deepcopy"), ("backward", "pickle")]
for overlap, how in COPIED:
    scenarios.add(f"{how} {overlap}", twins, overlap=overlap, how=how)
for method in ("decentlam", "pmsgd", "slowmo"):
    scenarios.add(f"copied {method}", copied_alone, method=method)


@pytest.mark.parametrize("method", RESUMED)
def test_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    for whole, resumed in scenarios.outcomes(f"resume {method}"):
        assert same(whole, resumed)


@pytest.mark.parametrize(("overlap", "how"), COPIED)
def test_a_copy_made_in_the_midst_of_training_goes_on_like_the_original(
    overlap: str, how: str
) -> None:
    expected = simulate("decentlam", N, 6)[3:]
    for k in range(2):
        assert_equal([both[k] for both in scenarios.outcomes(f"{how} {overlap}")], expected)


@pytest.mark.parametrize("method", ["decentlam", "pmsgd", "slowmo"])
def test_one_process_may_copy_its_optimizer_alone(method: str) -> None:
    for (ours, theirs), said in scenarios.outcomes(f"copied {method}"):
        assert same(ours, theirs)
        assert said.startswith("ValueError") and "optimizers built or copied before" in said, said


def test_an_unpickled_optimizer_forms_no_group_of_its_own() -> None:
    for message in scenarios.outcomes("unpickled exact"):
        assert message.startswith("RuntimeError") and "Build it anew" in message, message


def test_an_optimizer_of_a_subgroup_is_not_moved_to_all_processes() -> None:
    for error in scenarios.outcomes("unpickled subgroup"):
        assert "cannot be saved with it" in error and "load_state_dict" in error, error


# Several optimizers -----------------------------------------------------------------------------


def generator_loss(models: nn.ModuleDict, node: int, step: int) -> Tensor:
    return mlp_loss(models["generator"], node, step) + discriminator_loss(models, node, step)


def discriminator_loss(models: nn.ModuleDict, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(500 + 100 * node + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return models["discriminator"](torch.cat([models["generator"](x), x[:, :2]], 1)).square().mean()


def gan(process_group: Group, methods: tuple[str, str], overlap: bool) -> list[Tensor]:
    """Two optimizers in turn; the generator's backward reaches the discriminator too."""
    node = dist.get_rank(process_group)
    models = nn.ModuleDict({"generator": mlp(node), "discriminator": mlp(node + 10)})
    first = build(methods[0], models["generator"], process_group, overlap=overlap)
    second = build(methods[1], models["discriminator"], process_group, overlap=overlap)
    trajectory = []
    for step in range(5):
        second.zero_grad()
        with first.no_sync():
            discriminator_loss(models, node, step).backward()
        second.step()
        first.zero_grad()
        with second.no_sync():
            generator_loss(models, node, step).backward()
        first.step()
        trajectory.append(flat(models))
    return trajectory


def simulate_gan(methods: tuple[str, str], n: int) -> list[Tensor]:
    models = nn.ModuleDict({"generator": mlp(0), "discriminator": mlp(10)})
    first, second = (
        decentlam.Nodes(m, "ring", flat(part).expand(n, -1), MOMENTUM, weight_decay=DECAY)
        for m, part in zip(methods, models.values(), strict=True)
    )
    trajectory = []

    def gradients(nodes: decentlam.Nodes, part: str, loss: Loss, step: int) -> Tensor:
        rows = []
        for node in range(n):
            nn.utils.vector_to_parameters(first.x[node].clone(), models["generator"].parameters())
            nn.utils.vector_to_parameters(
                second.x[node].clone(), models["discriminator"].parameters()
            )
            models.zero_grad()
            loss(models, node, step).backward()
            rows.append(torch.cat([p.grad.reshape(-1) for p in models[part].parameters()]))
        return torch.stack(rows)

    for step in range(5):
        second.step(gradients(second, "discriminator", discriminator_loss, step), LR)
        first.step(gradients(first, "generator", generator_loss, step), LR)
        trajectory.append(torch.cat([first.x, second.x], dim=1))
    return trajectory


def halves(process_group: Group, methods: tuple[str, str]) -> list[Tensor]:
    """Two optimizers share one backward."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    weights = list(model.weights)
    front = build(methods[0], nn.ParameterList(weights[:2]), process_group)
    back = build(methods[1], nn.ParameterList(weights[2:]), process_group)
    trajectory = []
    for step in range(5):
        front.zero_grad()
        back.zero_grad()
        quadratic_loss(model, node, step).backward()
        front.step()
        back.step()
        trajectory.append(flat(model))
    return trajectory


def replaced(process_group: Group, kept_alive: bool) -> list[Tensor]:
    """A second optimizer takes over the model; the first must not interfere any more."""
    node, model, optimizer = start(process_group, "dmsgd")
    train(optimizer, model, node, range(3))
    nn.utils.vector_to_parameters(flat(Quadratic(seed=0)), model.parameters())
    second = build("decentlam", model, process_group)
    if not kept_alive:
        del optimizer
    return train(second, model, node, range(5))


def dropped(process_group: Group, method: str, after: str) -> list[Tensor]:
    """An optimizer is given up with messages under way; the next one uses the same group."""
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    if after == "backward":
        optimizer.zero_grad()
        quadratic_loss(model, node, 2).backward()
    del model, optimizer
    gc.collect()
    dist.all_reduce(torch.ones(1), group=process_group)
    node, model, optimizer = start(process_group, "dmsgd")
    return train(optimizer, model, node, range(3))


def subgroup(process_group: Group) -> list[Tensor]:
    """Even and odd processes are two networks of their own."""
    rank = dist.get_rank(process_group)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    node = dist.get_rank(mine)
    model = Quadratic(seed=0)
    optimizer = build("decentlam", model, mine)
    return train(optimizer, model, node, range(5))


GANS = [
    (("decentlam", "decentlam"), True),
    (("pmsgd", "pmsgd"), True),
    (("awc-dmsgd", "dmsgd"), True),
    (("decentlam", "pmsgd"), False),
]
for methods, overlap in GANS:
    scenarios.add(f"gan {methods} {overlap}", gan, methods=methods, overlap=overlap)
for methods in (("decentlam", "dmsgd"), ("pmsgd", "pmsgd")):
    scenarios.add(f"halves {methods}", halves, methods=methods)
for alive in (True, False):
    scenarios.add(f"replaced {alive}", replaced, kept_alive=alive)
DROPPED = [("awc-dmsgd", "step"), ("awc-dmsgd", "backward"), ("decentlam", "backward")]
for method, after in DROPPED:
    scenarios.add(f"dropped {method} {after}", dropped, method=method, after=after)
scenarios.add("subgroup", subgroup)


@pytest.mark.parametrize(("methods", "overlap"), GANS)
def test_two_optimizers_in_turn(methods: tuple[str, str], overlap: bool) -> None:
    assert_equal(scenarios.outcomes(f"gan {methods} {overlap}"), simulate_gan(methods, N))


@pytest.mark.parametrize("methods", [("decentlam", "dmsgd"), ("pmsgd", "pmsgd")])
def test_two_optimizers_share_a_backward(methods: tuple[str, str]) -> None:
    """The quadratic is a sum over parameters: each half runs as if it were alone."""
    both = [simulate(method, N, 5) for method in methods]
    front = sum(Quadratic.SIZES[:2])
    expected = [torch.cat([a[:, :front], b[:, front:]], dim=1) for a, b in zip(*both, strict=True)]
    assert_equal(scenarios.outcomes(f"halves {methods}"), expected)


@pytest.mark.parametrize("alive", [True, False])
def test_new_optimizer_takes_the_model_over(alive: bool) -> None:
    assert_equal(scenarios.outcomes(f"replaced {alive}"), simulate("decentlam", N, 5))


@pytest.mark.parametrize(("method", "after"), DROPPED)
def test_group_survives_an_optimizer_dropped_with_messages_under_way(
    method: str, after: str
) -> None:
    assert_equal(scenarios.outcomes(f"dropped {method} {after}"), simulate("dmsgd", N, 3))


def test_two_networks_side_by_side() -> None:
    results = scenarios.outcomes("subgroup")
    expected = simulate("decentlam", 2, 5)
    assert_equal(results[::2], expected)
    assert_equal(results[1::2], expected)


# Batches that accumulate, or are fewer on some nodes ---------------------------------------------


def accumulate(process_group: Group, overlap: bool) -> list[Tensor]:
    """Three backwards per step; parameter 0 is only used in the first of them."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        with optimizer.no_sync():
            quadratic_loss(model, node, step).backward()
            (0.5 * quadratic_loss(model, node, step + 1)).backward()
        part = sum(0.5 * w.square().sum() for w in list(model.weights)[1:])
        part.backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def accumulated_loss(model: nn.Module, node: int, step: int) -> Tensor:
    whole = quadratic_loss(model, node, step) + 0.5 * quadratic_loss(model, node, step + 1)
    return whole + sum(0.5 * w.square().sum() for w in list(model.weights)[1:])


BATCHES = (3, 6, 2, 5)  # of nodes 0 to 3


def join(process_group: Group, method: str, overlap: bool) -> list[Tensor]:
    """Two epochs of uneven batches, with a step of all in between; (steps, d) of this node."""
    node, model, optimizer = start(process_group, method, overlap=overlap)
    trajectory: list[Tensor] = []
    original = optimizer.runtime.step

    def step_and_record(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        trajectory.append(flat(model))

    optimizer.runtime.step = step_and_record  # sees the steps without data too
    with Join([optimizer]):
        train(optimizer, model, node, range(BATCHES[node]))
    model.zero_grad()
    train(optimizer, model, node, range(6, 7))
    with Join([optimizer]):
        train(optimizer, model, node, range(7, 7 + BATCHES[(node + 1) % 4]))
    return trajectory


def join_absent(node: int, step: int) -> bool:
    if step < 6:
        return step >= BATCHES[node]
    return step > 6 and step - 7 >= BATCHES[(node + 1) % 4]


def join_two(process_group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """Two optimizers in one context, as a GAN has."""
    node = dist.get_rank(process_group)
    a, b = Quadratic(seed=0), Quadratic(seed=1)
    first = build("decentlam", a, process_group)
    second = build("pmsgd", b, process_group)
    with Join([first, second]):
        for step in range(BATCHES[node]):
            train(first, a, node, range(step, step + 1))
            train(second, b, node, range(step, step + 1))
    return [flat(a)], [flat(b)]


def join_throws(process_group: Group) -> str:
    node, model, optimizer = start(process_group, "decentlam")

    def run() -> None:
        with Join([optimizer], throw_on_early_termination=True):
            train(optimizer, model, node, range(BATCHES[node]))

    return message_of(run)


for overlap in (True, False):
    scenarios.add(f"accumulate {overlap}", accumulate, overlap=overlap)
JOINING = [
    (method, overlap)
    for method in ("decentlam", "awc-dmsgd", "pmsgd", "slowmo")
    for overlap in (True, False)
]
for method, overlap in JOINING:
    scenarios.add(f"join {method} {overlap}", join, method=method, overlap=overlap)
scenarios.add("join two", join_two)
scenarios.add("join throws", join_throws)
scenarios.add("unpickled exact", unpickled_exact)
scenarios.add("unpickled subgroup", unpickled_subgroup)  # the last: what is connected is forgotten


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulated_gradients_equal_one_large_batch(overlap: bool) -> None:
    expected = simulate("decentlam", N, 5, loss=accumulated_loss)
    assert_equal(scenarios.outcomes(f"accumulate {overlap}"), expected)


@pytest.mark.parametrize(("method", "overlap"), JOINING)
def test_nodes_without_data_answer_with_gradient_zero(method: str, overlap: bool) -> None:
    expected = simulate(method, N, 13, absent=join_absent)
    trajectories = scenarios.outcomes(f"join {method} {overlap}")
    assert [len(trajectory) for trajectory in trajectories] == [13] * N
    assert_equal(trajectories, expected)


def test_two_optimizers_join_together() -> None:
    def absent(node: int, step: int) -> bool:
        return step >= BATCHES[node]

    results = scenarios.outcomes("join two")
    steps = max(BATCHES)
    assert_equal(
        [first for first, _ in results],
        simulate("decentlam", N, steps, absent=absent)[-1:],
    )
    second = simulate("pmsgd", N, steps, absent=absent, model=lambda: Quadratic(seed=1))
    assert_equal([second for _, second in results], second[-1:])


def test_join_can_stop_everybody_instead() -> None:
    assert all(error.startswith("RuntimeError") for error in scenarios.outcomes("join throws"))
