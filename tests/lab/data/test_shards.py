"""How the training set is split among the nodes."""

from __future__ import annotations

import pytest
import torch

from decentlam.lab.data import split


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


HOWS = ["iid", "label-sorted", "label-sorted:1", "label-sorted:3", "dirichlet:0.01", "dirichlet:10"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("count", "nodes"), [(48, 1), (48, 16), (101, 7)])
def test_every_sample_is_in_exactly_one_shard(count: int, nodes: int, how: str):
    for seed in range(5):
        labels = torch.randint(10, (count,), generator=seeded(seed))
        shards = split(labels, nodes, how, seed)
        assert len(shards) == nodes and all(len(shard) for shard in shards)
        assert torch.equal(torch.cat(shards).sort().values, torch.arange(count))
        if not how.startswith("dirichlet"):
            sizes = [len(shard) for shard in shards]
            assert max(sizes) - min(sizes) <= 1
        again = split(labels, nodes, how, seed)
        assert all(torch.equal(a, b) for a, b in zip(shards, again, strict=True))
        if nodes > 1:
            other = split(labels, nodes, how, seed + 100)
            assert any(not torch.equal(a, b) for a, b in zip(shards, other, strict=True))


@pytest.mark.parametrize(("how", "pieces"), [("label-sorted", 2), ("label-sorted:5", 5)])
def test_label_sorted_nodes_hold_few_runs_of_the_sorted_labels(how: str, pieces: int):
    """A run of `size` among classes of 100 each touches 2 + (size - 2) // 100 of them at most."""
    labels = torch.arange(1000) // 100
    for seed in range(5):
        shards = split(labels, 4, how, seed)
        assert [len(shard) for shard in shards] == [250] * 4
        size = 250 // pieces
        bound = pieces * (2 + (size - 2) // 100)
        assert all(len(labels[shard].unique()) <= min(10, bound) for shard in shards)


def test_a_small_alpha_separates_classes_and_a_large_one_mixes_them():
    labels = torch.arange(10_000) % 10

    def largest_share(how: str) -> float:
        """Of a class, on the node that has most of it; the mean over classes."""
        counts = torch.stack([labels[s].bincount(minlength=10) for s in split(labels, 8, how, 0)])
        return (counts.max(0).values / 1000).mean().item()

    assert largest_share("dirichlet:0.01") > 0.9
    assert 0.3 < largest_share("dirichlet:0.5") < 0.7
    assert largest_share("dirichlet:10000") == pytest.approx(1 / 8, abs=0.01)


def test_nodes_that_drew_nothing_are_given_a_sample_each():
    labels = torch.zeros(20, dtype=torch.int64)
    sizes = [len(shard) for shard in split(labels, 16, "dirichlet:0.001", seed=0)]
    assert sum(sizes) == 20 and min(sizes) == 1


@pytest.mark.parametrize(
    "how", ["sorted", "iid:2", "label-sorted:0", "label-sorted:1.5", "dirichlet", "dirichlet:nan"]
)
def test_unknown_ways_to_shard_are_refused(how: str):
    with pytest.raises(ValueError, match=f"unknown way to shard '{how}'; choose from iid, label-"):
        split(torch.arange(100), 4, how, seed=0)


def test_impossible_splits_are_refused():
    with pytest.raises(
        ValueError, match=r"10 samples .* into 12 pieces \(label-sorted:3 on 4 nodes"
    ):
        split(torch.arange(10), 4, "label-sorted:3", seed=0)
