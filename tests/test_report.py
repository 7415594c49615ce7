"""The report of training runs: what is read, what is averaged, and the page in a real browser."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pages
import pytest

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.lab import style
from decentlam.lab.recipes import Recipe
from decentlam.lab.report import curves, groups, looks, network, text, timing, write
from decentlam.lab.report.runs import find, read
from decentlam.lab.report.table import COLUMNS

EPOCHS, STEPS_PER_EPOCH, LOG_EVERY = 12, 14, 2
# Final accuracy, consensus distance and wait share, roughly as label-sorted digits have them.
METHODS = {
    "pmsgd": (0.968, 0.0, 0.31),
    "dmsgd": (0.934, 0.21, 0.16),
    "da-dmsgd": (0.941, 0.13, 0.19),
    "qg-dmsgd": (0.957, 0.074, 0.17),
    "decentlam": (0.965, 0.061, 0.16),
}


def write_run(
    directory: Path,
    method: str = "decentlam",
    seed: int = 0,
    status: str | None = "finished",
    until: float = EPOCHS,
    simulated: bool = True,
    **settings: Any,
) -> Path:
    """A run directory as training writes it, from made-up but smooth numbers."""
    directory.mkdir(parents=True)
    recipe = {
        "method": method, "topology": "ring", "nodes": 8, "model": "mlp", "data": "digits",
        "data_path": None, "shards": "label-sorted", "batch": 1024, "micro_batch": None,
        "epochs": float(EPOCHS), "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4,
        "nesterov": False, "hyper": [], "schedule": "cosine", "warmup_epochs": 1.0, "seed": seed,
        "precision": "float32", "evaluate_every": 1.0, **settings,
    }  # fmt: skip
    info = {
        "recipe": recipe,
        "versions": {
            "decentlam": "0.1.0",
            "commit": "0f" * 20,
            "python": "3.11.2",
            "torch": "2.15.0",
        },
        "command": f"decentlam train --method {method} --topology {recipe['topology']} --nodes "
        f"{recipe['nodes']} --shards {recipe['shards']} --batch {recipe['batch']} --seed {seed} "
        f"--simulate --out {directory.name}",
        "simulated": simulated,
        "started": "2026-11-15T12:00:00+00:00",
        "parameters": 25_450,
        "steps": EPOCHS * STEPS_PER_EPOCH,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "message_bytes": 101_800,
        "peers": 2.0,
        "rho": 0.8047,
        "machine": {"system": "Linux", "processor": "x86_64", "cores": 8},
    }
    (directory / "run.json").write_text(json.dumps(info))
    records = list(measure(method, seed, status, until, recipe))
    (directory / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return directory


def measure(method: str, seed: int, status: str | None, until: float, recipe: dict[str, Any]):
    draw = random.Random(f"{method} {seed} {recipe['batch']} {recipe['lr']}")
    accuracy, distance, wait = METHODS.get(method, (0.9, 0.1, 0.2))
    accuracy -= 0.02 * math.log2(recipe["batch"] / 1024) * (0.97 - accuracy) / 0.02
    accuracy += draw.gauss(0, 0.004)
    steps = round(until * STEPS_PER_EPOCH)
    for k in range(steps + 1):
        epoch = k / STEPS_PER_EPOCH
        blown = status == "diverged" and epoch > until - 1.5
        if k and k % LOG_EVERY == 0:
            compute, data = 0.0121 * draw.uniform(0.95, 1.1), 0.0017 * draw.uniform(0.9, 1.2)
            whole = (compute + data) / (1 - wait) + 0.0004
            loss = (
                0.04 + 2.26 * math.exp(-0.55 * epoch) + draw.gauss(0, 0.02) * math.exp(-0.1 * epoch)
            )
            if blown:
                loss = None if k >= steps - 2 else loss * 40 ** (epoch - until + 1.5)
            yield {
                "kind": "step", "step": k, "epoch": epoch, "loss": loss,
                "lr": recipe["lr"] * min(epoch, 0.5 * (1 + math.cos(math.pi * epoch / EPOCHS))),
                "step_seconds": whole, "data_seconds": data, "compute_seconds": compute,
                "wait_seconds": wait * whole, "bytes_sent": 203_600,
                "images_per_second": recipe["batch"] / whole,
            }  # fmt: skip
        if k % STEPS_PER_EPOCH == 0:
            grown = 1 - 0.9 * math.exp(-0.5 * epoch) + draw.gauss(0, 0.004) * math.exp(-0.2 * epoch)
            top = (
                None
                if blown and k == steps
                else max(0.08, accuracy * grown) * (0.4 if blown else 1)
            )
            spread = 0.1 * distance * (0.5 + math.exp(-0.3 * epoch))
            yield {
                "kind": "evaluation", "step": k, "epoch": epoch, "averaged_top1": top,
                "averaged_top5": top and min(1.0, top + 0.1),
                "averaged_loss": top and 3 * (1 - top),
                "nodes_top1": top and top - spread, "nodes_top1_min": top and top - 2 * spread,
                "nodes_top1_max": top and top - 0.3 * spread, "nodes_loss": top and 3.2 * (1 - top),
                "consensus_distance": distance * (0.2 + math.exp(-((epoch - 1.5) ** 2) / 3) * 3
                + math.exp(-0.3 * epoch)) * draw.uniform(0.95, 1.05) if k else 0.0,
            }  # fmt: skip
    if status is not None:
        yield {"kind": "end", "step": steps, "status": status, "seconds": 0.0195 * steps}


def last_evaluation(directory: Path) -> dict[str, Any]:
    lines = (directory / "records.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "evaluation"][-1]


def only_group(directories: list[Path]) -> groups.Group:
    (setting,) = groups.collect([read(directory) for directory in directories])
    (group,) = setting.groups
    return group


def embedded_data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


# What is read ------------------------------------------------------------------------------------


def test_what_is_not_a_run_directory_is_refused_with_what_is_needed(tmp_path: Path):
    with pytest.raises(ValueError, match="at least one run directory"):
        write([], tmp_path / "page.html")
    with pytest.raises(ValueError, match="there is no directory"):
        write([tmp_path / "nowhere"], tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"neither run\.json nor runs/\*/run\.json"):
        write([tmp_path], tmp_path / "page.html")
    run = write_run(tmp_path / "run")
    with pytest.raises(ValueError, match=re.escape(f"try {tmp_path}/*")):
        write([tmp_path], tmp_path / "page.html")
    with pytest.raises(ValueError, match="is a directory; give a file name"):
        write([run], tmp_path)
    (run / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="no recipe with a method"):
        write([run], tmp_path / "page.html")
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        write([run], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_study_is_all_its_runs_and_every_run_counts_once(tmp_path: Path):
    first = write_run(tmp_path / "runs" / "a", seed=0)
    second = write_run(tmp_path / "runs" / "deeper" / "b", seed=1)
    assert find([tmp_path]) == [first, second]
    assert find([first, tmp_path, second]) == [first, second]


def test_a_torn_last_line_is_left_out_with_a_note(tmp_path: Path):
    run = write_run(tmp_path / "run", status=None, until=3)
    before = read(run)
    with open(run / "records.jsonl", "a") as file:
        file.write('{"kind": "evaluation", "step": 99, "averaged_to')
    after = read(run)
    assert (after.steps, after.evaluations) == (before.steps, before.evaluations)
    assert after.status == "unfinished"
    page = write([run], tmp_path / "page.html").read_text()
    assert "ends in the middle of a line" in page and "no end record" in page
    assert "at epoch 3 of 12" in page


def test_a_line_that_is_no_record_is_left_out_with_its_number(tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = (run / "records.jsonl").read_text().splitlines()
    (run / "records.jsonl").write_text("\n".join([*lines[:4], "[1]", *lines[4:]]) + "\n")
    found = read(run)
    assert found.notes == ("line 5 of records.jsonl is not a record and was left out",)
    assert found.status == "finished"


def test_a_run_without_records_is_read_with_a_note(tmp_path: Path):
    run = write_run(tmp_path / "run")
    (run / "records.jsonl").unlink()
    page = write([run], tmp_path / "page.html").read_text()
    assert "there is no records.jsonl" in page and "No step was timed" in page


def test_steps_that_a_resumed_run_did_again_count_once(tmp_path: Path):
    run = write_run(tmp_path / "run")
    whole = read(run)
    lines = (run / "records.jsonl").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line).get("epoch", 0) > 7)
    end = json.dumps({"kind": "end", "step": 98, "status": "interrupted", "seconds": 1.0})
    again = lines[at - 9 :]
    (run / "records.jsonl").write_text("\n".join([*lines[:at], end, *again]) + "\n")
    resumed = read(run)
    assert (resumed.steps, resumed.evaluations) == (whole.steps, whole.evaluations)
    assert resumed.status == "finished"


# What is averaged --------------------------------------------------------------------------------


def test_runs_that_differ_only_in_the_seed_are_averaged(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(4)]
    group = only_group(runs)
    last = [last_evaluation(run) for run in runs]
    for column, key in zip(
        COLUMNS, ("averaged_top1", "nodes_top1", "consensus_distance"), strict=False
    ):
        values = [evaluation[key] for evaluation in last]
        found = column.value(group)
        assert found is not None
        assert found.mean == pytest.approx(statistics.mean(values))
        assert found.deviation == pytest.approx(statistics.stdev(values))
    low = 100 * min(evaluation["nodes_top1_min"] for evaluation in last)
    high = 100 * max(evaluation["nodes_top1_max"] for evaluation in last)
    assert COLUMNS[1].below(group) == f"{low:.2f} to {high:.2f}"
    assert group.status() == "finished"


def test_a_diverged_run_is_shown_and_in_no_average(tmp_path: Path):
    good = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    bad = write_run(tmp_path / "bad", seed=2, status="diverged", until=5)
    alone, group = only_group(good), only_group([*good, bad])
    for column in COLUMNS:
        assert column.value(group) == column.value(alone)
    assert group.status() == "2 finished, 1 diverged at step 70"
    page = write([*good, bad], tmp_path / "page.html")
    assert "2 of 3 runs" in page.read_text() and "1 of 3 runs diverged" in page.read_text()
    lines = embedded_data(page)["charts"][0]["lines"]
    assert [(line["name"], line["diverged"]) for line in lines] == [
        ("", False),
        ("seed 2, diverged", True),
    ]


def test_a_method_that_always_diverged_has_no_numbers_and_is_never_the_best(tmp_path: Path):
    runs = [
        write_run(tmp_path / "a", "dmsgd", status="diverged", until=6),
        write_run(tmp_path / "b"),
    ]
    page = write(runs, tmp_path / "page.html").read_text()
    row = page.split('<tr data-group="0">')[1].split("</tr>")[0]
    assert 'data-value="">diverged</td>' in row and "★" not in row


def test_an_unfinished_run_is_not_mixed_with_finished_ones(tmp_path: Path):
    done = write_run(tmp_path / "a", seed=0)
    going = write_run(tmp_path / "b", seed=1, status="interrupted", until=4)
    assert COLUMNS[0].value(only_group([done, going])) == COLUMNS[0].value(only_group([done]))
    assert only_group([done, going]).status() == "1 finished, 1 interrupted at step 56"


def test_a_missing_value_leaves_a_gap_and_not_another_mean(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    lines = [json.loads(line) for line in (runs[0] / "records.jsonl").read_text().splitlines()]
    for record in lines:
        if record["kind"] == "evaluation" and record["step"] == 5 * STEPS_PER_EPOCH:
            record["averaged_top1"] = None
    (runs[0] / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    chart = embedded_data(write(runs, tmp_path / "page.html"))["charts"][0]
    (line,) = chart["lines"]
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [5]
    assert text.spread([0.5, None]) is None


def test_curves_are_the_mean_and_the_range_of_the_seeds(tmp_path: Path):
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    charts = {c["name"]: c for c in embedded_data(write(runs, tmp_path / "page.html"))["charts"]}
    assert list(charts) == [chart.name for chart in curves.CHARTS]
    last = [last_evaluation(run) for run in runs]
    (averaged,), (nodes,) = charts["averaged"]["lines"], charts["nodes"]["lines"]
    values = [100 * evaluation["averaged_top1"] for evaluation in last]
    assert averaged["x"] == list(range(EPOCHS + 1))
    assert averaged["y"][-1] == pytest.approx(statistics.mean(values), rel=1e-5)
    assert averaged["low"][-1] == pytest.approx(min(values), rel=1e-5)
    assert averaged["high"][-1] == pytest.approx(max(values), rel=1e-5)
    worst = 100 * min(evaluation["nodes_top1_min"] for evaluation in last)
    assert nodes["low"][-1] == pytest.approx(worst, rel=1e-5)


def test_long_curves_are_thinned_without_changing_their_mean():
    records = [{"kind": "step", "step": k, "epoch": k / 100, "loss": float(k)} for k in range(1200)]
    thinned = curves._thinned(records, "loss", 3)
    assert len(thinned) == 400
    assert statistics.mean(r["loss"] for r in thinned) == pytest.approx(599.5)
    assert thinned[0]["step"] == 2 and thinned[0]["loss"] == 1.0


def test_other_problems_are_other_settings_and_other_rates_are_other_rows(tmp_path: Path):
    runs = [
        read(
            write_run(
                tmp_path / f"{method}-{batch}-{lr}", method, batch=batch, lr=lr * batch / 1024
            )
        )
        for method in ("dmsgd", "decentlam")
        for batch in (1024, 8192)
        for lr in (0.1, 0.2)
    ]
    settings = groups.collect(runs)
    assert [setting.label for setting in settings] == ["batch 1024", "batch 8192"]
    labels = [f"{group.label}, {group.detail}" for group in settings[0].groups]
    assert labels == ["DmSGD, lr 0.1", "DmSGD, lr 0.2", "DecentLaM, lr 0.1", "DecentLaM, lr 0.2"]
    indices = [group.index for setting in settings for group in setting.groups]
    assert indices == list(range(8))
    one_rate = groups.collect([run for run in runs if run.recipe["lr"] in (0.1, 0.8)])
    assert [setting.detail for setting in one_rate] == ["lr 0.1", "lr 0.8"]
    assert [group.detail for group in one_rate[0].groups] == ["", ""]


def test_a_field_that_an_older_run_lacks_is_at_its_default(tmp_path: Path):
    old = write_run(tmp_path / "old", seed=0)
    new = write_run(tmp_path / "new", seed=1, log_every=Recipe().log_every)
    other = write_run(tmp_path / "other", seed=1, log_every=Recipe().log_every + 1)
    assert len(only_group([old, new]).runs) == 2
    (setting,) = groups.collect([read(run) for run in (old, new, other)])
    assert [group.detail for group in setting.groups] == ["log every 10", "log every 11"]


def test_one_method_on_many_networks_is_one_table(tmp_path: Path):
    runs = [read(write_run(tmp_path / name, topology=name)) for name in ("ring", "mesh", "star")]
    (setting,) = groups.collect(runs)
    assert [group.detail for group in setting.groups] == ["mesh", "ring", "star"]


# How it looks ------------------------------------------------------------------------------------


def test_lines_have_the_look_of_all_figures_and_can_be_read_in_the_dark(tmp_path: Path):
    styled = [method for method in ALGORITHMS if groups.method_label(method) != method]
    runs = [read(write_run(tmp_path / method, method)) for method in styled]
    (setting,) = groups.collect(runs)
    found = looks.looks([setting])
    assert [group.method for group in setting.groups] == styled and set(METHODS) < set(styled)
    for group in setting.groups:
        look, line = found[group.index], style.line(group.method)
        assert (look.light, look.width) == (line["color"], line["linewidth"])
        assert bool(look.dash) == (line["linestyle"] != "-")
        assert looks.contrast(look.dark, looks.DARK_PAPER) >= 4.5
    assert looks.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"][1:]  # without the warm-up
    found = timing.split(only_group([run]))
    assert found is not None
    assert sum(found.values()) == pytest.approx(statistics.mean(r["step_seconds"] for r in steps))
    assert found["data"] == pytest.approx(statistics.mean(r["data_seconds"] for r in steps))
    assert found["other"] > 0


def test_simulated_nodes_do_not_wait(tmp_path: Path):
    column = COLUMNS[-1]
    assert column.value(only_group([write_run(tmp_path / "a", simulated=True)])) is None
    real = column.value(only_group([write_run(tmp_path / "b", simulated=False)]))
    assert real is not None and real.mean == pytest.approx(METHODS["decentlam"][2])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_is_drawn_with_all_its_nodes_and_edges(tmp_path: Path, name: str):
    (drawing,) = network.drawings([read(write_run(tmp_path / "run", topology=name))])
    graph = TOPOLOGIES[name](8)
    panels = drawing.split("<svg")[1:]
    assert len(panels) == min(graph.period or 4, 4)
    for step, panel in enumerate(panels):
        directed = int((graph.weights(step) - graph.weights(step).diag().diag() > 0).sum())
        assert panel.count("<circle") == 8
        assert panel.count("<path") == (directed // 2 if graph.symmetric else directed)
    repeats = f"repeats every {graph.period} steps" if graph.period else "Random at every step"
    assert (repeats in drawing) == (graph.period != 1)


def test_a_network_that_cannot_be_drawn_is_said_so(tmp_path: Path):
    runs = [
        read(write_run(tmp_path / "a", topology="<b>mine</b>")),
        read(write_run(tmp_path / "b", topology="complete", nodes=256)),
        read(write_run(tmp_path / "c", topology="ring", nodes=1)),
    ]
    unknown, large, lone = network.drawings(runs)
    assert "is not drawn: unknown topology" in unknown and "<b>" not in unknown
    assert "too large to draw" in large and "<circle" not in large
    assert lone.count("<circle") == 1 and "<path" not in lone


def test_numbers_read_well():
    assert [text.quantity(v) for v in (1234.5, 12.345, 0.0012345, 1.2e-7, 0, None)] == [
        "1,234", "12.3", "0.00123", "1.2e-07", "0", "–",
    ]  # fmt: skip
    assert text.quantity_spread(text.Spread(0.04774, 0.00327)) == "0.0477 ± 0.0033"
    assert text.percent_spread(text.Spread(0.96739, 0.00541)) == "96.74 ± 0.54"
    assert [text.duration(v) for v in (0.0042, 12, 200, 7500)] == [
        "4.20 ms", "12.0 s", "3 min 20 s", "2 h 5 min",
    ]  # fmt: skip
    assert text.listed(["a", "b", "c"]) == "a, b and c"


def test_the_same_runs_give_the_same_bytes(tmp_path: Path):
    runs = [write_run(tmp_path / method, method) for method in METHODS]
    first, second = tmp_path / "new" / "1.html", tmp_path / "2.html"
    assert write(runs, first).read_bytes() == write(runs[::-1], second).read_bytes()


class Elements(HTMLParser):
    """All start tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{title}}"


def write_hostile_run(directory: Path) -> Path:
    """A run whose every text tries to break out of the page."""
    run = write_run(directory, topology=EVIL, model=EVIL, data=EVIL, shards=EVIL, schedule=EVIL)
    info = json.loads((run / "run.json").read_text())
    info |= {"command": EVIL, "started": EVIL, "versions": {EVIL: EVIL}, "machine": {EVIL: EVIL}}
    info["recipe"] |= {"method": EVIL, "seed": EVIL, "hyper": [[EVIL, EVIL]], EVIL: EVIL}
    (run / "run.json").write_text(json.dumps(info))
    return run


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    runs = [write_hostile_run(tmp_path / "evil"), write_run(tmp_path / "good")]
    page = write(runs, tmp_path / "page.html")
    tags = Elements(page.read_text()).tags
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not {"img", "b", "iframe", "link", "object"} & {tag for tag, _ in tags}
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert EVIL in [group["label"] for group in embedded_data(page)["groups"]]


# In a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[pages.Browser]:
    with pages.browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods with three seeds each, one run of which diverged."""
    study = tmp_path_factory.mktemp("study")
    for method in METHODS:
        for seed in range(3):
            diverged = (method, seed) == ("dmsgd", 2)
            status, until = ("diverged", 7) if diverged else ("finished", EPOCHS)
            write_run(study / "runs" / f"{method}-{seed}", method, seed, status, until)
    return write([study], study / "report.html")


@pytest.fixture
def opened(chromium: pages.Browser, page: Path) -> pages.Browser:
    chromium.size(1280, 900)
    chromium.media()
    chromium.open(page)
    return chromium


def test_the_page_opens_without_errors_and_asks_for_nothing_else(opened, page: Path):
    opened.requests()
    opened.open(page)
    for button in range(len(opened.texts(".toggle"))):
        opened.run("document.querySelectorAll('.toggle')[arguments[0]].click()", button)
    assert opened.messages() == []
    assert opened.requests() == [page.resolve().as_uri()]
    assert opened.run("return document.querySelectorAll('#charts svg .curve').length") == 0


def test_pointing_at_a_chart_reads_the_values_of_all_methods(opened, page: Path):
    opened.hover("#chart-averaged .plot > svg", 0.5)
    head, _, *rows = opened.text("#chart-averaged .readout").split("\n")
    epoch = int(head.removeprefix("epoch "))
    assert 4 <= epoch <= 8
    data = embedded_data(page)
    chart = next(c for c in data["charts"] if c["name"] == "averaged")
    label = {group["index"]: group["label"] for group in data["groups"]}
    values = {label[line["group"]]: line["y"][epoch] for line in chart["lines"] if not line["name"]}
    shown = dict(row.split("\t")[:2] for row in rows if "diverged" not in row)
    assert shown == {name: f"{value:.2f} %" for name, value in values.items()}
    assert list(shown) == sorted(values, key=lambda name: -values[name])
    assert opened.run("return document.querySelectorAll('#chart-averaged .cross line').length") == 1


def test_arrow_keys_read_the_values_too(opened):
    svg = "#chart-loss .plot > svg"
    right, end, escape = "\ue014", "\ue010", "\ue00c"  # as WebDriver spells keys
    opened.type(svg, right)
    first = opened.text("#chart-loss .readout")
    opened.type(svg, right)
    assert first != opened.text("#chart-loss .readout")
    opened.type(svg, end)
    assert opened.text("#chart-loss .readout").startswith("epoch 12\n")
    opened.type(svg, escape)
    assert opened.run("return document.querySelector('#chart-loss .readout').hidden")


def test_the_legend_hides_and_shows_a_line(opened):
    count = "return document.querySelectorAll('.curve[data-group=\"4\"]').length"
    everything = opened.run(count)
    assert everything == 4  # the fifth chart has one line for all: the learning rate
    opened.click('.legend button[data-group="4"]')
    assert opened.run(count) == 0
    pressed = "return document.querySelector('.legend [data-group=\"4\"]').ariaPressed"
    assert opened.run(pressed) == "false"
    opened.run("document.querySelector('.legend [data-group=\"4\"]').focus()")
    opened.type('.legend button[data-group="4"]', " ")  # by keyboard
    assert opened.run(count) == everything


def test_log_scale_and_second_half_change_the_axes(opened):
    ticks = "#chart-consensus .tick.y"
    logarithmic = opened.texts(ticks)
    opened.click("#chart-consensus .toggle")
    assert opened.texts(ticks) != logarithmic and opened.texts(ticks)[0] == "0.0"
    opened.click("#chart-averaged .toggle")
    assert opened.texts("#chart-averaged .tick.x")[0] == "6"


def test_a_click_on_a_header_sorts_and_the_next_turns_it_round(opened):
    def column() -> list[str]:
        return [row.split()[0] for row in opened.texts(".results tbody th")]

    before = column()
    opened.click(".results thead th:nth-child(3) button")
    best_first = column()
    values = opened.run(
        "return [...document.querySelectorAll('.results tbody td:nth-child(3)')]"
        ".map((cell) => Number(cell.dataset.value))"
    )
    assert values == sorted(values, reverse=True) and best_first != before
    head = "return document.querySelector('.results thead th:nth-child(3)').ariaSort"
    assert opened.run(head) == "descending"
    opened.click(".results thead th:nth-child(3) button")
    assert column() == best_first[::-1] and opened.run(head) == "ascending"
    opened.click(".results thead th:first-child button")
    assert column() == sorted(column(), key=str.lower)
    assert opened.run(head) is None


def test_the_copy_button_copies_the_command(opened, page: Path):
    opened.devtools("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    opened.click("details:nth-of-type(5) summary")
    opened.click("details:nth-of-type(5) .run:nth-of-type(2) .copy")
    command = json.loads((page.parent / "runs" / "decentlam-1" / "run.json").read_text())["command"]
    assert opened.run("return navigator.clipboard.readText()") == command
    assert opened.text("details:nth-of-type(5) .run:nth-of-type(2) .copy") == "Copied"


def test_without_scripts_the_table_is_there_and_a_note_says_what_is_missing(opened, page: Path):
    opened.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened.open(page)
        body = opened.text("body")
        assert opened.run("return document.querySelectorAll('.results tbody tr').length") == 5
    finally:
        opened.devtools("Emulation.setScriptExecutionDisabled", value=False)
    assert "The curves are drawn by a script" in body and "DecentLaM" in body
    assert "Copy" not in body


def test_hostile_text_stays_text(opened, tmp_path: Path):
    runs = [write_hostile_run(tmp_path / "evil"), write_run(tmp_path / "good", "dmsgd")]
    opened.size(390, 844)
    opened.open(write(runs, tmp_path / "page.html"))
    opened.hover("#chart-averaged .plot > svg", 0.5)
    assert opened.messages() == []
    assert opened.run("return document.documentElement.scrollWidth") == 390
    assert opened.run("return document.title").startswith(EVIL.split("'")[0])
    assert EVIL in opened.text("#chart-averaged .readout")
    assert EVIL in opened.run("return document.querySelector('.command code').textContent")


def test_the_page_is_dark_for_those_who_prefer_it_and_white_on_paper(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    line = "return getComputedStyle(document.querySelector('.curve[data-group=\"0\"]')).stroke"
    assert (opened.run(paper), opened.run(line)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    opened.media(scheme="dark")
    red, green, blue = (int(looks.DARK_PAPER[at : at + 2], 16) for at in (1, 3, 5))
    assert opened.run(paper) == f"rgb({red}, {green}, {blue})"
    assert opened.run(line) == "rgb(237, 237, 237)"
    opened.media("print", "dark")
    assert (opened.run(paper), opened.run(line)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(opened, page: Path, width: int):
    opened.size(width, 844)
    opened.open(page)
    assert opened.run("return document.documentElement.scrollWidth") == width
    opened.hover("#chart-averaged .plot > svg", 0.9)
    assert opened.run("return document.documentElement.scrollWidth") == width


def test_the_reader_chooses_among_settings(opened, tmp_path: Path):
    runs = [
        write_run(tmp_path / f"{method}-{batch}", method, batch=batch)
        for method in ("dmsgd", "decentlam")
        for batch in (1024, 8192)
    ]
    opened.open(write(runs, tmp_path / "page.html"))
    curves_of = (
        "return [...document.querySelectorAll('#chart-averaged .curve')]"
        ".map((curve) => curve.dataset.group)"
    )
    assert opened.texts(".results caption strong") == ["Side by side", "batch 1024", "batch 8192"]
    assert opened.run(curves_of) == ["0", "1"]
    opened.click(".settings label:last-of-type")
    assert opened.run(curves_of) == ["2", "3"]
    assert opened.messages() == []
