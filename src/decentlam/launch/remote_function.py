"""A function on its way to other processes, and what each of them does with it."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any


@dataclass(frozen=True, order=True)
class Failure:
    """A failure in a process; the earliest one is the cause of the others."""

    at: float  # on the clock that all processes of a machine share
    rank: int
    text: str
    error: BaseException | None = field(default=None, compare=False)  # None: could not be copied


class _Pickler(pickle.Pickler):
    """Notes what is looked up in `__main__` by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_main: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            self.of_main.append(obj)
        return NotImplemented


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments, by value; refused if other processes cannot import it.

    Handed to multiprocessing as they are, tensors would be shared memory.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump((fn, args))
    except Exception as error:
        raise ValueError(
            f"launch cannot hand {fn!r} and its arguments to other processes: {error}. Use a "
            "function defined at the top level of a module (no lambda, nothing nested) and "
            "arguments that pickle can copy."
        ) from error
    if pickler.of_main and not main_is_a_file():
        names = ", ".join(dict.fromkeys(each.__qualname__ for each in pickler.of_main))
        raise ValueError(
            f"other processes cannot import {names}: defined in a notebook, at a prompt, in "
            "`python -c`, on standard input or in a package's __main__. Write the definitions to a "
            "file, such as work.py (in a notebook: %%writefile work.py), and import them from "
            "there; or make it a script and run `torchrun --nproc-per-node 4 work.py`."
        )
    return file.getvalue()


def main_is_a_file() -> bool:
    """Return True if multiprocessing imports `__main__` in a new process, and can."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name.rpartition(".")[2] != "__main__"
    return os.path.isfile(getattr(main, "__file__", None) or "")


def run_in_process(
    pipe: Connection,
    work: bytes,
    environment: Mapping[str, str],
    backend: str,
    timeout_seconds: float,
    elastic: bool,
) -> None:
    """Joins the group and sends what the function returns, or a Failure, through the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # being stopped must not lose output
    may_leave = threading.Event()
    threading.Thread(target=_watch, args=(pipe, may_leave), daemon=True).start()
    os.environ.update(environment)
    try:
        import torch

        from decentlam.launch.init import init, leave

        if "OMP_NUM_THREADS" not in os.environ:
            share = (os.cpu_count() or 1) // int(environment["WORLD_SIZE"])
            torch.set_num_threads(max(1, share))
        init(backend, timeout_seconds, elastic=elastic)
        fn, args = pickle.loads(work)
        report = pickle.dumps((fn(*args),))
    except BaseException as error:
        text = f"failed:\n{traceback.format_exc()}"
        failure = Failure(time.monotonic(), int(environment["RANK"]), text, _copied(error))
        pipe.send_bytes(pickle.dumps(failure))
        os._exit(1)  # peers see the closed connections at once instead of waiting
    pipe.send_bytes(report)
    may_leave.wait()  # until nobody can be waiting for something this process sent
    leave()


def _watch(pipe: Connection, may_leave: threading.Event) -> None:
    """Ends this process when the one that started it is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    may_leave.set()


def _copied(error: BaseException) -> BaseException | None:
    """The exception if its copy can be made where it is received; not every one can."""
    with suppress(Exception):
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    return None
