"""A cluster on one machine: hosts with limited links, what trains on them, and predicted times."""

from __future__ import annotations

from decentlam.lab.network.hosts import Host as Host
from decentlam.lab.network.hosts import hosts as hosts
from decentlam.lab.network.hosts import run_on as run_on
from decentlam.lab.network.hosts import unavailable as unavailable
