"""Batches of annotated images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decentlam.lab.detection import load_boxes
from tests.lab.detection.boxes import annotation, draw_shapes, write_image, write_voc


def test_images_are_resized_and_flipped_with_their_boxes(tmp_path: Path):
    data = load_boxes("voc", draw_shapes(tmp_path, train=10, test=2), 24)  # half of 64 x 48
    seen = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        images, targets, _ = data.train_batch(torch.tensor([0, 4]), generator)
        assert [tuple(image.shape) for image in images] == [(3, 24, 32), (3, 32, 24)]
        for at, image, target in zip((0, 4), images, targets, strict=True):
            whole = data.pixels(data.train[at]).float() / 255
            boxes = data.train[at].boxes / 2
            mirrored = not torch.equal(image, whole)
            if mirrored:
                assert torch.equal(image, whole.flip(2))
                width = whole.shape[2]
                boxes = np.stack(
                    [width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1
                )
            assert np.allclose(target["boxes"].numpy(), boxes)
            seen.add((at, mirrored))
    assert len(seen) == 4


def test_long_images_are_bounded_and_small_ones_grow(tmp_path: Path):
    year = write_voc(tmp_path)
    write_image(year / "JPEGImages" / "b.jpg", (200, 50))
    (year / "Annotations" / "b.xml").write_text(annotation((200, 50), []))
    data = load_boxes("voc", tmp_path, 60)
    assert [tuple(data.pixels(image).shape) for image in data.train] == [(3, 60, 75), (3, 25, 100)]


def test_test_batches_are_all_images_once_in_order(tmp_path: Path):
    data = load_boxes("voc", draw_shapes(tmp_path, train=2, test=21), 32)
    tested = [one for batch in data.test_batches() for one in batch]
    assert [k for k, _, _ in tested] == list(range(21))
    for k, image, scale in tested:
        assert image.shape[2] == pytest.approx(scale[0] * data.test[k].width)
