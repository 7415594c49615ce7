"""What the tests of elastic runs leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from decentlam.network import heartbeat


@pytest.fixture(autouse=True)
def no_heartbeat_is_left() -> Iterator[None]:
    yield
    heartbeat.stop()
