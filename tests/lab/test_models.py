"""Models by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_small_images_and_gives_a_logit_per_class(name: str):
    model = make_model(name, (1, 8, 8), classes=7, seed=0)
    logits = model(torch.randn(2, 1, 8, 8))  # in training mode: batch norm sees 2 images
    assert logits.shape == (2, 7) and logits.isfinite().all()
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_images_are_seen_as_torchvision_sees_them(name: str):
    from torchvision.models import get_model

    with torch.device("meta"):
        model = MODELS[name]((3, 224, 224), 1000)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    if name in ("resnet18", "mobilenet-v2"):
        ours = make_model(name, (3, 96, 96), 5, seed=3).eval()
        torch.manual_seed(3)
        theirs = get_model(name.replace("-", "_"), num_classes=5).eval()
        x = torch.randn(1, 3, 96, 96)
        assert torch.equal(ours(x), theirs(x))


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


def test_bad_models_are_refused():
    with pytest.raises(ValueError, match="unknown model 'vgg'; choose from linear, mlp"):
        make_model("vgg", (3, 32, 32), 10, seed=0)
    with pytest.raises(ValueError, match="4 x 4 or more, got 2 x 2"):
        make_model("cnn", (3, 2, 2), 10, seed=0)
