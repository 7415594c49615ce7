"""The progress line of long commands."""

from __future__ import annotations

import time

from decentlam.lab.progress import Progress


def test_the_line_tells_the_time_left_at_the_pace_so_far() -> None:
    with Progress("sweep", 0) as progress:
        begun = time.monotonic()
        assert progress.line(begun + 30).startswith("sweep 30.0 s so far")
        progress.update(3, 12, "dmsgd")
        assert progress.line(begun + 30) == "sweep 3 of 12, about 1 min 30 s left  dmsgd"


def test_a_resumed_run_counts_only_what_it_did_itself() -> None:
    with Progress("step", 1000, done=900) as progress:
        begun = time.monotonic()
        progress.update(950, 1000, "")
        assert progress.line(begun + 50) == "step 950 of 1,000, about 50.0 s left"
