"""`launch(fn, nodes=4)`: a run on this machine from Python, without any launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decentlam.launch.place import LAUNCHED, LOOPBACK
from decentlam.launch.processes import pickled, run_processes, variables


def launch(
    fn: Callable[..., Any],
    nodes: int,
    args: tuple[Any, ...] = (),
    backend: str = "gloo",
    timeout_seconds: float = 1800.0,
    *,
    elastic: bool = False,
) -> list[Any]:
    """Runs fn(*args) in `nodes` local processes that form one group; returns their results.

    If one fails, the others are stopped and the traceback of the first failure is raised. `fn`
    must be importable; arguments and results are copied. The rendezvous store is in this process,
    so that it outlives any node. When this process ends, however it ends, so do the nodes.

    Args:
        fn: A function at the top level of a module, or of a script that calls `launch` under
            `if __name__ == "__main__":`. One that was typed into a notebook, `python -c` or
            standard input is refused: no other process can import it.
        nodes: Number of processes.
        args: What each of them passes to `fn`.
        backend: gloo, or nccl with a GPU per process.
        timeout_seconds: Of the group's collectives.
        elastic: A process that is killed is started again and joins the others, which go on
            meanwhile (docs/survive.md). Results are those of the processes that came to an end.
    """
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ValueError(f"nodes must be a whole number of 1 or more, got {nodes!r}")
    if elastic:
        from decentlam.launch.supervise import supervise

        return supervise(fn, nodes, args, timeout_seconds=timeout_seconds)
    work = pickled(fn, args)  # refused before torch is imported, which takes long
    from decentlam.membership.spare import open_store

    store = open_store(LOOPBACK)
    shared = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHED: "1",
    }
    environments = [variables(rank, nodes, local=True) | shared for rank in range(nodes)]
    return run_processes(work, environments, backend, timeout_seconds)
