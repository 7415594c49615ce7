"""Detectors by name: torchvision's RetinaNet and Faster R-CNN, on ResNet-50 or a small backbone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decentlam.lab.detection.images import LONGEST

_WIDTH, _CHANNELS = 16, 48  # of the small backbone's first layer, and of its feature pyramid
_TRAINED_LAYERS = 3  # of five, where the backbone begins with weights: as torchvision does


def retinanet(classes: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build RetinaNet on ResNet-50 with a feature pyramid, batch norm frozen (Lin et al., 2017)."""
    from torchvision.models.detection import RetinaNet
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    backbone = _resnet50(
        pretrained, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(256, 256)
    )
    return RetinaNet(backbone, classes, **_sizes(image_size))


def faster_rcnn(classes: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build Faster R-CNN on ResNet-50 with a feature pyramid, batch norm frozen (Ren et al.,
    2015)."""
    from torchvision.models.detection import FasterRCNN

    return _with_scales(FasterRCNN(_resnet50(pretrained), classes, **_sizes(image_size)))


def retinanet_small(classes: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build RetinaNet on a small backbone with group norm; anchors in proportion to the image."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.retinanet import RetinaNetHead

    # Of three sizes each, dense enough that a box of any size overlaps one by half.
    shares = ((1 / 12, 1 / 6, 1 / 4), (1 / 3.6, 1 / 2.8, 1 / 2.2), (1 / 1.8, 1 / 1.4, 1 / 1.1))
    sizes = tuple(tuple(image_size * share for share in level) for level in shares)
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    each = anchors.num_anchors_per_location()[0]
    return RetinaNet(
        _small_backbone(pretrained, first=2),
        classes,
        anchor_generator=anchors,
        head=RetinaNetHead(_CHANNELS, each, classes, norm_layer=_group_norm),
        topk_candidates=300,
        detections_per_img=100,
        **_sizes(image_size),
    )


def faster_rcnn_small(classes: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build Faster R-CNN on a small backbone with group norm, with fewer proposals than usual."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    sizes = ((image_size / 12,), (image_size / 5,), (image_size / 2.5,))
    pool = MultiScaleRoIAlign(
        ["0", "1", "2"], 5, 1, canonical_scale=round(image_size / 2.5), canonical_level=3
    )
    model = FasterRCNN(
        _small_backbone(pretrained, first=1),
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        box_roi_pool=pool,
        box_head=TwoMLPHead(_CHANNELS * 5 * 5, 128),
        box_predictor=FastRCNNPredictor(128, classes),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=200,
        rpn_post_nms_top_n_test=100,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=32,
        **_sizes(image_size),
    )
    return _with_scales(model)


DETECTORS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "retinanet": retinanet,
    "faster-rcnn": faster_rcnn,
    "retinanet-small": retinanet_small,
    "faster-rcnn-small": faster_rcnn_small,
}


def make_detector(
    name: str, classes: int, image_size: int, seed: int, weights: str | None = None
) -> nn.Module:
    """Build the detector of that name, for labels below `classes`, of which 0 is the background.

    It is initialized by `seed`, then takes what fits of the file `weights`: a detector's, or a
    ResNet-50 as torchvision publishes it; the first layers of its backbone are then frozen. In
    training it maps images and targets to losses, in evaluation images to boxes, labels and scores.
    """
    if image_size < 32:
        raise ValueError(f"a detector needs images of 32 pixels or more, got {image_size}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = DETECTORS[name](classes, image_size, weights is not None)
    if weights is not None:
        _load(model, Path(weights))
    return model


def _load(model: nn.Module, file: Path) -> None:
    """Take what the file has of the model's tensors; the backbone at least must fit whole."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}; --weights takes one that torchvision published")
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{file} is not a file of weights: {error}") from error
    given = given.get("model", given) if isinstance(given, dict) else {}
    if "conv1.weight" in given:  # a classifier: its body is the detector's backbone
        given = {f"backbone.body.{name}": value for name, value in given.items()}
    own = model.state_dict()
    fitting = {n: t for n, t in given.items() if n in own and _shape(t) == tuple(own[n].shape)}
    missing = [n for n in own if n.startswith("backbone.body.") and n not in fitting]
    if missing:
        raise ValueError(
            f"{file} does not fit this backbone: it lacks {missing[0]} and "
            f"{len(missing) - 1} more. --weights takes torchvision's ResNet-50, or one of its "
            "detectors on it"
        )
    model.load_state_dict(fitting, strict=False)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _sizes(image_size: int) -> dict[str, Any]:
    """Return bounds that leave images as they are: they come resized already."""
    return {"min_size": image_size, "max_size": int(LONGEST * image_size)}


def _with_scales(model: Any) -> nn.Module:
    """Tell a Faster R-CNN the scales of its feature maps: 1/4, 1/8, and so on.

    Torchvision guesses them from the first batch, and wrongly where padding is a large part of it;
    nodes that began with other images, or a run that was resumed, would compute something else.
    """
    from torchvision.ops.poolers import initLevelMapper

    pool = model.roi_heads.box_roi_pool
    levels = range(2, 2 + len(pool.featmap_names))
    pool.scales = [2.0**-level for level in levels]
    pool.map_levels = initLevelMapper(
        levels[0],
        levels[-1],
        canonical_scale=pool.canonical_scale,
        canonical_level=pool.canonical_level,
    )
    found: nn.Module = model
    return found


def _resnet50(pretrained: bool, **more: Any) -> nn.Module:
    """Build ResNet-50. Without weights all layers are trained, with weights the last three."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(
        backbone_name="resnet50",
        weights=None,
        trainable_layers=_TRAINED_LAYERS if pretrained else 5,
        **more,
    )


class _Block(nn.Module):
    """relu(shortcut + F(x)), F two convolutions of which the first halves the image."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(before, width, 3, 2), nn.ReLU(), *_convolution(width, width, 3, 1)
        )
        self.shortcut = nn.Sequential(*_convolution(before, width, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def _convolution(before: int, width: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(before, width, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, _group_norm(width)


def _small_backbone(pretrained: bool, first: int) -> nn.Module:
    """Build three levels of a feature pyramid, from layer `first` on; with weights the stem is
    frozen."""
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    widths = [_WIDTH, _WIDTH, 2 * _WIDTH, 4 * _WIDTH, 4 * _WIDTH]  # of the stem and the layers
    stem: nn.Module = nn.Sequential(*_convolution(3, _WIDTH, 3, 2), nn.ReLU())
    body = nn.Sequential(OrderedDict(stem=stem))  # named as ResNet's are
    for k in range(1, 5):
        body.add_module(f"layer{k}", _Block(widths[k - 1], widths[k]))
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    stem.requires_grad_(not pretrained)
    layers = {f"layer{k}": str(k - first) for k in range(first, first + 3)}
    widths = widths[first : first + 3]
    backbone = BackboneWithFPN(body, layers, widths, _CHANNELS, norm_layer=_group_norm)
    backbone.fpn.extra_blocks = None  # no coarser level: no box is that large
    return backbone


def _group_norm(channels: int) -> nn.Module:
    """Build a norm that learns with two images at a time, where batch norm does not."""
    return nn.GroupNorm(min(8, channels // 4), channels)
