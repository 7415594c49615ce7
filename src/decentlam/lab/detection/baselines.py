"""What a detector is compared with: one that never looks, and predicts the commonest boxes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchvision.ops import box_iou

from decentlam.lab.detection.annotations import AnnotatedImage
from decentlam.lab.detection.scores import Detections

MOST = 100  # detections per image, as many as COCO's scores look at
_OVERLAP = 0.5
_CANDIDATES = 3000  # boxes of a class that are compared with each other

Common = tuple[float, int, np.ndarray]  # how often, label, box from 0 to 1


def commonest_boxes(
    train: Sequence[AnnotatedImage], test: Sequence[AnnotatedImage], seed: int = 0
) -> list[Detections]:
    """Return the same boxes in every test image: those that overlap most boxes of the training set.

    For each class the box that overlaps most others by 1/2 or more is taken, those are struck out,
    and so on. Its score is the share of the training images it was taken for. Places are relative
    to the image's sides.
    """
    common = sorted(_common(train, seed), key=lambda one: -one[0])[:MOST]
    return [
        (
            at,
            [
                [*(box * np.tile([im.width, im.height], 2)), label, share]
                for share, label, box in common
            ],
        )
        for at, im in enumerate(test)
    ]


def _common(train: Sequence[AnnotatedImage], seed: int) -> list[Common]:
    relative = np.concatenate(
        [image.boxes / np.array(2 * [image.width, image.height]) for image in train]
    )
    labels = np.concatenate([image.labels for image in train])
    draw = np.random.default_rng(seed)
    common: list[Common] = []
    for label in np.unique(labels):
        boxes = relative[labels == label]
        share = len(boxes) / len(train)
        if len(boxes) > _CANDIDATES:
            boxes = boxes[draw.choice(len(boxes), _CANDIDATES, replace=False)]
        near = box_iou(*2 * [torch.from_numpy(boxes)]).numpy() >= _OVERLAP
        for _ in range(MOST):
            counts = near.sum(1)
            best = int(counts.argmax())
            if not counts[best]:
                break
            common.append((share * counts[best] / len(boxes), int(label), boxes[best]))
            struck = near[best].copy()
            near[struck] = False
            near[:, struck] = False
    return common
