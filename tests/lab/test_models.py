"""Models by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decentlam
from decentlam.lab.models import MODELS, Block, make_model

OURS = ["linear", "mlp", "cnn", "resnet20"]


# Torchvision's own count, published with the weights of each model.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "mobilenet-v2": 3_504_872,
    "efficientnet-b0": 5_288_548,
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32)])
def test_every_model_takes_small_images_and_gives_a_logit_per_class(name: str, shape):
    model = make_model(name, shape, classes=7, seed=0)
    logits = model(torch.randn(2, *shape))  # in training mode: batch norm sees 2 images
    assert logits.shape == (2, 7) and logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvision_models_have_their_published_size_on_imagenet(name: str):
    assert count(make_model(name, (3, 224, 224), 1000, seed=0)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["resnet50", "mobilenet-v2", "efficientnet-b0"])
def test_large_images_are_seen_as_torchvision_sees_them(name: str):
    from torchvision.models import get_model

    ours = make_model(name, (3, 96, 96), 5, seed=3).eval()
    torch.manual_seed(3)
    theirs = get_model(name.replace("-", "_"), num_classes=5).eval()
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_images_may_be_grey(name: str):
    with torch.no_grad():
        assert make_model(name, (1, 96, 80), 5, seed=0).eval()(torch.randn(1, 1, 96, 80)).any()


def test_torchvision_resnets_start_as_on_cifar_when_images_are_small():
    small = make_model("resnet18", (3, 64, 64), 10, seed=0)
    assert (small.conv1.kernel_size, small.conv1.stride) == ((3, 3), (1, 1))
    # 3 x 3 instead of 7 x 7, and 10 classes instead of 1,000.
    assert count(small) == PUBLISHED["resnet18"] - 3 * 64 * (49 - 9) - 513 * 990
    features = nn.Sequential(small.conv1, small.bn1, small.relu, small.maxpool, small.layer1)
    assert features(torch.randn(2, 3, 32, 32)).shape == (2, 64, 32, 32)
    large = make_model("resnet18", (3, 65, 65), 10, seed=0)
    assert large.conv1.kernel_size == (7, 7)


def test_small_models_have_the_sizes_worked_out_by_hand():
    assert count(make_model("linear", (1, 28, 28), 10, 0)) == 785 * 10
    assert count(make_model("mlp", (1, 28, 28), 10, 0)) == 785 * 128 + 129 * 128 + 129 * 10
    convolutions = 9 * (1 * 16 + 16 * 32) + 2 * (16 + 32)  # batch norm: a weight and a bias each
    assert count(make_model("cnn", (1, 28, 28), 10, 0)) == convolutions + (32 * 49 + 1) * 10


def test_resnet20_has_20_layers_and_270_thousand_parameters():
    model = make_model("resnet20", (3, 32, 32), 10, 0)
    assert count(model) == 269_722
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
    features = model[:-3](torch.randn(2, 3, 32, 32))
    assert features.shape == (2, 64, 8, 8)


def test_a_block_whose_convolutions_are_zero_is_its_shortcut():
    x = torch.rand(2, 3, 6, 6)
    for width in (3, 5):
        block = Block(3, width)
        nn.init.zeros_(block.residual[-1].weight)  # the last batch norm
        y = block(x)
        if width == 3:
            assert torch.equal(y, x)
        else:
            assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
            assert y.shape == (2, 5, 3, 3) and not y[:, 3:].any()


@pytest.mark.parametrize("name", OURS)
def test_equal_seeds_give_equal_models_and_the_global_generator_is_left_alone(name: str):
    before = torch.get_rng_state()
    first, again, other = (make_model(name, (3, 8, 8), 4, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (first, again, other)]
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])


@pytest.mark.parametrize("name", OURS)
def test_two_simulated_nodes_equal_one_module_that_sees_both_batches(name: str):
    """PmSGD on two nodes against torch.optim.SGD on the mean of the two losses."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 1, 8, 8, dtype=torch.float64), torch.randint(3, (2, 6))
    model = make_model(name, (1, 8, 8), 3, seed=0).double()
    nodes = decentlam.SimulatedModule(model, "pmsgd", "complete", 2, lr=0.1, momentum=0.9)
    twin = make_model(name, (1, 8, 8), 3, seed=0).double()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        losses = nodes.step(F.cross_entropy, x, y)
        separate = [F.cross_entropy(twin(x[i]), y[i]) for i in range(2)]
        optimizer.zero_grad()
        (sum(separate) / 2).backward()
        optimizer.step()
        assert losses.tolist() == pytest.approx([loss.item() for loss in separate], rel=1e-9)
    flat = nn.utils.parameters_to_vector(twin.parameters())
    torch.testing.assert_close(nodes.x[0], flat, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vgg", (3, 32, 32), 10), "unknown model 'vgg'; choose from linear, mlp"),
        (("mlp", (32, 32), 10), r"\(channels, height, width\)"),
        (("mlp", (3, 32, 0), 10), r"\(channels, height, width\)"),
        (("mlp", (3, 32, 32), 0), "1 class or more"),
        (("cnn", (3, 2, 2), 10), "4 x 4 or more, got 2 x 2"),
    ],
)
def test_bad_models_are_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        make_model(*arguments, seed=0)
