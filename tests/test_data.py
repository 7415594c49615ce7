"""Which samples come next: loaders that go on, and dealing to whoever is there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import decentlam
from decentlam.data import Deal, Place
from decentlam.elastic.membership import Change

DATA = TensorDataset(torch.arange(21))


def loader_of(**options: Any) -> decentlam.ResumableLoader:
    return decentlam.ResumableLoader(DATA, batch_size=4, **{"seed": 3, **options})


def epoch_of(loader: decentlam.ResumableLoader, batches: int | None = None) -> list[list[int]]:
    found = []
    for (batch,) in loader:
        found.append(batch.tolist())
        if len(found) == batches:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_midst_of_an_epoch(workers: int) -> None:
    """With workers too, which have asked for batches that the training has not seen."""
    whole = loader_of(num_workers=workers)
    epochs = [epoch_of(whole) for _ in range(3)]
    assert (
        sorted(i for batch in epochs[1] for i in batch) == list(range(21))
        and epochs[0] != epochs[1]
    )
    stopped = loader_of(num_workers=workers)
    assert epoch_of(stopped) == epochs[0]
    assert epoch_of(stopped, batches=2) == epochs[1][:2]
    resumed = loader_of(num_workers=workers)
    resumed.load_state_dict(stopped.state_dict())
    assert (resumed.epoch, resumed.batches) == (1, 2)
    assert epoch_of(resumed) == epochs[1][2:]
    assert epoch_of(resumed) == epochs[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_beginning_an_epoch_draws_no_random_numbers_of_the_training(workers: int) -> None:
    """Else a resumed epoch, which begins twice, would drop out other units. Seeds of workers are
    the loader's own: the same in the same epoch, others in the next."""
    before = torch.get_rng_state()
    loader, again = loader_of(num_workers=workers), loader_of(num_workers=workers)
    seeds = []
    for each in (loader, loader, again):
        epoch_of(each, batches=1)
        seeds.append(each.generator.initial_seed())
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds[0] == seeds[2] != seeds[1]


def test_an_epoch_that_was_left_early_is_over() -> None:
    loader, whole = loader_of(), loader_of()
    epochs = [epoch_of(whole) for _ in range(2)]
    epoch_of(loader, batches=1)
    assert epoch_of(loader) == epochs[1]


def test_its_length_is_the_number_of_batches_of_an_epoch() -> None:
    loader = loader_of(drop_last=True)
    assert len(loader) == len(epoch_of(loader)) == 5


def test_a_loader_built_for_another_process_is_refused() -> None:
    """As one is that was built before the process group existed."""
    loader = loader_of(sampler=DistributedSampler(DATA, num_replicas=4, rank=2))
    with pytest.raises(RuntimeError, match=r"process 2 of 4.*process 0 of 1.*decentlam.init"):
        next(iter(loader))


def parts() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    return {
        "model": model,
        "optimizer": decentlam.DecentLaM(model.parameters(), lr=0.1),
        "loader": loader_of(),
        "generator": torch.Generator().manual_seed(1),
        "own": random.Random(2),
        "python": random,
        "numpy": np.random.default_rng(3),
        "old_numpy": np.random,
    }


def draw(parts: dict[str, Any]) -> list[Any]:
    return [
        torch.rand(2, generator=parts["generator"]).tolist(),
        torch.rand(2).tolist(),
        parts["own"].random(),
        random.random(),
        parts["numpy"].random(2).tolist(),
        np.random.rand(2).tolist(),
        epoch_of(parts["loader"], batches=2),
    ]


def test_a_checkpoint_gives_back_loaders_and_random_generators(tmp_path: Path) -> None:
    saved = parts()
    draw(saved)
    decentlam.save_checkpoint(tmp_path / "run", **saved)
    expected = draw(saved)
    loaded = parts()
    decentlam.load_checkpoint(tmp_path / "run", **loaded)
    found = draw(loaded)
    assert found[:-1] == expected[:-1]
    assert found[-1] == epoch_of(loader_of())[2:4]  # the saved run went on to its next epoch


# Deal -------------------------------------------------------------------------------------------


def test_every_batch_is_dealt_once_while_members_come_and_go() -> None:
    """Node 1 of 4 is lost in step 3, when the furthest is about to take step 5; then two join."""
    deal = Deal(samples=1000, batch=2)
    history = (Change(0, 4), Change(5, 3, (1,), 4), Change(8, 5))
    taken = []
    for step in range(10):
        upto = tuple(change for change in history if change.step <= step)
        for node in range(upto[-1].size):
            if not (step in (3, 4) and node == 1):
                taken.append(deal.position(Place(step, node, upto)))
    missing = 3 * 4 + 1  # the batch of node 1 in step 3
    assert sorted(taken) == sorted({2 * k for k in range(len(taken) + 1)} - {2 * missing})


def test_a_pass_takes_every_sample_once() -> None:
    deal = Deal(samples=12, batch=3, seed=1)
    place = [Place(step, node, (Change(0, 2),)) for step in range(2) for node in range(2)]
    taken = torch.cat([deal.indices(p) for p in place])
    assert sorted(taken.tolist()) == list(range(12))


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (10, 2.5), (True, 1)])
def test_a_deal_of_nothing_is_refused(samples: object, batch: object) -> None:
    with pytest.raises(ValueError, match="must be a whole number of 1 or more"):
        Deal(samples, batch)
