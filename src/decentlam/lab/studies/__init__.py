"""The studies of the paper, and one of text: what `decentlam reproduce` runs."""

from __future__ import annotations

from decentlam.lab.studies import (
    bias,
    detection,
    large_batch,
    models,
    regression,
    runtime,
    speedup,
    text,
    topologies,
)
from decentlam.lab.studies.study import Study

STUDIES: dict[str, Study] = {
    "regression": regression.STUDY,
    "bias": bias.STUDY,
    "speedup": speedup.STUDY,
    "large-batch": large_batch.STUDY,
    "models": models.STUDY,
    "topologies": topologies.STUDY,
    "detection": detection.STUDY,
    "runtime": runtime.STUDY,
    "text": text.STUDY,
}
