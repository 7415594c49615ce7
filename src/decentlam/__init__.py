"""Decentralized data-parallel training: each node averages with a few neighbors every step."""

from __future__ import annotations

from decentlam import algorithms as algorithms
from decentlam import topology as topology
from decentlam.algorithms import ALGORITHMS as ALGORITHMS
from decentlam.checkpoint import Resumed as Resumed
from decentlam.checkpoint import load_checkpoint as load_checkpoint
from decentlam.checkpoint import save_checkpoint as save_checkpoint
from decentlam.errors import CheckpointError as CheckpointError
from decentlam.errors import ExchangeError as ExchangeError
from decentlam.errors import NonFiniteError as NonFiniteError
from decentlam.errors import StaleMessageError as StaleMessageError
from decentlam.launch import init as init
from decentlam.launch import launch as launch
from decentlam.methods import DSGD as DSGD
from decentlam.methods import AWCDmSGD as AWCDmSGD
from decentlam.methods import D2DmSGD as D2DmSGD
from decentlam.methods import DADmSGD as DADmSGD
from decentlam.methods import DecentLaM as DecentLaM
from decentlam.methods import DmSGD as DmSGD
from decentlam.methods import GTDmSGD as GTDmSGD
from decentlam.methods import PmSGD as PmSGD
from decentlam.methods import QGDmSGD as QGDmSGD
from decentlam.methods import SlowMo as SlowMo
from decentlam.methods import SteadyDecentLaM as SteadyDecentLaM
from decentlam.module import SimulatedModule as SimulatedModule
from decentlam.optimizer import DecentralizedOptimizer as DecentralizedOptimizer
from decentlam.simulate import Nodes as Nodes
from decentlam.simulate import simulate as simulate
from decentlam.stability import growth as growth
from decentlam.topology import TOPOLOGIES as TOPOLOGIES
from decentlam.topology import Topology as Topology

__version__ = "0.1.0"
