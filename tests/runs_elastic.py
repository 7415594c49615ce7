"""benchmarks/chaos.py in a process that has torch already; processes that come back twice, or are
too few to go on."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import decentlam
from decentlam.errors import ExchangeError, MinorityError, RunOverError
from decentlam.membership import generations, watch

CHAOS = Path(__file__).parents[1] / "benchmarks" / "chaos.py"


def chaos(*arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("chaos", CHAOS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos"] = module
    spec.loader.exec_module(module)
    code: int = module.main([*arguments])
    return code


def come_back(directory: Path) -> int:
    """Node 1 is killed, fails when it comes back, comes back again, and is stopped at its end."""
    run = generations.current()
    assert run is not None
    done = directory / "done"
    if run.joins:
        failed = directory / "failed"
        if not failed.exists():
            failed.touch()
            raise ExchangeError("a member died")
        done.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        return 1
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while not done.exists():
        time.sleep(0.01)
        if run.troubled:
            with contextlib.suppress(ExchangeError):
                run.renew(0, whole=True, everyone=False)
    return 0


def part_of_three(directory: str, number: signal.Signals) -> None:
    """Processes 0, which has the store, and 1 get a signal when 2 has met them; that one cannot go
    on."""
    decentlam.init(elastic=True)
    watch.use_limit(1.0)
    run = generations.current()
    assert run is not None
    met = Path(directory) / "met"
    if run.me == 2:
        met.touch()
    while True:
        time.sleep(0.01)
        if met.exists() and run.me != 2:
            os.kill(os.getpid(), number)
        if run.troubled:
            try:
                run.renew(0, whole=True, everyone=False)
            except MinorityError as error:
                print(error, flush=True)
                os._exit(3)


def outlive(directory: str) -> None:
    """Process 2 stops itself; 0, which has the store, and 1 go on without it and end. When it goes
    on it must not take the run for its own."""
    decentlam.init(elastic=True)
    watch.use_limit(1.0)
    run = generations.current()
    assert run is not None
    stopped = Path(directory) / "stopped"
    if run.me == 2:
        stopped.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    while len(run.generation.members) == 3:
        time.sleep(0.01)
        if run.troubled:
            try:
                run.renew(0, whole=True, everyone=False)
            except (MinorityError, RunOverError) as error:
                print(error, flush=True)
                os._exit(3)
    print(f"process {run.me} went on with {run.generation.members}", flush=True)
