"""The studies of the paper that need no training data."""

from __future__ import annotations

from decentlam.lab.studies import bias, regression, speedup
from decentlam.lab.study import Study

STUDIES: dict[str, Study] = {
    "regression": regression.STUDY,
    "bias": bias.STUDY,
    "speedup": speedup.STUDY,
}
