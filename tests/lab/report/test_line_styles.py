"""The style of each line."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentlam import ALGORITHMS
from decentlam.lab import plot_style
from decentlam.lab.report import (
    line_styles,
    run_groups,
)
from decentlam.lab.report.runs import read
from tests.lab.report.written_runs import (
    METHODS,
    write_run,
)


def test_lines_have_the_look_of_all_figures_and_can_be_read_in_the_dark(tmp_path: Path):
    styled = [method for method in ALGORITHMS if run_groups.method_label(method) != method]
    runs = [read(write_run(tmp_path / method, method)) for method in styled]
    (setting,) = run_groups.collect(runs)
    found = line_styles.line_styles([setting])
    assert [group.method for group in setting.groups] == styled and set(METHODS) < set(styled)
    for group in setting.groups:
        style, line = found[group.index], plot_style.line(group.method)
        assert (style.light, style.width) == (line["color"], line["linewidth"])
        assert bool(style.dash) == (line["linestyle"] != "-")
        assert line_styles.contrast(style.dark, line_styles.DARK_PAPER) >= 4.5
    assert line_styles.contrast("#000000", "#ffffff") == pytest.approx(21)
