"""`train`: from a recipe to a run directory, on simulated nodes or on processes."""

from __future__ import annotations

import itertools
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from decentlam.errors import LaunchError
from decentlam.exchange.network import connect
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import records
from decentlam.lab.train.here import Order, Summary, train_here
from decentlam.lab.train.loop import DivergenceError
from decentlam.lab.train.stop import Stop
from decentlam.lab.values import explained
from decentlam.launch import find_place, launch
from decentlam.launch.group import init
from decentlam.membership import watch

_DIVERGED = "diverged"  # a key of the group's store, which says where and when
_runs = itertools.count()  # runs of one process group: each has its own keys


def train(
    recipe: Recipe,
    directory: Path,
    simulate: bool = False,
    resume: bool = False,
    *,
    workers: int = 0,
    quiet: bool = True,
    stop: Stop | None = None,
) -> Summary:
    """Trains as the recipe says and writes the run directory.

    `simulate` runs all nodes in this process. Otherwise each node is a process: those of the
    launcher that started this one, if there is one, else `recipe.nodes` new ones on this machine.
    `resume` continues the run in `directory` from its checkpoint. `workers` processes per node load
    the data. `stop` is looked at about once a second to see whether to end the run early.
    """
    order = Order(recipe, directory, simulate, resume, workers, quiet)
    stop = stop or Stop()
    if simulate or dist.is_initialized() or find_place() is not None:
        return _here(order, lambda: stop.requested)
    return _in_new_processes(order, stop)


def _here(order: Order, wished: Callable[[], bool]) -> Summary:
    """This process's part: all simulated nodes, or one node of the group that it is in."""
    if order.simulate:
        with torch.random.fork_rng(devices=[]):  # dropout is seeded by the recipe
            try:
                return train_here(order, wished)
            except DivergenceError as diverged:
                return _diverged(order, diverged, write=True)
    init()
    network = connect()
    if network.num_processes != order.recipe.nodes:
        raise ValueError(
            f"the recipe has {order.recipe.nodes} nodes, but {network.num_processes} processes "
            f"were started; pass --nodes {network.num_processes}, or start as many"
        )
    store = dist.PrefixStore(
        f"decentlam train {next(_runs)}", dist.distributed_c10d._get_default_store()
    )
    try:
        return train_here(order, wished)
    except DivergenceError as diverged:
        store.set(_DIVERGED, json.dumps(diverged.args))
        found = diverged
    except RuntimeError:  # without a node that diverged and left, its neighbors cannot go on
        if not store.check([_DIVERGED]):
            raise
        found = DivergenceError(*json.loads(store.get(_DIVERGED)))
    summary = _diverged(order, found, write=network.rank == 0)
    # Closes connections, and so releases whoever waits for this node.
    watch.destroy_group(alone=True)
    return summary


def _in_new_processes(order: Order, stop: Stop) -> Summary:
    """One per node on this machine. A file asks them to stop: they look about once a second."""
    records.check(order.directory, order.recipe, order.simulate, order.resume)
    backend = "nccl" if torch.cuda.device_count() >= order.recipe.nodes else "gloo"
    with tempfile.TemporaryDirectory() as directory:
        asked = Path(directory) / "stop"
        stop.forward = asked.touch
        try:
            summary: Summary = launch(_node, order.recipe.nodes, (order, asked), backend)[0]
            return summary
        except LaunchError as error:
            if stop.requested and "killed by SIGTERM" in str(error):  # it had not begun to train
                raise KeyboardInterrupt from None
            if isinstance(error.__cause__, ValueError | OSError):  # the user's to mend, in one line
                raise ValueError(str(error.__cause__)) from None
            if (text := explained(error.__cause__)) is not None:
                raise LaunchError(f"{str(error).split(' failed:')[0]}: {text}") from None
            raise
        finally:
            stop.forward = None


def _node(order: Order, asked: Path) -> Summary:
    # timeout, SLURM and containers send it to all processes, not only to the one that waits.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.touch())
    return _here(order, asked.exists)


def _diverged(order: Order, diverged: DivergenceError, write: bool) -> Summary:
    if write:
        records.finish(order.directory, "diverged", diverged.step, diverged.seconds)
    evaluations = [r for r in records.read(order.directory) if r["kind"] == "evaluation"]
    return Summary(
        "diverged",
        str(order.directory),
        diverged.step,
        json.loads((order.directory / records.RUN).read_text(encoding="utf-8"))["steps"],
        diverged.seconds,
        evaluations[-1] if evaluations else None,
        diverged.message,
    )
