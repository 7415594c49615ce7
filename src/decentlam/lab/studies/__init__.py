"""The studies of the paper, and two of unlike data: what `decentlam reproduce` runs."""

from __future__ import annotations

from decentlam.lab.studies import (
    accuracy,
    bias,
    regression,
    runtime,
    text,
    unlike,
)
from decentlam.lab.studies.study import Study

STUDIES: dict[str, Study] = {
    "regression": regression.STUDY,
    "bias": bias.STUDY,
    "large-batch": accuracy.LARGE_BATCH,
    "models": accuracy.MODELS,
    "topologies": accuracy.TOPOLOGIES,
    "detection": accuracy.DETECTION,
    "runtime": runtime.STUDY,
    "text": text.STUDY,
    "unlike": unlike.STUDY,
}
