"""Table 6: five methods train RetinaNet and Faster R-CNN, small ones from scratch, on 8 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from decentlam.lab.detection import load_boxes
from decentlam.lab.detection.shapes import draw_shapes
from decentlam.lab.recipes import Recipe, make
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import cell, dot_panels, fitting, lead_text, seeds_from, where
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep

AVERAGED, NODES, AVERAGED_AP = "averaged_ap50", "nodes_ap50", "averaged_ap"
NAMES = {"retinanet-small": "R-Net", "faster-rcnn-small": "F-RCNN"}  # as the paper shortens them


@dataclass(frozen=True)
class DetectorCase:
    """A detector, how long it is trained at which rate, and from how many starts."""

    recipe: str
    epochs: float
    lr: float
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Detectors:
    cases: tuple[DetectorCase, ...]
    data: str = "bccd"
    data_path: str | None = None  # None for voc: drawn shapes
    methods: tuple[str, ...] = tuple(paper.DETECTION)
    nodes: int = 8
    topology: str = "symmetric-exponential"
    batch: int = 16
    image_size: int = 96
    # LARS makes every step lr * trust * |x| long, ten times that with momentum.
    lars_trust: float = 0.1


def recipe(
    nodes: int = 8,
    seed: int = 0,
    quick: bool = False,
    data: str = "bccd",
    data_path: str | None = None,
) -> Detectors:
    (batch,) = fitting(nodes, 16)
    if quick:
        names = ("bccd-faster-rcnn", "bccd-retinanet")
        cases = tuple(DetectorCase(name, 4.0, 0.05, seeds_from(seed, 1)) for name in names)
        return Detectors(cases, "voc", nodes=nodes, batch=batch, image_size=48)
    bccd = data == "bccd"  # other data has larger images, and more of them: one short run each
    cases = (
        DetectorCase("bccd-faster-rcnn", 5.0, 0.05, seeds_from(seed, 3 if bccd else 1)),
        DetectorCase(
            "bccd-retinanet", 20.0 if bccd else 5.0, 0.03, seeds_from(seed, 2 if bccd else 1)
        ),
    )
    size = Detectors.image_size if bccd else 160
    return Detectors(cases, data, data_path, nodes=nodes, batch=batch, image_size=size)


def run(setting: Detectors, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per training."""
    path = setting.data_path
    if setting.data == "voc" and path is None:
        path = str(draw_shapes(directory / "shapes", train=80, test=20))
    try:  # before anything is started
        load_boxes(setting.data, path, setting.image_size)
    except ValueError as error:
        raise ValueError(f"{error}. Or try --quick, which draws images of its own") from None
    # The first seed of all first: what is done when time is up can be compared.
    turns = [(case, seed) for case in setting.cases for seed in case.seeds]
    turns.sort(key=lambda turn: turn[1] != turn[0].seeds[0])
    return sweep(
        [
            trained(setting, case, path, method, seed)
            for case, seed in turns
            for method in setting.methods
        ],
        directory,
        tick,
    )


def trained(
    setting: Detectors, case: DetectorCase, path: str | None, method: str, seed: int
) -> Recipe:
    return make(
        case.recipe,
        method=method,
        topology=setting.topology,
        nodes=setting.nodes,
        data=setting.data,
        data_path=path,
        batch=setting.batch,
        image_size=setting.image_size,
        epochs=case.epochs,
        evaluate_every=case.epochs,
        lr=case.lr,
        stable="ignore",  # as printed, stable or not
        hyper=(("trust", setting.lars_trust),) if method == "pmsgd-lars" else (),
        seed=seed,
    )


def table(records: Sequence[Record]) -> list[Record]:
    """Return the shape of Table 6: a row per method, a column per detector; in %."""
    models = [model for model in NAMES if where(records, model=model)]
    rows = []
    for method in dict.fromkeys(r["method"] for r in records):
        row: Record = {"method": method}
        for key, head in ((AVERAGED, "AP50"), (NODES, "nodes' AP50"), (AVERAGED_AP, "AP")):
            for model in models:
                row[f"{head},_{NAMES[model]}"] = cell(
                    where(records, method=method, model=model), key
                )
        for data, theirs in paper.DETECTION[method].items():
            head = f"paper:_{data}_{'/'.join(NAMES[model] for model in models)}"
            row[head] = " / ".join(f"{theirs[NAMES[model]]:g}" for model in models)
        rows.append(row)
    return rows


def notes(setting: Detectors, records: Sequence[Record]) -> list[str]:
    cases = "; ".join(
        f"{case.recipe} {case.epochs:g} epochs at lr {case.lr:g}, seeds "
        f"{', '.join(map(str, case.seeds))}"
        for case in setting.cases
    )
    leads = "; ".join(
        f"{NAMES[model]} {lead_text(where(records, model=model), keys=(AVERAGED, NODES))}"
        for model in dict.fromkeys(r["model"] for r in records)
    )
    return [
        f"Images of {setting.data}, shorter side {setting.image_size} pixels; AP50 and AP@[.5:.95] "
        "by pycocotools in %, mean ± standard deviation over seeds, of the mean of all nodes' "
        "models; nodes' AP50 is the mean of their own models' ones. "
        f"Small backbones from scratch, {setting.nodes} nodes, {setting.topology}, iid shards, "
        f"batch {setting.batch}, momentum 0.9, the 1x schedule squeezed into these epochs: "
        f"{cases}. pmsgd-lars runs with trust {setting.lars_trust:g}.",
        f"DecentLaM's lead over DmSGD in points of AP50, seed by seed: {leads}.",
        "The paper's figures are of PASCAL VOC and COCO with ResNet-50-FPN, which starts from "
        "ImageNet weights, batch 256. Compare the order of methods, not the numbers.",
    ]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw a panel per detector: every seed of every method."""
    panels = {NAMES[m]: where(records, model=m) for m in dict.fromkeys(r["model"] for r in records)}
    return {"detection": dot_panels(panels, "data", (AVERAGED, NODES), "AP50 on test images, %")}


_SUMMARY = "average precision of two detectors trained by five methods (Table 6)"
STUDY = Study("detection", _SUMMARY, recipe, run, table, notes, figures, resumable=True)
