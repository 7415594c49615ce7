"""Decentralized data-parallel training: each node averages with a few neighbors every step."""

from __future__ import annotations

from decentlam import algorithms as algorithms
from decentlam import topology as topology
from decentlam.algorithms import ALGORITHMS as ALGORITHMS
from decentlam.errors import NonFiniteError as NonFiniteError
from decentlam.simulate import Nodes as Nodes
from decentlam.simulate import simulate as simulate
from decentlam.topology import TOPOLOGIES as TOPOLOGIES
from decentlam.topology import Topology as Topology

__version__ = "0.1.0"
