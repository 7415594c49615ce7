"""A save on its way to the disk, by a thread beside training."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from decentlam.checkpoint import directory, state
from decentlam.checkpoint.all_processes import on_all_processes, on_process_0
from decentlam.errors import CheckpointError
from decentlam.network.network import Network

log = logging.getLogger(__name__)

_VISIBLE_SECONDS = 60.0  # until a file of another host must be seen; NFS looks that seldom
_running: list[Saving] = []  # at most one


class Saving:
    """The result of `save_checkpoint`. In the background it writes while training goes on."""

    def __init__(
        self,
        network: Network,
        path: Path,
        meta: directory.Meta,
        content: state.Content,
        keep: int,
        background: bool,
    ) -> None:
        """Begin a save, on all processes together, after each has called `settle`."""
        begun = on_process_0(network, lambda: str(directory.begin(path, meta["step"])))
        place, number = network.gather((begun, time.time_ns()))[0]
        if background:
            content = on_all_processes(network, lambda: state.copied(content))
        meta = {**meta, "save": number, "rank": network.rank}
        self._network, self._place, self._keep = network, Path(place), keep
        writer = ThreadPoolExecutor(1, "decentlam checkpoint")  # who ends waits for it
        self._written = writer.submit(self._write, meta, content)
        writer.shutdown(wait=False)
        if background:
            _running.append(self)
        else:
            self.wait()

    def wait(self) -> None:
        """Return when the checkpoint counts; every process must call it. If one could not write
        its part, all raise the error, and the checkpoint before is still there."""
        on_all_processes(self._network, self._result)
        on_process_0(self._network, self._finish)

    def _result(self) -> None:
        """Raise a failure here, so that `settle` need not tell it again."""
        self._written.exception()
        if self in _running:
            _running.remove(self)
        self._written.result()

    def _write(self, meta: directory.Meta, content: state.Content) -> None:
        try:
            directory.write(self._place, meta, content)
            directory.commit(self._place, self._network.num_processes, self._keep)
        except OSError as error:
            text = f"{self._place} cannot be written: {error.strerror or error}"
            raise CheckpointError(text) from error

    def _finish(self) -> None:
        """Do what the last writer should have done, but may not have seen the others' files."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not directory.commit(self._place, self._network.num_processes, self._keep):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"process 0 does not see everyone's files in {self._place}; "
                    f"{self._place.parent} must be on a file system that all hosts share"
                )
            time.sleep(0.1)


def settle() -> None:
    """Wait for what this process still writes; log a failure that nobody waited for."""
    while _running:
        failure = _running.pop()._written.exception()
        if failure is not None:
            log.warning("the last checkpoint could not be written: %s", failure)
