"""These tests need the frameworks: `make test-frameworks` installs them and runs the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations import launched


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the plain loop leaves, started by torchrun."""
    out = tmp_path_factory.mktemp("plain")
    launched.run(launched.TORCHRUN, "work.py", out)
    return out


@pytest.fixture(scope="session")
def sockets() -> Iterator[str]:
    """A directory with a short name: the path of a socket has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        yield place
