"""What every test process sets before the first test."""

from __future__ import annotations

import os
import signal

# One thread each: processes of several threads, for tensors this small, only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that a shell runs in the background ignores SIGINT, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
