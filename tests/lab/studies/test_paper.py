"""The paper's own numbers."""

from __future__ import annotations

from decentlam.lab.studies import paper


def test_the_papers_tables_agree_with_each_other():
    for method, row in paper.MODELS["resnet50"].items():
        assert row == {batch: round(paper.IMAGENET[method][batch], 1) for batch in row}
    ours = paper.IMAGENET["decentlam"]
    assert paper.TOPOLOGIES["symmetric-exponential"] == {b: ours[b] for b in ("16K", "32K")}
    for row in paper.IMAGENET.values():
        assert all(value <= ours[batch] for batch, value in row.items())
