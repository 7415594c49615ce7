"""How the training set is split among the nodes: at random, by label, or by a Dirichlet draw."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

_SHARDS = 1  # a stream of random numbers apart from those of the batches
ALLOWED = "iid, label-sorted:K with 1, 2 ... pieces per node, dirichlet:ALPHA from 0.001 to 1e6"
Parts = list[np.ndarray]


def split(labels: Tensor, nodes: int, how: str, seed: int) -> list[Tensor]:
    """Split range(len(labels)) by a seed: for each node its indices, ascending.

    - `iid`: at random; sizes differ by 1 at most.
    - `label-sorted:K`: sorted by label (in random order within a label) and cut into nodes * K
      pieces, of which every node gets K at random; sizes of pieces and of shards differ by 1 at
      most. `label-sorted` is K = 2.
    - `dirichlet:ALPHA`: each class is divided among the nodes in proportions drawn from a symmetric
      Dirichlet distribution; the smaller ALPHA, the fewer classes a node sees, and the less equal
      the sizes. A node left with nothing is given one sample of the node that has most.

    >>> [len(shard) for shard in split(torch.arange(10), 4, "iid", seed=0)]
    [3, 3, 2, 2]
    """
    scheme, value = _parse(how)
    pieces = nodes * int(value) if scheme == "label-sorted" else nodes
    if len(labels) < pieces:
        raise ValueError(
            f"{len(labels)} samples cannot be split into {pieces} pieces ({how} on {nodes} nodes); "
            "try fewer nodes"
        )
    draw = np.random.default_rng([_SHARDS, seed])
    order = draw.permutation(len(labels))
    if scheme == "iid":
        parts = np.array_split(order, nodes)
    else:
        order = order[np.argsort(labels.numpy()[order], kind="stable")]
        if scheme == "label-sorted":
            parts = _split_pieces(order, nodes, int(value), draw)
        else:
            parts = _split_classes(order, labels.numpy(), nodes, value, draw)
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _parse(how: str) -> tuple[str, float]:
    """Return the scheme, and its number: K or alpha."""
    scheme, colon, text = how.partition(":")
    if scheme == "iid" and not colon:
        return scheme, 0
    if scheme == "label-sorted" and (not colon or (text.isdecimal() and int(text) > 0)):
        return scheme, int(text) if colon else 2
    with suppress(ValueError):
        # Beyond these bounds draws are all-or-nothing, or equal.
        if scheme == "dirichlet" and 0.001 <= float(text) <= 1e6:
            return scheme, float(text)
    raise ValueError(f"unknown way to shard {how!r}; choose from {ALLOWED}")


def _split_pieces(order: np.ndarray, nodes: int, per_node: int, draw: Generator) -> Parts:
    owner = draw.permutation(nodes * per_node) % nodes  # of each piece
    sizes = np.empty(len(owner), dtype=int)
    for node in range(nodes):
        # Sizes follow from whom a piece goes to, so that no node collects the longer ones.
        share = len(order) // nodes + (node < len(order) % nodes)
        sizes[owner == node] = [len(part) for part in np.array_split(range(share), per_node)]
    pieces = np.split(order, np.cumsum(sizes)[:-1])
    return [
        np.concatenate([piece for piece, whose in zip(pieces, owner, strict=True) if whose == node])
        for node in range(nodes)
    ]


def _split_classes(
    order: np.ndarray, labels: np.ndarray, nodes: int, alpha: float, draw: Generator
) -> Parts:
    _, counts = np.unique(labels, return_counts=True)
    shares: list[Parts] = [[] for _ in range(nodes)]
    for first, last in pairwise(np.concatenate([[0], np.cumsum(counts)])):
        proportions = draw.dirichlet(np.full(nodes, alpha))
        cuts = np.rint(np.cumsum(proportions)[:-1] * (last - first)).astype(int)
        for share, piece in zip(shares, np.split(order[first:last], cuts), strict=True):
            share.append(piece)
    parts = [np.concatenate(share) for share in shares]
    for node in range(nodes):
        if not len(parts[node]):
            largest = max(range(nodes), key=lambda other: len(parts[other]))
            taken = draw.integers(len(parts[largest]))
            parts[node] = parts[largest][taken : taken + 1]
            parts[largest] = np.delete(parts[largest], taken)
    return parts
