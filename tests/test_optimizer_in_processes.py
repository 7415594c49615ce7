"""Optimizers of several processes: saved, copied, replaced, side by side, and joined."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import decentlam
from tests.helpers.models import mlp, mlp_loss
from tests.helpers.processes import Group, Scenarios, every, message_of
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


RESUMED = ("decentlam", "awc-dmsgd", "slowmo", "d2-dmsgd", "qg-dmsgd", "da-dmsgd", "pmsgd")


@scenarios.run(resume, every(method=RESUMED))
def test_resumed_run_is_the_same_to_the_bit(results: list[Any]) -> None:
    for whole, resumed in results:
        assert same(whole, resumed)


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


@scenarios.run(
    twins, [{"overlap": "none", "how": "deepcopy"}, {"overlap": "backward", "how": "pickle"}]
)
def test_a_copy_made_in_the_midst_of_training_goes_on_like_the_original(results: Any) -> None:
    expected = simulate("decentlam", N, 6)[3:]
    for k in range(2):
        assert_equal([both[k] for both in results], expected)


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


@scenarios.run(copied_alone, every(method=("decentlam", "pmsgd", "slowmo")))
def test_one_process_may_copy_its_optimizer_alone(results: list[Any]) -> None:
    for (ours, theirs), said in results:
        assert same(ours, theirs)
        assert said.startswith("ValueError") and "optimizers built or copied before" in said, said


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


@scenarios.run(
    gan,
    [
        {"methods": ("decentlam", "decentlam"), "overlap": True},
        {"methods": ("awc-dmsgd", "dmsgd"), "overlap": True},
        {"methods": ("pmsgd", "decentlam"), "overlap": False},
    ],
)
def test_two_optimizers_in_turn(results: Any, methods: tuple[str, str]) -> None:
    assert_equal(results, simulate_gan(methods, N))


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


@scenarios.run(halves, every(methods=(("decentlam", "dmsgd"), ("pmsgd", "pmsgd"))))
def test_two_optimizers_share_a_backward(results: Any, methods: tuple[str, str]) -> None:
    """The quadratic is a sum over parameters: each half runs as if it were alone."""
    both = [simulate(method, N, 5) for method in methods]
    front = sum(Quadratic.SIZES[:2])
    expected = [torch.cat([a[:, :front], b[:, front:]], dim=1) for a, b in zip(*both, strict=True)]
    assert_equal(results, expected)


def replaced(process_group: Group, kept_alive: bool) -> list[Tensor]:
    """A second optimizer takes over the model; the first must not interfere any more."""
    node, model, optimizer = start(process_group, "dmsgd")
    train(optimizer, model, node, range(3))
    nn.utils.vector_to_parameters(flat(Quadratic(seed=0)), model.parameters())
    second = build("decentlam", model, process_group)
    if not kept_alive:
        del optimizer
    return train(second, model, node, range(5))


@scenarios.run(replaced, every(kept_alive=(True, False)))
def test_new_optimizer_takes_the_model_over(results: Any) -> None:
    assert_equal(results, simulate("decentlam", N, 5))


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


@scenarios.run(
    dropped,
    [{"method": "awc-dmsgd", "after": "step"}, {"method": "decentlam", "after": "backward"}],
)
def test_group_survives_an_optimizer_dropped_with_messages_under_way(results: Any) -> None:
    assert_equal(results, simulate("dmsgd", N, 3))


def subgroup(process_group: Group) -> list[Tensor]:
    """Even and odd processes are two networks of their own."""
    rank = dist.get_rank(process_group)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    node = dist.get_rank(mine)
    model = Quadratic(seed=0)
    optimizer = build("decentlam", model, mine)
    return train(optimizer, model, node, range(5))


@scenarios.run(subgroup)
def test_two_networks_side_by_side(results: Any) -> None:
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


@scenarios.run(accumulate, every(overlap=(True, False)))
def test_accumulated_gradients_equal_one_large_batch(results: Any) -> None:
    assert_equal(results, simulate("decentlam", N, 5, loss=accumulated_loss))


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


@scenarios.run(
    join,
    [
        *every(method=("decentlam", "awc-dmsgd"), overlap=(True, False)),
        {"method": "pmsgd", "overlap": True},
        {"method": "slowmo", "overlap": False},
    ],
)
def test_nodes_without_data_answer_with_gradient_zero(results: Any, method: str) -> None:
    assert [len(trajectory) for trajectory in results] == [13] * N
    assert_equal(results, simulate(method, N, 13, absent=join_absent))


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


@scenarios.run(join_two)
def test_two_optimizers_join_together(results: Any) -> None:
    def absent(node: int, step: int) -> bool:
        return step >= BATCHES[node]

    steps = max(BATCHES)
    first = simulate("decentlam", N, steps, absent=absent)
    assert_equal([both[0] for both in results], first[-1:])
    second = simulate("pmsgd", N, steps, absent=absent, model=lambda: Quadratic(seed=1))
    assert_equal([both[1] for both in results], second[-1:])


def join_throws(process_group: Group) -> str:
    node, model, optimizer = start(process_group, "decentlam")

    def run() -> None:
        with Join([optimizer], throw_on_early_termination=True):
            train(optimizer, model, node, range(BATCHES[node]))

    return message_of(run)


@scenarios.run(join_throws)
def test_join_can_stop_everybody_instead(errors: list[str]) -> None:
    assert all(error.startswith("RuntimeError") for error in errors)


def unpickled(process_group: Group, method: str, subgroup: bool) -> str:
    """What is said where neither group can be formed again: that of exact averages needs all, that
    of fewer processes is unknown. It is the last: what is connected is forgotten."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2] if subgroup else dist.group.WORLD
    _, model, optimizer = start(mine, method)
    data = pickle.dumps(optimizer)
    optimizer.runtime.close()
    del optimizer, model
    decentlam.network.network._connected.clear()  # as in another process
    return message_of(lambda: pickle.loads(data))


@scenarios.run(
    unpickled, [{"method": "pmsgd", "subgroup": False}, {"method": "decentlam", "subgroup": True}]
)
def test_an_unpickled_optimizer_forms_no_group_of_its_own(
    errors: list[str], subgroup: bool
) -> None:
    words = ["cannot be saved with it", "load_state_dict"] if subgroup else ["Build it anew"]
    for error in errors:
        assert error.startswith("RuntimeError") and all(word in error for word in words), error
