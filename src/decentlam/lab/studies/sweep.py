"""Many training runs of one study: in parallel, each in a directory of its own, never twice."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import torch

from decentlam.lab.recipes import Recipe, from_json
from decentlam.lab.studies.study import Record, Tick, silent
from decentlam.lab.train import train
from decentlam.lab.train.records import CHECKPOINT, RUN, SCORES, read
from decentlam.lab.values import parse_json

OVER = ("finished", "diverged")  # a run that ended so is not run again


def name(recipe: Recipe) -> str:
    """Return the name of a run's directory: everything that studies vary."""
    words = [recipe.data, recipe.model, recipe.shards.replace(":", "-"), recipe.topology]
    words += [str(recipe.nodes), recipe.method, f"batch{recipe.batch}", f"lr{recipe.lr:g}"]
    return "-".join([*words, f"epochs{recipe.epochs:g}", f"seed{recipe.seed}"])


def sweep(
    recipes: Sequence[Recipe], directory: Path, tick: Tick = silent, jobs: int | None = None
) -> list[Record]:
    """Return one record per recipe, in their order, from the runs in directory/runs.

    Runs that are over are not repeated. `jobs` processes of one thread each work at a time; unless
    given, as many as torch would use threads: one per core, or OMP_NUM_THREADS. One job needs no
    other process.
    """
    places = {recipe: directory / "runs" / name(recipe) for recipe in recipes}
    if len(set(places.values())) < len(places):
        raise ValueError("two recipes of a sweep differ in something that their names do not say")
    waiting = [recipe for recipe, place in places.items() if outcome(recipe, place) is None]
    if waiting:
        jobs = min(jobs or torch.get_num_threads(), len(waiting))
        _run({r: places[r] for r in waiting}, jobs, tick, len(places))
    return [_found(recipe, places[recipe]) for recipe in recipes]


def outcome(recipe: Recipe, place: Path) -> Record | None:
    """Return the record of a run; None if it is not over, or was of another recipe."""
    try:
        info = parse_json((place / RUN).read_text(encoding="utf-8"))
        records = read(place)
        same = from_json(info["recipe"]) == recipe
    except (OSError, ValueError, KeyError, TypeError):
        return None
    end = records[-1] if records else {}
    if not same or end.get("status") not in OVER:
        return None
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    scores = evaluations[-1] if evaluations and end["status"] == "finished" else {}
    varied = ("data", "model", "shards", "topology", "nodes", "method", "batch", "lr", "epochs")
    return {
        **{field: getattr(recipe, field) for field in (*varied, "seed")},
        "status": end["status"],
        "step": end["step"],
        "steps": info["steps"],
        **{score: scores.get(score) for score in SCORES[recipe.task]},
        "seconds": end["seconds"],
        "run": place.name,
    }


def _found(recipe: Recipe, place: Path) -> Record:
    found = outcome(recipe, place)
    if found is None:
        raise ValueError(f"the run in {place} did not end; run the study again to continue it")
    return found


def _run(places: dict[Recipe, Path], jobs: int, tick: Tick, total: int) -> None:
    before = total - len(places)
    tick(before, total, f"{len(places)} runs, {jobs} at a time")
    if jobs == 1:
        for count, (recipe, place) in enumerate(places.items(), before + 1):
            train_in_place(recipe, place)
            tick(count, total, place.name)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin)
    try:
        futures = {pool.submit(train_in_place, r, place): place for r, place in places.items()}
        for count, future in enumerate(as_completed(futures), before + 1):
            future.result()
            tick(count, total, futures[future].name)
    except BrokenProcessPool:
        raise ChildProcessError(
            "a process that trained was ended from outside, perhaps for lack of memory. Runs that "
            "were over are kept: the same command continues"
        ) from None
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    """Prepare a process: one thread, Ctrl-C is left to the parent, and it ends with the parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def train_in_place(recipe: Recipe, place: Path) -> None:
    """Train in an empty directory and leave no checkpoint."""
    shutil.rmtree(place, ignore_errors=True)
    train(recipe, place, simulate=True)
    shutil.rmtree(place / CHECKPOINT, ignore_errors=True)
