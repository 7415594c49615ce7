"""A sweep loses no run and repeats none."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab.recipes import Recipe
from decentlam.lab.studies.sweep import name, outcome, sweep

TINY = Recipe(nodes=4, batch=64, epochs=0.2, evaluate_every=0.2, stable="ignore")


class Ticks(list[tuple[int, int, str]]):
    def __call__(self, done: int, total: int, what: str) -> None:
        self.append((done, total, what))


def stamp(directory: Path) -> list[int]:
    return [file.stat().st_mtime_ns for file in sorted(directory.glob("runs/*/records.jsonl"))]


def test_a_sweep_says_how_many_and_repeats_only_what_is_not_over_or_was_another_run(tmp_path: Path):
    recipes = [replace(TINY, method=method) for method in ("dmsgd", "decentlam")]
    ticks = Ticks()
    found = sweep(recipes, tmp_path, ticks, jobs=1)
    assert [r["method"] for r in found] == ["dmsgd", "decentlam"]
    assert ticks[0] == (0, 2, "2 runs, 1 at a time")
    assert ticks[-1][:2] == (2, 2)
    assert not list(tmp_path.glob("runs/*/checkpoint"))
    before = stamp(tmp_path)
    assert sweep(recipes, tmp_path, jobs=1) == found
    assert stamp(tmp_path) == before
    # The same names, but another momentum: these runs are not those.
    others = [replace(recipe, momentum=0.5) for recipe in recipes]
    changed = sweep(others, tmp_path, jobs=1)
    assert all(new > old for new, old in zip(stamp(tmp_path), before, strict=True))
    assert [r["averaged_top1"] for r in changed] != [r["averaged_top1"] for r in found]
    with pytest.raises(ValueError, match="names do not say"):
        sweep([TINY, replace(TINY, momentum=0.5)], tmp_path, jobs=1)


def test_a_run_that_was_cut_off_is_started_anew(tmp_path: Path):
    (whole,) = sweep([TINY], tmp_path, jobs=1)
    (tmp_path / "runs" / name(TINY) / "records.jsonl").write_text('{"kind": "st')
    assert outcome(TINY, tmp_path / "runs" / name(TINY)) is None
    assert sweep([TINY], tmp_path, jobs=1)[0] | {"seconds": 0} == whole | {"seconds": 0}


@pytest.mark.system
@pytest.mark.parametrize("what", ["killed", pytest.param("interrupted", marks=pytest.mark.slow)])
def test_processes_that_die_or_are_stopped_end_the_sweep_and_the_next_finishes(
    tmp_path: Path, what: str
):
    recipes = [replace(TINY, seed=seed) for seed in range(3)]

    def strike(done: int, total: int, doing: str) -> None:
        if done == 1 and what == "killed":
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        elif done == 1:
            raise KeyboardInterrupt

    expected = ChildProcessError if what == "killed" else KeyboardInterrupt
    with pytest.raises(expected, match="the same command continues" if what == "killed" else None):
        sweep(recipes, tmp_path, strike, jobs=2)
    assert not multiprocessing.active_children()
    found = sweep(recipes, tmp_path, jobs=1)
    assert [r["status"] for r in found] == ["finished"] * 3
