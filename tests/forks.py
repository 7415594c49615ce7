"""The fork server: processes that have torch already, which costs a new interpreter seconds."""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")

# One list for all test files, because the server that the first of them starts serves the rest.
# The first optimizer of a process would import torch._dynamo.
context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.run",
        "sklearn.model_selection",
        "decentlam.lab.train",
        "decentlam.launch.group",
    ]
)


def as_in_an_interpreter() -> None:
    """Called in such a process: its own children would else each have a server like this one."""
    multiprocessing.set_start_method("fork", force=True)
