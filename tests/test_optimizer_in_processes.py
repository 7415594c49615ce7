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
from tests.helpers.processes import Group, Scenarios, every, message_of
from tests.helpers.quadratic import (
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


RESUMED = ("decentlam", "awc-dmsgd", "slowmo", "pmsgd")


@scenarios.run(resume, every(method=RESUMED))
def test_resumed_run_is_the_same_to_the_bit(results: list[Any]) -> None:
    for whole, resumed in results:
        assert same(whole, resumed)


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
    found = [train(optimizer, model, node, range(2, 5)), train(theirs, twin, node, range(2, 5))]
    return found, message_of(lambda: train(late, apart, node, range(1)))


@scenarios.run(copied_alone, every(method=("decentlam", "pmsgd", "slowmo")))
def test_one_process_may_copy_its_optimizer_alone(results: list[Any]) -> None:
    for (ours, theirs), said in results:
        assert same(ours, theirs)
        assert said.startswith("ValueError") and "optimizers built or copied before" in said, said


# Several optimizers -----------------------------------------------------------------------------


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
