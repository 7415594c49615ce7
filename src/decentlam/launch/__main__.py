"""`python -m decentlam.launch -n 8 script.py`: torchrun for one machine, with fewer words."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from decentlam.launch.place import LAUNCHED, LOOPBACK

_SCRIPT = Path(__file__).with_name("script.py")  # what each process runs: it runs the user's
_ECHO_SECONDS = 5  # after a failure its neighbors fail; torchrun ends the rest after 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decentlam.launch", description=__doc__)
    parser.add_argument("-n", "--nodes", type=int, required=True, help="how many processes")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="passed on to the script")
    options = parser.parse_args(arguments)
    if options.nodes < 1:
        parser.error(f"--nodes must be 1 or more, got {options.nodes}")
    if not options.module and not Path(options.script).is_file():
        parser.error(f"there is no script {options.script!r}")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from decentlam.membership.spare import open_store

    os.environ[LAUNCHED] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.nodes)))
    kind = "module" if options.module else "file"
    store = open_store(LOOPBACK)  # torchrun's own would listen on all interfaces; it takes this one
    ours = ["--master-addr", LOOPBACK, "--master-port", str(store.port)]
    ours += ["--local-addr", LOOPBACK, "--nproc-per-node", str(options.nodes)]
    command = [sys.executable, str(_SCRIPT), str(os.getpid()), kind, options.script, *options.args]
    with tempfile.TemporaryDirectory(prefix="decentlam-") as reports:  # of processes that fail
        try:
            run.run(run.parse_args([*ours, "--log-dir", reports, "--no-python", *command]))
        except ChildFailedError as error:
            return _explain(error.failures, options.nodes)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
    return 0


def _explain(failures: dict[int, Any], nodes: int) -> int:
    """Repeats the error of the process that failed first; returns its exit code, as shells do.

    torchrun knows times to the second, and neighbors of a process that failed do so within
    milliseconds: `script.py` writes exact ones. Who died without writing is the cause, except for
    those that torchrun stopped, at once or when it lost patience.
    """
    begun = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        stopped = failure.exitcode == -signal.SIGTERM or failure.timestamp > begun + _ECHO_SECONDS
        return stopped, failure.error_file_data.get("at", 0.0)

    rank = min(failures, key=order)
    code, report = failures[rank].exitcode, failures[rank].error_file_data
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    print(f"decentlam.launch: process {rank} of {nodes} {how}; all stopped", file=sys.stderr)
    for line in report.get("message", "").splitlines() if "at" in report else ():
        print(f"[{rank}] {line}", file=sys.stderr)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
