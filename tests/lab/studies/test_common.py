"""Accuracies over seeds."""

from __future__ import annotations

import pytest

from decentlam.lab import plot_style
from decentlam.lab.studies.common import METHODS, cell, leads, mean_and_spread, signed
from decentlam.lab.studies.study import Record


def record(**values: object) -> Record:
    return {
        "method": "decentlam",
        "model": "mlp",
        "data": "digits",
        "shards": "iid",
        "topology": "ring",
        "batch": 8,
        "lr": 0.1,
        "seed": 0,
        "status": "finished",
        "step": 9,
        "averaged_top1": 0.5,
        "nodes_top1": 0.25,
        "case": "ring",
        "chosen": True,
        "paper": None,
        **values,
    }


def test_cells_leads_and_verdicts():
    runs = [record(seed=s, averaged_top1=0.5 + s / 100) for s in range(3)]
    assert mean_and_spread([50.0, 51.0, 52.0]) == (51.0, 1.0)
    assert cell(runs) == "51.00 ± 1.00"
    assert cell(runs[:1]) == "50.00"
    assert cell([]) is None
    lost = record(averaged_top1=None, nodes_top1=None, status="diverged", step=5)
    assert cell([lost, lost | {"step": 7}]) == "diverges at step 5 to 7"
    assert cell([*runs[:2], lost]) == "50.50 ± 0.71, 1 of 3 diverge"
    others = [record(method="dmsgd", seed=s, averaged_top1=0.4) for s in (0, 2)]
    found = leads([*runs, *others, lost | {"method": "dmsgd", "seed": 1}], "decentlam", "dmsgd")
    assert found == pytest.approx([10.0, 12.0])
    assert signed(found) == "+11.00 ± 1.41"
    assert signed([]) == "none to compare"


def test_every_method_of_the_studies_has_a_look():
    for method in (*METHODS, "decentlam-steady"):
        assert plot_style.line(method)["color"] and plot_style.label(method)
