"""`python -m decentlam.launch.store`."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import runs
import torch.distributed as dist

from decentlam.launch.store import main


def test_a_store_of_its_own_serves_until_it_is_stopped() -> None:
    command = [sys.executable, "-m", "decentlam.launch.store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = dict(word.split("=") for word in process.stdout.readline().split())
            assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True"
            port = int(told["MASTER_PORT"])
            store = dist.TCPStore(told["MASTER_ADDR"], port, is_master=False)
            store.set("a", "1")
            assert store.get("a") == b"1"
            with pytest.raises(SystemExit, match="2"):  # the port is taken
                main(["--host", "127.0.0.1", "--port", str(port)])
            process.send_signal(signal.SIGINT)
            assert process.wait(runs.HANG_SECONDS) == 130
        finally:
            process.kill()


def test_an_address_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--host", "203.0.113.1"])
    assert "cannot listen at 203.0.113.1:29500: " in capsys.readouterr().err
