"""A headless Chromium for tests of pages, driven over the W3C WebDriver protocol and no library."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference, fixed by the standard
_ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@dataclass(frozen=True)
class Browser:
    """One window; every method is one or two requests to the driver."""

    session: str  # address of the session

    def open(self, page: Path) -> None:
        self.visit(page.resolve().as_uri())

    def visit(self, address: str) -> None:
        self.messages()
        self.requests()  # forget what earlier pages said and asked for
        self.post("url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns in the page."""
        return self.post("execute/sync", script=script, args=list(arguments))

    def find(self, selector: str) -> dict[str, str]:
        """A reference to the first element that matches, for `run` and `hover`."""
        found: dict[str, str] = self.post("element", using="css selector", value=selector)
        return found

    def click(self, selector: str) -> None:
        self.post(f"element/{self.find(selector)[ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        self.post(f"element/{self.find(selector)[ELEMENT]}/value", text=text)

    def hover(self, selector: str, across: float, down: float = 0.5) -> None:
        """Moves the mouse over the element, to these shares of its width and height."""
        target = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", target)
        box = self.run("return arguments[0].getBoundingClientRect().toJSON()", target)
        x, y = (box["left"] + across * box["width"], box["top"] + down * box["height"])
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        self.post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def text(self, selector: str) -> str:
        text: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return text

    def texts(self, selector: str) -> list[str]:
        read = "(element) => element.innerText ?? element.textContent"  # SVG has no innerText
        script = f"return [...document.querySelectorAll(arguments[0])].map({read})"
        texts: list[str] = self.run(script, selector)
        return texts

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol, for what WebDriver cannot: dark mode, no scripts."""
        return self.post("goog/cdp/execute", cmd=command, params=parameters)

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, kind: str = "", scheme: str = "light") -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", media=kind, features=features)

    def messages(self) -> list[str]:
        """What the console got since the last call, errors of the browser included."""
        return [entry["message"] for entry in self.post("se/log", type="browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        events = [
            json.loads(e["message"])["message"] for e in self.post("se/log", type="performance")
        ]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def post(self, command: str, **body: Any) -> Any:
        return _request("POST", f"{self.session}/{command}", body)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser with a profile of its own; skips the test where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    chromium = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "NO BROWSER: the page was not looked at. Install chromium and chromedriver "
            "(Debian: chromium, chromium-driver)."
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _started(driver) as at:
        options = {
            "binary": chromium,
            "args": [*_ARGUMENTS, f"--user-data-dir={profile}", *_sandbox()],
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": 300_000, "pageLoad": 300_000, "implicit": 0},
        }
        body = {"capabilities": {"alwaysMatch": wanted}}
        session = f"{at}/session/{_request('POST', f'{at}/session', body)['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _request("DELETE", session)


def _sandbox() -> list[str]:
    return ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root its sandbox


@contextlib.contextmanager
def _started(driver: str) -> Iterator[str]:
    with subprocess.Popen(
        [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"started successfully on port (\d+)", line):
                    yield f"http://127.0.0.1:{found[1]}"
                    return
            raise RuntimeError("chromedriver did not start")
        finally:
            process.terminate()


def _request(method: str, address: str, body: dict[str, Any] | None = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, content, headers, method=method)
    try:
        with _DIRECT.open(request, timeout=400) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            problem = json.load(error)["value"]
        raise AssertionError(f"{problem['error']}: {problem['message']}") from None


# The driver is on this machine: no proxy of the environment may come between.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
