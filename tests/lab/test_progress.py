"""The line that says how far a long command is."""

from __future__ import annotations

from decentlam.lab.progress import Progress


def test_the_time_left_follows_the_pace_since_the_start(capsys):
    progress = Progress("step", done=10)  # a resumed run
    assert progress.line(10, 50, "dmsgd", 0.0) == "step 10 of 50  dmsgd"
    assert progress.line(20, 50, "loss 2", 30.0) == "step 20 of 50, about 1 min 30 s left  loss 2"
    progress.update(30, 50, "unsaid")
    progress.update(50, 50, "done", now=True)
    assert capsys.readouterr().err == "step 50 of 50  done\n"
