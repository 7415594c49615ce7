"""What an iteration costs on a network: predicted, calibrated by measurement, used to choose."""

from __future__ import annotations

from decentlam.cost.automatic import Criteria as Criteria
from decentlam.cost.automatic import automatic as automatic
from decentlam.cost.automatic import candidates as candidates
from decentlam.cost.automatic import choose_topology as choose_topology
from decentlam.cost.automatic import disagreement as disagreement
from decentlam.cost.calibrate import Error as Error
from decentlam.cost.calibrate import check as check
from decentlam.cost.calibrate import fit as fit
from decentlam.cost.calibrate import held_out as held_out
from decentlam.cost.calibrate import load_calibration as load_calibration
from decentlam.cost.calibrate import save_calibration as save_calibration
from decentlam.cost.links import measure_links as measure_links
from decentlam.cost.measurements import Measurement as Measurement
from decentlam.cost.measurements import load_measurements as load_measurements
from decentlam.cost.model import Calibration as Calibration
from decentlam.cost.model import predict as predict
from decentlam.cost.pipeline import timeline as timeline
from decentlam.cost.stragglers import straggler_wait as straggler_wait
from decentlam.cost.values import Compute as Compute
from decentlam.cost.values import Delays as Delays
from decentlam.cost.values import Iteration as Iteration
from decentlam.cost.values import Job as Job
from decentlam.cost.values import Link as Link
from decentlam.cost.values import parse_bandwidth as parse_bandwidth
