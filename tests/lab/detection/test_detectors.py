"""Detectors by name, and weights to start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision.models import resnet50
from torchvision.ops import FrozenBatchNorm2d

from decentlam.lab.detection.detectors import make_detector


def test_weights_are_taken_and_the_first_layers_frozen(tmp_path: Path):
    classifier = resnet50(weights=None)
    torch.save(classifier.state_dict(), tmp_path / "resnet50.pth")
    model = make_detector("retinanet", 3, 64, seed=0, weights=str(tmp_path / "resnet50.pth"))
    body = model.backbone.body
    assert torch.equal(body.layer4[2].conv3.weight, classifier.layer4[2].conv3.weight)
    assert isinstance(body.bn1, FrozenBatchNorm2d)
    trained = {name.split(".")[0]: p.requires_grad for name, p in body.named_parameters()}
    assert trained == {"conv1": False, "layer1": False} | dict.fromkeys(
        ("layer2", "layer3", "layer4"), True
    )
    torch.save(model.state_dict(), tmp_path / "detector.pth")
    other = make_detector("retinanet", 21, 64, seed=1, weights=str(tmp_path / "detector.pth"))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=False)]
    assert sum(same) > 0.9 * len(same)  # all but the layers whose size the classes decide


def test_weights_that_do_not_fit_are_refused(tmp_path: Path):
    (tmp_path / "text.pth").write_text("?")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    for name, words in (
        ("none.pth", "there is no file"),
        ("text.pth", "is not a file of weights"),
        ("other.pth", "does not fit this backbone: it lacks backbone.body."),
    ):
        with pytest.raises(ValueError, match=words):
            make_detector("retinanet-small", 3, 64, seed=0, weights=str(tmp_path / name))
