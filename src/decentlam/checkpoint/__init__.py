"""Checkpoints of a whole run: every node's model, momentum and random numbers, in one directory."""

from __future__ import annotations

from decentlam.checkpoint.run import Resumed as Resumed
from decentlam.checkpoint.run import load_checkpoint as load_checkpoint
from decentlam.checkpoint.run import save_checkpoint as save_checkpoint
from decentlam.checkpoint.saving import Saving as Saving
