"""Which samples a node takes at a step."""

from __future__ import annotations

import pytest
import torch

from decentlam.lab.data import Batches, split


@pytest.mark.parametrize("batch", [3, 50])
def test_each_pass_takes_every_sample_of_a_shard_once(batch: int):
    shards = [torch.arange(0, 20), torch.arange(20, 33), torch.arange(33, 34)]
    batches = Batches(shards, batch, seed=5)
    for node, shard in enumerate(shards):
        taken = [batches.indices(step, node) for step in range(60)]
        assert all(len(part) == batch for part in taken)
        passes = torch.cat(taken).split(len(shard))
        whole = [part.sort().values for part in passes if len(part) == len(shard)]
        assert all(torch.equal(part, shard) for part in whole)
        if len(shard) > 5 and len(whole) > 1:
            assert not torch.equal(passes[0], passes[1])


def test_any_step_can_be_asked_for_in_any_order():
    shards = split(torch.arange(100) % 10, 4, "iid", seed=0)
    onward = Batches(shards, 8, seed=1)
    expected = {(k, i): onward.indices(k, i) for k in range(20) for i in range(4)}
    backward = Batches(shards, 8, seed=1)
    for (k, i), indices in reversed(expected.items()):
        assert torch.equal(backward.indices(k, i), indices)
        assert onward.generator(k, i).initial_seed() == backward.generator(k, i).initial_seed()
