"""A cluster on one machine: hosts with limited links, and functions that run on all of them."""

from __future__ import annotations

from decentlam.lab.emulation.hosts import Host as Host
from decentlam.lab.emulation.hosts import bits_per_second as bits_per_second
from decentlam.lab.emulation.hosts import hosts as hosts
from decentlam.lab.emulation.hosts import unavailable as unavailable
from decentlam.lab.emulation.processes import run_on as run_on
