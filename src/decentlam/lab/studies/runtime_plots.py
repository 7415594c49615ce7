"""The paper's Figure 6 from records of `reproduce runtime`, and what its panels are called."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from decentlam.lab import style
from decentlam.lab.emulation.contenders import LOCAL
from decentlam.lab.emulation.results import summary
from decentlam.lab.study import Record

# How a contender is drawn: the first name it starts with.
_LOOKS = {"PmSGD": "pmsgd", "DmSGD": "dmsgd", "DecentLaM": "decentlam", "AWC": "awc-dmsgd"}
_PARTS = {"compute": 0.3, "update": 0.55, "exposed": 1.0}  # the darkest is what the paper's is


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """The paper's Figure 6: a panel per case, a bar per contender, darkest what is exposed."""
    cases = by_case(records)
    longest = max(len(summary(mine)) for mine in cases)
    rows = -(-len(cases) // 2)
    figure, axes = style.axes(len(cases), (11.6, 0.9 + rows * (1.2 + 0.23 * longest)))
    for ax, mine in zip(axes, cases, strict=False):
        _draw(ax, mine)
    for ax in axes[len(cases) :]:
        ax.remove()
    names = {"compute": "compute", "update": "update", "exposed": "exposed communication"}
    handles = [Patch(color=_tint(style.GREY, _PARTS[p]), label=names[p]) for p in names]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return {"runtime": figure}


def _draw(ax: Axes, records: Sequence[Record]) -> None:
    rows = summary(records)
    limit = 1.16 * max(row["ms"] for row in rows)
    for place, row in enumerate(reversed(rows)):
        shade = _color(row["contender"])
        start = 0.0
        for part, strength in _PARTS.items():
            width = row[f"{part}_ms"]
            ax.barh(place, width, left=start, color=_tint(shade, strength), height=0.75)
            start += width
        text = "" if row["contender"] == LOCAL else f" {row['speed_up']:.2f}×"
        ax.text(start, place, text, va="center", fontsize=7)
    ax.set_yticks(range(len(rows)), [row["contender"] for row in reversed(rows)], fontsize=7)
    ax.grid(visible=False, axis="y")
    ax.set(xlabel="ms per iteration; speed-up over DDP", xlim=(0, limit))
    ax.set_title(title_of(records[0]), fontsize=9)


def _color(contender: str) -> str:
    for start, method in _LOOKS.items():
        if contender.startswith(start):
            return style.color(method)
    return style.GREY


def _tint(color: str, strength: float) -> tuple[float, float, float]:
    """Mixed with white, so that the grid does not shine through."""
    red, green, blue = (1 - strength * (1 - value) for value in to_rgb(color))
    return red, green, blue


def by_case(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each case in which anything was timed."""
    timed = dict.fromkeys(r["case"] for r in records if "left_out" not in r)
    return [[r for r in records if r["case"] == k] for k in timed]


def compute_of(about: Record) -> str:
    late = about["straggler_ms"]
    return about["compute"] + (f", one {late:g} ms late" if late else "")


def title_of(about: Record) -> str:
    return (
        f"{about['nodes']} nodes, {about['network']}, {about['parameters'] / 1e6:.3g}M parameters, "
        f"{compute_of(about)}"
    )
