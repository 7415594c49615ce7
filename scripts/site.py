"""What the documentation site takes from the library while it is built: tables and pictures.

mkdocs calls the functions that begin with `on_`. A page asks for a table with a comment,
`<!-- generated: bytes -->`; the functions in TABLES write them, so that no such number is typed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.algorithms import Algorithm, Reach, make
from decentlam.analysis.stability import choose, growth_rate, relative_bias, response
from decentlam.lab.topology_drawing import draw
from decentlam.topology import Topology

FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]+src=\"https?:[^\"]+|<link[^>]+stylesheet[^>]+https?:"
)
ASKED = re.compile(r"<!-- generated: ([\w-]+)(?: ([\w-]+))? -->")
BETA = 0.9
STEPS = 64  # over which random networks are averaged
SETTLED = 400  # steps after which the disagreement does not grow any more


def on_files(files: Files, config: Any) -> Files:
    """Adds a picture of every topology with 8 nodes."""
    for name in TOPOLOGIES:
        place = f"assets/topologies/{name}.svg"
        files.append(File.generated(config, place, content=_svg(draw(TOPOLOGIES[name](8)))))
    figures = {"bytes": _bytes_figure()}
    for name, label in (("time", "time of a step / DDP's"), ("accuracy", "top-1, %")):
        page = Path(config.docs_dir, "results", f"{name}.md").read_text()
        figures[name] = _bars_figure(page, label)
    for name, figure in figures.items():
        files.append(File.generated(config, f"assets/{name}.svg", content=_svg(figure)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return ASKED.sub(_table, markdown).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The site is read offline: no page may fetch anything."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.url} fetches something: {found[0]}")
    return output


def _table(asked: re.Match[str]) -> str:
    name, argument = asked.groups()
    if name not in TABLES:
        raise PluginError(f"nothing generates {name!r}; choose from {', '.join(sorted(TABLES))}")
    return TABLES[name](*([argument] if argument else []))


def picture_of(name: str) -> str:
    """One picture, for a page at the top of docs/."""
    return f"![{name} with 8 nodes](assets/topologies/{name}.svg)"


def pictures() -> str:
    """Every topology with 8 nodes: its picture and what its constructor says of itself."""
    parts = []
    for name, constructor in TOPOLOGIES.items():
        network = constructor(8)
        parts.append(
            f'<div class="topology" markdown>\n\n### `{name}`\n\n'
            f"{picture_of(name)}\n\n"
            f"{_sentence(network.description)}. "
            f"A node sends {models(_peers(network))} per step.\n\n</div>\n"
        )
    return "\n".join(parts)


def bytes_table() -> str:
    """How many models a node sends per step."""
    counts = (4, 8, 16, 64)
    rows = [
        ["all-reduce (DDP, PmSGD)", *(_number(Reach.EVERYONE.messages_sent(n, 0)) for n in counts)]
    ]
    for name in ("one-peer-hypercube", "base-2", "ring", "symmetric-exponential", "base-4"):
        rows.append([f"`{name}`", *(_number(_peers(TOPOLOGIES[name](n))) for n in counts)])
    return table(["", *(f"{n} nodes" for n in counts)], rows)


def bytes_picture() -> str:
    return "![Models sent per step over the number of nodes](assets/bytes.svg)"


def methods() -> str:
    """All methods side by side."""
    head = ["method", "sent per neighbor", "buffers", "bias on a ring", "delay", "changing weights"]
    rows = []
    for name in ALGORITHMS:
        facts = _facts(name)
        rows.append([f"[`{name}`]({name}.md)", *(facts[key] for key in head[1:])])
    return table(head, rows)


def method(name: str) -> str:
    """What one method costs and how it behaves, with 8 nodes and momentum 0.9."""
    facts = table(["", ""], [[key, value] for key, value in _facts(name).items()])
    return f"{facts}\n\n[How to read the table](index.md#how-to-read-the-table)."


def numbers() -> str:
    """All topologies in numbers, for 12 and for 16 nodes."""
    counts = (12, 16)
    head = ["name"]
    for n in counts:
        head += [f"models sent, n = {n}", "rho or exact", "noise", "growth"]
    rows = [
        [f"`{name}`", *(fact for n in counts for fact in _network_facts(name, n))]
        for name in TOPOLOGIES
    ]
    return table(head, rows)


TABLES: dict[str, Callable[..., str]] = {
    "bytes": bytes_table,
    "bytes-picture": bytes_picture,
    "methods": methods,
    "method": method,
    "topology-picture": picture_of,
    "topology-pictures": pictures,
    "topology-numbers": numbers,
}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def _facts(name: str) -> dict[str, str]:
    algorithm = make(name, None if name == "dsgd" else BETA)
    ring, changing = TOPOLOGIES["ring"](8), TOPOLOGIES["one-peer-hypercube"](8)
    linear = name != "pmsgd-lars"
    return {
        "sent per neighbor": _sent(algorithm),
        "buffers": _buffers(algorithm, changing),
        "bias on a ring": _bias(algorithm, ring) if linear else "none",
        "delay": f"{response(algorithm)[1]:.3g} steps" if linear else "as `pmsgd`",
        "changing weights": _on_changing(algorithm, changing) if linear else "stable",
        "directed weights": "refused" if algorithm.needs_symmetric else "allowed",
    }


def _sent(algorithm: Algorithm) -> str:
    reached = [algorithm.reach(k) for k in range(algorithm.period)]
    if all(reach is Reach.EVERYONE for reach in reached):
        return "an all-reduce"
    text = models(algorithm.payloads(0))
    if Reach.EVERYONE in reached:
        text += f"; an all-reduce every {algorithm.period} steps"
    return text


def _buffers(algorithm: Algorithm, network: Topology) -> str:
    """Count them as the optimizer does: where peers change, another form may run."""
    own = models(len(algorithm.buffers)) if algorithm.buffers else "none"
    steady = choose(algorithm, network, "auto")[0]
    return (
        own
        if type(steady) is type(algorithm)
        else f"{own}; {len(steady.buffers)} where peers change"
    )


def _bias(algorithm: Algorithm, network: Topology) -> str:
    bias = relative_bias(algorithm.linear()[0], network)  # of AdamW: of its preconditioned gradient
    return "none" if bias < 1e-9 else f"{bias:.3g} x DSGD's"


def _on_changing(algorithm: Algorithm, network: Topology) -> str:
    runs, network, _ = choose(algorithm, network, "auto")  # as the optimizers do
    rate = growth_rate(runs, network).value
    if rate >= 1:
        return f"diverges: {rate:.2f} per step"
    return "stable" if type(runs) is type(algorithm) else "stable, in its steady form"


def _network_facts(name: str, n: int) -> list[str]:
    try:
        network = TOPOLOGIES[name](n)
    except ValueError:  # a hypercube of 12
        return ["-"] * 4
    exact = network.exact_after
    growth = "-"
    if network.symmetric:
        runs, mixed, _ = choose(make("decentlam", BETA), network, "auto")
        growth = f"{growth_rate(runs, mixed).value:.2f}"
    return [
        _number(_peers(network)),
        f"exact in {exact}" if exact else f"{network.rho:.2f}",
        f"{_noise(network):.2f}",
        growth,
    ]


def _noise(network: Topology) -> float:
    """What remains, root mean square per node, of noise of variance 1 before each mixing."""
    n, last = network.num_nodes, network.period or SETTLED
    spread, left = np.zeros((n, n)), []
    for step in range(SETTLED + last):
        weights = network.weights(step).numpy()
        spread = weights @ (spread + np.eye(n) - 1 / n) @ weights.T
        left.append(np.trace(spread) / n)
    return float(np.sqrt(np.mean(left[-last:])))


def _bytes_figure() -> Figure:
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    ax = figure.subplots()
    counts = [2**k for k in range(1, 8)]
    ax.plot(counts, [Reach.EVERYONE.messages_sent(n, 0) for n in counts], "k--", label="all-reduce")
    for name in ("one-peer-hypercube", "ring", "symmetric-exponential", "base-4"):
        ax.plot(counts, [_peers(TOPOLOGIES[name](n)) for n in counts], ".-", label=name)
    ax.set_xscale("log", base=2, subs=[])
    ax.set_xticks(counts, [str(n) for n in counts])
    ax.set(xlabel="nodes", ylabel="models sent per step", ylim=(0, None))
    ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _bars_figure(page: str, label: str) -> Figure:
    """Draw the first table of a page of results: a group of bars per row, a color per column.

    A cell's number is the one in brackets, or else its first.
    """
    head, _, *rows = (
        [cell.strip(" `") for cell in line.split("|")[1:-1]]
        for line in page[page.index("\n|") + 1 :].split("\n\n")[0].split("\n")
    )
    figure = Figure(figsize=(6.4, 0.4 * len(rows) + 0.9), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / (len(head) - 1)
    for column, name in enumerate(head[1:], 1):
        numbers = [re.search(r"(?<=\()\d[\d.]*(?=\))|^[\d.]+(?= ±)", row[column]) for row in rows]
        ax.barh(
            [i + width * (column - 1) for i in range(len(rows))],
            [float(found[0]) if found else 0 for found in numbers],
            height=width,
            label=name,
        )
    ax.set_yticks([i + 0.4 - width / 2 for i in range(len(rows))], [row[0] for row in rows])
    ax.invert_yaxis()
    ax.set(xlabel=label)
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside upper right")
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def _svg(figure: Figure) -> bytes:
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "decentlam", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with the name of a variable."""
    return text if text[1:2] == " " else text[:1].upper() + text[1:]


def _peers(network: Topology) -> float:
    """Messages that a node sends per step, on average."""
    steps = range(network.period or STEPS)
    return float(np.mean([network.messages(k).double().mean() for k in steps]))


def _number(value: float) -> str:
    return f"{value:.3g}"


def models(count: float) -> str:
    return f"{_number(count)} model{'s' if count != 1 else ''}"
