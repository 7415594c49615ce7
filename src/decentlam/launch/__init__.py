"""Starting a run: torchrun, mpirun and srun are recognised, `launch` needs none of them.

Importing this imports no torch: the package's front page does it for every command.
"""

from __future__ import annotations

from decentlam.launch.local import launch as launch
from decentlam.launch.place import Place as Place
from decentlam.launch.place import find_place as find_place
