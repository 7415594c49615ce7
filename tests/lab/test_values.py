"""Errors that a run can end with, in a line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.lab.values import explained


def run_out_of_memory() -> None:
    decentlam.init()
    if dist.get_rank() == 1:
        torch.empty(1 << 50)
    dist.barrier()


@pytest.mark.system
def test_no_memory_on_one_node_is_named_and_ends_all() -> None:
    with pytest.raises(decentlam.LaunchError, match="node 1 failed") as caught:
        decentlam.launch(run_out_of_memory, 2)
    text = explained(caught.value.__cause__)
    assert text is not None and text.startswith("out of memory: ") and "--micro-batch" in text
