"""The order of a pass over a shard in which neighbors are of one group, such as upright images."""

from __future__ import annotations

import torch
from numpy.random import Generator
from torch import Tensor


def arranged(order: Tensor, groups: Tensor, piece: int, begun: int, draw: Generator) -> Tensor:
    """The samples of `order`, each once, in runs of `piece` that are of one group.

    A node takes `piece` samples at a time from an endless stream of passes, of which this one
    begins at position `begun`. What is left over of the groups fills the rest of the piece that the
    pass before began, and the end: only those pieces are mixed.

    >>> import numpy as np
    >>> order, groups = torch.arange(7), torch.tensor([0, 1, 0, 1, 0, 1, 1])
    >>> arranged(order, groups, piece=2, begun=0, draw=np.random.default_rng(0)).tolist()
    [5, 6, 0, 2, 1, 3, 4]
    """
    pieces: list[Tensor] = []
    rest: list[Tensor] = []
    for group in groups.unique():
        for part in order[groups == group].split(piece):
            (pieces if len(part) == piece else rest).append(part)
    started = -begun % piece
    while sum(len(part) for part in rest) < started:
        rest.append(pieces.pop())
    left = torch.cat([*rest, order[:0]])
    shuffled = [pieces[k] for k in draw.permutation(len(pieces))]
    return torch.cat([left[:started], *shuffled, left[started:]])
