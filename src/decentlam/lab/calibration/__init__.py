"""The constants of the cost model, fitted to what the emulated networks measured."""

from __future__ import annotations

from decentlam.lab.calibration.fit import Error as Error
from decentlam.lab.calibration.fit import check as check
from decentlam.lab.calibration.fit import fit as fit
from decentlam.lab.calibration.fit import held_out as held_out
from decentlam.lab.calibration.fit import load_calibration as load_calibration
from decentlam.lab.calibration.fit import save_calibration as save_calibration
from decentlam.lab.calibration.measurements import Measurement as Measurement
from decentlam.lab.calibration.measurements import load_measurements as load_measurements
