"""`train`: from a recipe to a run directory, on simulated nodes or on processes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist

from decentlam.exchange.network import connect
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import records
from decentlam.lab.train.here import Order, Summary, train_here
from decentlam.lab.train.loop import DivergenceError
from decentlam.lab.train.stop import Stop
from decentlam.launch import find_place, init, launch
from decentlam.launch.place import LOOPBACK

_STOP, _DIVERGED, _REFUSED = "stop", "diverged", "refused"
_runs = itertools.count()  # runs of one process group: each has its own notes in the store


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
    if simulate:
        return _simulated(order, stop)
    if dist.is_initialized() or find_place() is not None:
        return _joined(order, stop)
    return _launched(order, stop)


def _simulated(order: Order, stop: Stop) -> Summary:
    with torch.random.fork_rng(devices=[]):  # dropout is seeded by the recipe
        try:
            return train_here(order, lambda: stop.requested)
        except DivergenceError as diverged:
            return _diverged(order, diverged, write=True)


def _joined(order: Order, stop: Stop) -> Summary:
    """As one of the processes that a launcher, or the caller, has started."""
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
        return train_here(order, lambda: stop.requested)
    except DivergenceError as diverged:
        store.set(_DIVERGED, json.dumps(diverged.args))
        found = diverged
    except RuntimeError:  # without a node that diverged and left, its neighbors cannot go on
        if not store.check([_DIVERGED]):
            raise
        found = DivergenceError(*json.loads(store.get(_DIVERGED)))
    summary = _diverged(order, found, write=network.rank == 0)
    dist.destroy_process_group()  # closes connections, and so releases whoever waits for this node
    return summary


def _launched(order: Order, stop: Stop) -> Summary:
    """In new processes on this machine, which this one watches over."""
    records.check(order.directory, order.recipe, order.simulate, order.resume)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    stop.forward = lambda: store.set(_STOP, "1")
    backend = "nccl" if torch.cuda.device_count() >= order.recipe.nodes else "gloo"
    try:
        summary: Summary = launch(_node, order.recipe.nodes, (order, store.port), backend)[0]
        return summary
    except RuntimeError:
        if store.check([_DIVERGED]):
            found = DivergenceError(*json.loads(store.get(_DIVERGED)))
            return _diverged(order, found, write=True)
        if store.check([_REFUSED]):
            raise ValueError(store.get(_REFUSED).decode()) from None
        raise
    finally:
        stop.forward = None


def _node(order: Order, port: int) -> Summary:
    """The life of one of those processes. What goes wrong is noted in the parent's store first:
    when a process fails, the parent ends all others."""
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    looks = dist.get_rank() == 0
    try:
        return train_here(order, lambda: looks and store.check([_STOP]))
    except DivergenceError as diverged:
        store.set(_DIVERGED, json.dumps(diverged.args))
        raise
    except (ValueError, OSError) as error:
        store.set(_REFUSED, str(error))
        raise


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
