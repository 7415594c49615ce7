"""The study of topologies."""

from __future__ import annotations

from dataclasses import replace

from decentlam.lab.studies import topologies
from tests.lab.studies.test_common import record


def test_a_method_that_diverges_has_its_row_and_its_place_in_the_figure():
    lost = {"status": "diverged", "averaged_top1": None, "nodes_top1": None, "growth": 1.066}
    match = "bipartite-random-match"
    records = [
        record(topology=match, method="dmsgd"),
        record(topology=match, **lost),
        record(topology=match, method="decentlam-steady"),
    ]
    rows = {row["method"]: row for row in topologies.table(records)}
    assert rows["decentlam"]["averaged,_batch_8"] == "diverges at step 9"
    setting = replace(topologies.recipe(quick=True), batches=(8,), topologies=(match,))
    notes = " ".join(topologies.notes(setting, records))
    assert "decentlam on bipartite-random-match multiplies the disagreement by 1.066" in notes
    assert "1 of 1 runs end in numbers that are not finite" in notes
    texts = [t.get_text() for t in topologies.figures(records)["topologies"].axes[0].texts]
    assert texts == ["DecentLaM diverges"]
