"""What an iteration costs on a network: predicted, and used to choose."""

from __future__ import annotations

from decentlam.analysis.cost.automatic import Criteria as Criteria
from decentlam.analysis.cost.automatic import automatic as automatic
from decentlam.analysis.cost.automatic import candidates as candidates
from decentlam.analysis.cost.automatic import choose_topology as choose_topology
from decentlam.analysis.cost.automatic import disagreement as disagreement
from decentlam.analysis.cost.links import measure_links as measure_links
from decentlam.analysis.cost.model import Calibration as Calibration
from decentlam.analysis.cost.model import predict as predict
from decentlam.analysis.cost.model import straggler_wait as straggler_wait
from decentlam.analysis.cost.pipeline import timeline as timeline
from decentlam.analysis.cost.values import Compute as Compute
from decentlam.analysis.cost.values import Delays as Delays
from decentlam.analysis.cost.values import Iteration as Iteration
from decentlam.analysis.cost.values import Job as Job
from decentlam.analysis.cost.values import Link as Link
