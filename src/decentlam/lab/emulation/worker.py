"""The process that `run_on` starts on a host: joins the group, runs the function, reports."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from decentlam.launch.reports import Failure

_GROUP_TIMEOUT = timedelta(seconds=120)


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Connection(descriptor)
    work = pipe.recv_bytes()
    may_leave = threading.Event()
    threading.Thread(target=_watch, args=(pipe, may_leave), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=_GROUP_TIMEOUT)
        fn, args = pickle.loads(work)
        report = pickle.dumps((fn(*args),))
    except BaseException:
        failure = Failure(time.monotonic(), rank, f"failed:\n{traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(failure))
        os._exit(1)  # peers see the closed connections at once instead of waiting
    pipe.send_bytes(report)
    may_leave.wait()  # until nobody can be waiting for something this host sent
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Building DDP imports torch._dynamo and so triton, whose bindings complain of leaks when the
    # interpreter is taken apart.
    os._exit(0)


def _watch(pipe: Connection, may_leave: threading.Event) -> None:
    """Ends this process when the one that started it is gone."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    may_leave.set()


if __name__ == "__main__":
    main(int(sys.argv[1]))
