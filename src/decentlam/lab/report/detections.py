"""Detections drawn on test images: what is there, and beside it what each method found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decentlam.lab.detection.pictures import FILE
from decentlam.lab.report.formatting import counted, escape, percent, value_text
from decentlam.lab.report.line_styles import LineStyle
from decentlam.lab.report.run_groups import Group, Setting
from decentlam.lab.report.runs import Run, number
from decentlam.lab.report.table import name
from decentlam.lab.values import parse_json

_COLORS = 6  # classes .label1 and so on of page.css
_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")

Content = dict[str, Any]


def section(settings: Sequence[Setting], styles: dict[int, LineStyle]) -> str:
    """Return the whole section of the page; nothing if no run was of a detector."""
    sources: dict[str, str] = {}  # from a picture to the id it is embedded under, each once
    tables = [_table(setting, styles, sources) for setting in settings]
    if not any(tables):
        return ""
    images = "".join(
        f'<image id="{place}" width="1" height="1" preserveAspectRatio="none" '
        f'href="data:image/jpeg;base64,{source}"/>'
        for source, place in sources.items()
    )
    return (
        '\n<section aria-labelledby="detections">\n<h2 id="detections">Detections</h2>\n'
        f'<svg width="0" height="0" aria-hidden="true"><defs>{images}</defs></svg>'
        f"{''.join(tables)}"
        '<p class="small">Images of the test set, drawn with the boxes of the averaged model after '
        "training, of the first seed of each method. A box is colored by its class; weaker ones "
        "than the score in the heading are left out.</p>\n</section>\n"
    )


def _table(setting: Setting, styles: dict[int, LineStyle], sources: dict[str, str]) -> str:
    found = [(group, run, content) for group in setting.groups for run, content in _first(group)]
    if not found:
        return ""
    _, _, first = found[0]
    heads = "".join(
        f'<th scope="col">{name(group, styles)}'
        f"<small>seed {escape(value_text(run.recipe.get('seed')))}, "
        f"AP50 {percent(run.last('averaged_ap50'))} %</small></th>"
        for group, run, _ in found
    )
    rows = []
    for at, image in enumerate(first["images"]):
        cells = [_picture(image, "truth", "ground truth", sources)]
        for group, _, content in found:
            same = at < len(content["images"]) and content["images"][at]["name"] == image["name"]
            shown = _picture(content["images"][at], "found", group.label, sources) if same else ""
            cells.append(shown)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    label = f"<h3>{escape(setting.label)}</h3>" if setting.label else ""
    return (
        f"{label}{_legend(first)}"
        '<div class="scroll" tabindex="0" role="region" aria-label="Detections on test images">'
        f'<table class="pictures"><thead><tr><th scope="col">ground truth<small> found: score '
        f"{first['sure']:g} or more</small></th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _first(group: Group) -> list[tuple[Run, Content]]:
    """Return the first run that has pictures, if there is one, with them."""
    for run in group.runs:
        content = _read(run)
        if content is not None:
            return [(run, content)]
    return []


def _read(run: Run) -> Content | None:
    """Return what training wrote; None if there is nothing, or it is damaged."""
    try:
        content: Content = parse_json((run.directory / FILE).read_text(encoding="utf-8"))
        known = isinstance(content["names"], dict) and number(content["sure"]) is not None
        fine = known and all(map(_is_picture, content["images"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return content if fine and content["images"] else None


def _is_picture(image: Content) -> bool:
    boxes = image["truth"] + image["found"]
    return (
        isinstance(image["name"], str)
        and set(image["jpeg"]) <= _BASE64
        and min(float(image["width"]), float(image["height"])) > 0
        and all(len(box) >= 5 and all(number(value) is not None for value in box) for box in boxes)
    )


def _legend(content: Content) -> str:
    used = sorted({int(box[4]) for image in content["images"] for box in image["truth"]})
    items = "".join(
        f'<li><span class="label{_color(label)}"></span>'
        f"{escape(content['names'].get(str(label), label))}</li>"
        for label in used
    )
    return f'<ul class="labels">{items}</ul>'


def _picture(image: Content, which: str, whose: str, sources: dict[str, str]) -> str:
    place = sources.setdefault(image["jpeg"], f"picture{len(sources)}")
    width, height = float(image["width"]), float(image["height"])
    boxes = image[which]
    shapes = "".join(_box(box) for box in boxes)
    spoken = escape(f"{image['name']}, {whose}: {counted(len(boxes), 'box', 'boxes')}")
    return (
        f'<svg class="picture" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{spoken}"><use href="#{place}" transform="scale({width:g} {height:g})"/>'
        f"{shapes}</svg>"
    )


def _box(box: Sequence[float]) -> str:
    x1, y1, x2, y2, label, *score = box
    title = f"<title>{score[0]:.2f}</title>" if score else ""
    return (
        f'<rect class="label{_color(int(label))}" x="{x1:g}" y="{y1:g}" width="{x2 - x1:g}" '
        f'height="{y2 - y1:g}">{title}</rect>'
    )


def _color(label: int) -> int:
    return (label - 1) % _COLORS + 1
