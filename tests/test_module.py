"""Real modules on simulated nodes, against n separate modules stepped one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from modules import MODELS, N, OneByOne, assert_close, batch, make_model
from torch import Tensor, nn

from decentlam import ALGORITHMS, SimulatedModule, topology


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in turn"])
@pytest.mark.parametrize("algorithm", ["decentlam", "dmsgd", "pmsgd-lars"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_separate_modules(name: str, algorithm: str, stacked: bool) -> None:
    model, net = make_model(name), topology.ring(N)
    kwargs: dict = {"momentum": 0.8, "weight_decay": 0.01}
    if algorithm == "pmsgd-lars":
        kwargs["trust"] = 0.1
    simulated = SimulatedModule(model, algorithm, net, lr=0.05, stacked=stacked, **kwargs)
    separate = OneByOne(model, algorithm, net, **kwargs)
    for k in range(10):
        lr = 0.05 / (1 + k)
        simulated.lr = lr
        losses = simulated.step(F.cross_entropy, *batch(name, k))
        assert_close(losses, separate.step(*batch(name, k), lr))
        for i, expected in enumerate(separate.models):
            node = simulated.node(i)
            assert list(node.state_dict()) == list(expected.state_dict())
            for key, value in node.state_dict().items():
                assert value.dtype == expected.state_dict()[key].dtype
                assert_close(value, expected.state_dict()[key])
    if algorithm != "pmsgd-lars":
        assert simulated.consensus_distance() > 1e-4


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in turn"])
def test_large_transposed_gradients_are_those_of_separate_modules(stacked: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 100), nn.Tanh(), nn.Linear(100, 90), nn.Linear(90, 3))
    net = topology.ring(N)
    simulated = SimulatedModule(model.double(), "decentlam", net, lr=0.05, stacked=stacked)
    separate = OneByOne(model, "decentlam", net)
    for k in range(3):
        losses = simulated.step(F.cross_entropy, *batch("mlp", k))
        assert_close(losses, separate.step(*batch("mlp", k), 0.05))
    assert_close(simulated.x, separate.nodes.x)


@pytest.mark.parametrize("name", ["mlp", "tied and frozen"])
def test_micro_batches_add_up_to_the_whole_batch(name: str) -> None:
    whole, pieces = (SimulatedModule(make_model(name), "dmsgd", "ring", N, 0.05) for _ in range(2))
    for k in range(3):
        losses = whole.step(F.cross_entropy, *batch(name, k))
        assert_close(pieces.step(F.cross_entropy, *batch(name, k), micro_batch=4), losses)  # 4 + 2
    assert_close(pieces.x, whole.x)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in turn"])
def test_batch_norm_sees_every_micro_batch(stacked: bool) -> None:
    name = "cnn with batch norm"
    model = make_model(name)
    simulated = SimulatedModule(model, "dmsgd", "ring", N, lr=0.05, stacked=stacked)
    inputs, targets = batch(name, 0)
    simulated.step(F.cross_entropy, inputs, targets, micro_batch=2)
    assert simulated.buffers["1.num_batches_tracked"].tolist() == [3] * N
    with torch.no_grad():
        for piece in inputs[1].split(2):  # no parameter changes within a step
            model(piece)
    assert_close(simulated.buffers["1.running_var"][1], model[1].running_var)


@pytest.mark.parametrize("name", ["mlp", "cnn with batch norm"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "in turn"])
def test_autocast_is_for_the_forward_pass_alone(name: str, stacked: bool) -> None:
    """The first steps are near those of float32; parameters, averaging and state stay float32."""
    model = make_model(name).float()
    plain, cast = (
        SimulatedModule(model, "decentlam", "ring", N, 0.05, stacked=stacked, autocast=precision)
        for precision in (None, torch.bfloat16)
    )
    for k in range(3):
        inputs, targets = batch(name, k)
        losses = [s.step(F.cross_entropy, inputs.float(), targets) for s in (plain, cast)]
        assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert cast.x.dtype == torch.float32
    assert 0 < (plain.x - cast.x).abs().max() < 0.02


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_a_module(algorithm: str) -> None:
    inputs, targets = batch("mlp", 0)
    simulated = SimulatedModule(make_model("mlp"), algorithm, "ring", N, lr=0.05, momentum=0.5)
    first = simulated.step(F.cross_entropy, inputs, targets)
    for _ in range(30):
        last = simulated.step(F.cross_entropy, inputs, targets)
    assert last.mean() < first.mean() and torch.isfinite(simulated.x).all()


def test_running_statistics_differ_between_nodes_and_count_batches() -> None:
    simulated = SimulatedModule(make_model("cnn with batch norm"), "dmsgd", "complete", N, lr=0.05)
    for k in range(3):
        simulated.step(F.cross_entropy, *batch("cnn with batch norm", k))
    assert simulated.buffers["1.num_batches_tracked"].tolist() == [3] * N
    assert simulated.buffers["1.running_mean"].shape == (N, 4)
    assert (simulated.buffers["1.running_mean"].std(0) > 0).all()


def test_batch_norm_in_evaluation_mode_stays_as_it_is() -> None:
    model = make_model("cnn with batch norm").eval()
    simulated = SimulatedModule(model, "dmsgd", "ring", N, lr=0.05)
    simulated.step(F.cross_entropy, *batch("cnn with batch norm", 0))
    assert simulated.buffers["1.num_batches_tracked"].tolist() == [0] * N
    assert not simulated.buffers["1.running_mean"].any()
    assert not simulated.node(0).training


def test_lr_of_one_step_and_of_all() -> None:
    one, two = (SimulatedModule(make_model("mlp"), "dmsgd", "ring", N, lr=0.3) for _ in range(2))
    one.step(F.cross_entropy, *batch("mlp", 0), lr=0.01)
    two.lr = 0.01
    two.step(F.cross_entropy, *batch("mlp", 0))
    assert torch.equal(one.x, two.x)
    assert (one.lr, two.lr) == (0.3, 0.01)


def test_tied_weights_count_once_and_frozen_ones_stay() -> None:
    model = make_model("tied and frozen")
    simulated = SimulatedModule(model, "decentlam", "ring", N, lr=0.05)
    assert simulated.x.shape == (N, 15 + 3 + 3)  # one weight and two biases
    simulated.step(F.cross_entropy, *batch("tied and frozen", 0))
    node = simulated.node(1)
    assert node.again.weight is node.encode.weight
    assert not node.frozen.weight.requires_grad
    assert torch.equal(node.frozen.weight, model.frozen.weight)
    assert not torch.equal(node.encode.weight, model.encode.weight)


def test_lars_scales_layers_and_leaves_biases() -> None:
    """trust 1e-9 all but stops the weights; a bias takes the plain step of its average gradient."""
    model = make_model("mlp")
    simulated = SimulatedModule(model, "pmsgd-lars", "ring", N, lr=0.1, momentum=0.0, trust=1e-9)
    plain = SimulatedModule(model, "pmsgd", "ring", N, lr=0.1, momentum=0.0)
    for nodes in (simulated, plain):
        nodes.step(F.cross_entropy, *batch("mlp", 0))
    scaled, free = simulated.node(0), plain.node(0)
    assert torch.equal(scaled[0].bias, free[0].bias)
    assert (scaled[0].weight - model[0].weight).abs().max() < 1e-8
    assert (free[0].weight - model[0].weight).abs().max() > 1e-4


def test_dropout_differs_per_node_and_follows_the_seed() -> None:
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    inputs, targets = (data[:1].expand(N, *data.shape[1:]) for data in batch("mlp", 0))

    def losses(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return SimulatedModule(model, "dsgd", "ring", N).step(F.cross_entropy, inputs, targets)

    assert len(set(losses(0).tolist())) == N
    assert torch.equal(losses(0), losses(0)) and not torch.equal(losses(0), losses(1))


def test_one_node_is_torch_sgd() -> None:
    name = "cnn with batch norm"
    model = make_model(name)
    simulated = SimulatedModule(model, "decentlam", "ring", 1, 0.05, 0.9, 0.01, nesterov=True)
    sgd = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    )
    for k in range(10):
        inputs, targets = batch(name, k, n=1)
        simulated.step(F.cross_entropy, inputs, targets)
        sgd.zero_grad()
        F.cross_entropy(model(inputs[0]), targets[0]).backward()
        sgd.step()
    for key, value in simulated.node(0).state_dict().items():
        assert_close(value, model.state_dict()[key])


def test_float32_and_no_grad_surroundings() -> None:
    model = make_model("mlp").float()
    simulated = SimulatedModule(model, "decentlam", "ring", N, lr=0.05)
    inputs, targets = batch("mlp", 0)
    with torch.no_grad():
        simulated.step(F.cross_entropy, inputs.float(), targets)
    assert simulated.x.dtype == torch.float32 and simulated.consensus_distance() > 0
