"""The style of each group's line, from `plot_style`, on white and on dark paper."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

from decentlam.lab import plot_style
from decentlam.lab.report.run_groups import Group, Setting

DARK_PAPER = "#15171b"  # the background of page.css in the dark
_READABLE = 4.5  # contrast that lines and their labels have on dark paper, as WCAG counts it
_DASHES: tuple[tuple[float, ...], ...] = ((6, 3), (2, 2), (8, 2, 2, 2), (4, 4), (1, 2))


@dataclass(frozen=True)
class LineStyle:
    light: str
    dark: str
    dash: tuple[float, ...]  # lengths in pixels; empty for a whole line
    width: float


def line_styles(settings: Sequence[Setting]) -> dict[int, LineStyle]:
    """Return a style per group, by its index; groups of one method get shades of its color."""
    found: dict[int, LineStyle] = {}
    for setting in settings:
        for method in dict.fromkeys(group.method for group in setting.groups):
            groups = [group for group in setting.groups if group.method == method]
            found |= {g.index: _style(g, at / len(groups), at) for at, g in enumerate(groups)}
    return found


def _style(group: Group, share: float, at: int) -> LineStyle:
    """Return the method's own style for its first group, a paler one for the next."""
    try:
        line = plot_style.line(group.method)
    except KeyError:
        line = {"color": plot_style.GREY, "linestyle": "-", "linewidth": 1.5}
    width = float(line["linewidth"])
    dash = () if line["linestyle"] == "-" else tuple(width * part for part in line["linestyle"][1])
    if at > 0:
        dash = _DASHES[(at - 1) % len(_DASHES)]
    dark = on_dark(line["color"])
    return LineStyle(_paler(line["color"], share, 0.78), _paler(dark, share, 0.95), dash, width)


def on_dark(color: str) -> str:
    """Return the color made just light enough to be read on dark paper; its hue stays."""
    hue, light, saturation = colorsys.rgb_to_hls(*_channels(color))
    if saturation < 0.1:  # black is ink, and ink is white here
        light = 0.93 - 0.86 * light
        color = _hex(*colorsys.hls_to_rgb(hue, light, saturation))
    while contrast(color, DARK_PAPER) < _READABLE and light < 1:
        light = min(1.0, light + 0.01)
        color = _hex(*colorsys.hls_to_rgb(hue, light, saturation))
    return color


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of the Web Content Accessibility Guidelines, from 1 to 21."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _paler(color: str, share: float, palest: float) -> str:
    if share == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*_channels(color))
    return _hex(*colorsys.hls_to_rgb(hue, light + share * max(0.0, palest - light), saturation))


def _channels(color: str) -> tuple[float, float, float]:
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _hex(*channels: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
