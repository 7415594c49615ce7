"""Training: `train(recipe, directory)` on simulated nodes, local processes, or a launcher's."""

from __future__ import annotations

from decentlam.lab.train.run import Summary as Summary
from decentlam.lab.train.run import train as train
from decentlam.lab.train.stop import Stop as Stop
