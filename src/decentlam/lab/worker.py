"""The life of a process that trains for a sweep."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from decentlam.lab.recipes import Recipe
from decentlam.lab.train import Stop, train
from decentlam.lab.train.records import CHECKPOINT, read_recipe

_stop = Stop()  # of all runs of this process


def begin(parent_end: Connection) -> None:
    """One thread, deaf to Ctrl-C: the parent hears it, and asks for a stop by closing its end of
    this connection. An Event would do, but `set` waits for ever for a waiter that was killed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent_end,), daemon=True).start()


def run(recipe: Recipe, place: Path) -> None:
    """Trains in `place`, or continues the run found there if it is the same one."""
    try:
        resume = (place / CHECKPOINT).exists() and read_recipe(place) == (recipe, True)
    except ValueError:
        resume = False
    if not resume:
        shutil.rmtree(place, ignore_errors=True)
    summary = train(recipe, place, simulate=True, resume=resume, stop=_stop)
    if summary.status != "interrupted":
        shutil.rmtree(place / CHECKPOINT, ignore_errors=True)


def _watch(parent_end: Connection) -> None:
    """Stops after a step when asked to, and at once when the parent was killed."""
    wait([parent_end])
    _stop.requested = True
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
