"""The ways to train that are compared, which live in the lab: `reproduce runtime` has them too."""

from __future__ import annotations

from decentlam.lab.emulation.contenders import contenders as contenders
from decentlam.lab.emulation.models import make_model as make_model
from decentlam.lab.emulation.training import LR as LR
from decentlam.lab.emulation.training import MOMENTUM as MOMENTUM
