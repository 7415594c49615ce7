"""Starting a run: torchrun, mpirun and srun are recognised, `launch` needs none of them."""

from __future__ import annotations

from decentlam.launch.group import init as init
from decentlam.launch.group import init_if_launched as init_if_launched
from decentlam.launch.local import launch as launch
from decentlam.launch.place import Place as Place
from decentlam.launch.place import find_place as find_place
