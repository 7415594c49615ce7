"""A store in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from decentlam.elastic.store import main
from tests.helpers.processes import HANG_SECONDS
from tests.helpers.scripts import fork


def test_a_store_of_its_own_serves_until_it_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "output"
    process = fork(main, out, ["--host", "127.0.0.1", "--port", "0"], PYTHONUNBUFFERED="1")
    assert process.pid is not None
    try:
        while not (out.exists() and "\n" in out.read_text()):
            assert process.is_alive()
            time.sleep(0.02)
        told = dict(word.split("=") for word in out.read_text().splitlines()[0].split())
        assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        port = int(told["MASTER_PORT"])
        store = dist.TCPStore(told["MASTER_ADDR"], port, is_master=False)
        store.set("a", "1")
        assert store.get("a") == b"1"
        with pytest.raises(SystemExit, match="2"):  # the port is taken
            main(["--host", "127.0.0.1", "--port", str(port)])
        os.kill(process.pid, signal.SIGINT)
        process.join(HANG_SECONDS)
        assert process.exitcode == 130
    finally:
        process.kill()


def test_an_address_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--host", "203.0.113.1"])
    assert "cannot listen at 203.0.113.1:29500: " in capsys.readouterr().err
