"""A run while it trains: its page, served on this machine, or a line per node in the terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

from decentlam.lab.report import page
from decentlam.lab.report.content import content
from decentlam.lab.report.nodes import Nodes
from decentlam.lab.report.runs import UNFINISHED, read
from decentlam.lab.values import Record, plain, table_text

EVERY_SECONDS = 2.0
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Source:
    """The values of a run's page, read anew at most every two seconds."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._nodes = directory, Nodes(directory)
        self._lock, self._read, self._values = threading.Lock(), 0.0, Record()

    def values(self) -> Record:
        with self._lock:
            if not self._values or time.monotonic() - self._read > EVERY_SECONDS:
                self._values = self._fresh()
                self._read = time.monotonic()
            return self._values

    def _fresh(self) -> Record:
        try:
            run = read(self._directory)
        except (OSError, ValueError) as error:
            if self._values:
                return self._values
            absent = isinstance(error, FileNotFoundError)
            return _waiting(self._directory, "Nothing is written yet." if absent else str(error))
        processes = self._nodes.follow()
        ended = processes and all(process.last["ended"] for process in processes)
        live = run.status == UNFINISHED and not ended
        values = content([run], processes)
        if live:
            values["notes"] = [note for note in values["notes"] if "no end record" not in note]
        fresh: Record = plain({**values, "live": EVERY_SECONDS if live else None})
        return fresh


def _waiting(directory: Path, why: str) -> Record:
    """Return a page that says that there is nothing yet."""
    lists = ("notes", "settings", "columns", "groups", "charts")
    return {
        **{name: [] for name in lists},
        "title": f"{directory.name}: not begun",
        "lead": why,
        "facts": {},
        "now": None,
        "axis": "step",
        "scripted": True,
        "live": EVERY_SECONDS,
    }


@contextmanager
def serving(directory: Path, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve the page of the run in this directory, and nothing else; yield its address."""
    source = Source(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            if host in _LOCAL and name not in _LOCAL:  # another site's name for this machine
                return self.send_error(HTTPStatus.FORBIDDEN)
            if self.path == "/":
                return self._send("text/html", page(source.values()))
            if self.path == "/values":
                return self._send("application/json", json.dumps(source.values()))
            self.send_error(HTTPStatus.NOT_FOUND)

        def _send(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing of requests."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}; try another --port") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="decentlam watch", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def show_in_terminal(directory: Path, out: TextIO = sys.stdout) -> None:
    """Print a line per node, the latest first, until the run ends or Ctrl-C."""
    source = Source(directory)
    while True:
        values = source.values()
        if out.isatty():
            out.write("\x1b[H\x1b[J")  # in place of what was shown before
        print(_text(values), file=out, flush=True)
        if not values["live"]:
            return
        time.sleep(EVERY_SECONDS)


def _text(values: Record) -> str:
    state = values["now"]
    if state is None:
        return "Nothing is written yet." if values["live"] else "Nothing was written."
    rows = [
        {
            "node": row["name"],
            "state": row["state"],
            "late": f"{row['late']:+.0%}",
            "step": row["step"],
            "loss": row["loss"],
            "a step": row["whole"],
            "waiting": f"{row['split'][-1] / (sum(row['split']) or 1.0):.0%}",
        }
        for row in state["nodes"]
    ]
    numbers = [f"{what} {value}  {more}".rstrip() for what, value, more in state["numbers"]]
    text = "\n".join([*numbers, "", table_text(rows), *state["warnings"]])
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
