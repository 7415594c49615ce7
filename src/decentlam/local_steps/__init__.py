"""Averaging every H steps, with any torch optimizer in between."""

from decentlam.local_steps.local_steps import LocalSteps as LocalSteps
