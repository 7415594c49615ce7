"""Data held in memory: labels that fit, augmentation, batches of the test set."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from decentlam.lab.data.memory import crop_and_flip
from tests.lab.data.images import (
    in_memory,
    plain,
    random_images,
    seeded,
)


def test_augmented_images_are_padded_crops_half_of_them_mirrored():
    images = torch.from_numpy(random_images(1, 3, 8, 8)).expand(2000, -1, -1, -1)
    padded = F.pad(images[0], (4, 4, 4, 4))
    expected = {}
    for top in range(9):
        for left in range(9):
            crop = padded[:, top : top + 8, left : left + 8]
            expected[crop.numpy().tobytes()] = False
            expected[crop.flip(2).numpy().tobytes()] = True
    found = Counter(image.numpy().tobytes() for image in crop_and_flip(images, seeded(0)))
    assert len(expected) == 162 and found.keys() == expected.keys()
    mirrored = sum(count for image, count in found.items() if expected[image])
    assert abs(mirrored - 1000) < 5 * 500**0.5  # five standard deviations


def test_augmentation_is_drawn_from_the_given_generator_only():
    data, picked = in_memory(), torch.tensor([3, 3, 7])
    before = torch.get_rng_state()
    first, again, other = (data.train_batch(picked, seeded(s))[0] for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_test_batches_are_in_order_and_never_augmented():
    data = in_memory()
    parts = list(data.test_batches(4))
    assert [len(y) for _, y in parts] == [4, 4, 1]
    images = data.test_images.permute(0, 2, 3, 1).numpy()
    expected = plain(images, data.mean, data.std).float()
    torch.testing.assert_close(torch.cat([x for x, _ in parts]), expected)
