"""Starting a run: torchrun, mpirun and srun are recognised, and `launch` needs none of them.

Importing this does not import torch, because every command imports the package's front page.
"""

from __future__ import annotations

from decentlam.launch.environment import LaunchedProcess as LaunchedProcess
from decentlam.launch.environment import launched_process as launched_process
from decentlam.launch.local import launch as launch
