"""What `python -m decentlam.launch` runs in each process: the user's script, with three additions.

The process ends with its launcher, even if that is killed; lines of output are written whole, so
that those of different processes do not mix; and an exception is reported to torchrun, with the
time it was raised. Run by its path, with the standard library alone: the script decides what is
imported, and when.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback

_PR_SET_PDEATHSIG = 1
_OURS = (__file__, runpy.run_path.__code__.co_filename)  # a traceback begins in the user's script


def main(launcher: int, kind: str, script: str) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != launcher:  # it was gone before it could be watched
            os._exit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)  # PYTHONUNBUFFERED cuts
    try:
        if kind == "module":
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(script))
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt as error:  # everyone gets it: a traceback each would say nothing
        sys.last_value = error  # as Python does it, for who must know at exit how the script ended
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code not in (None, 0):
            sys.last_value = end
            _report(end.code if isinstance(end.code, str) else "")
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
            frames = frames.tb_next
        error.__traceback__ = frames
        sys.last_value = error
        _report("".join(traceback.format_exception(error)))
        sys.excepthook(type(error), error, frames)
        sys.exit(1)


def _report(text: str) -> None:
    """The file that torchrun looks for when a process fails, with a clock finer than its own. It is
    there whole or not at all: torchrun may stop this process meanwhile, and read it."""
    report = {"message": text, "timestamp": int(time.time()), "at": time.monotonic()}
    with contextlib.suppress(KeyError, OSError):
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        with open(f"{path}.draft", "w", encoding="utf-8") as file:
            json.dump(report, file)
        os.replace(f"{path}.draft", path)


if __name__ == "__main__":
    number, what, name = sys.argv[1:4]
    sys.argv = [name, *sys.argv[4:]]
    main(int(number), what, name)
