"""A small client of a browser without a window, by the DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT = 60.0


def find() -> str | None:
    """The first browser of this family on the path."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One process tree; pages come from :meth:`open`.

    Args:
        executable: of chromium.
        profile: an empty directory.
    """

    def __init__(self, executable: str, profile: Path) -> None:
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()
        # The protocol's pipes are descriptors 3 and 4, so they must come from above those.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_commands, write_answers)]
        self._log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [
                executable,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--no-proxy-server",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile / 'data'}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            close_fds=False,
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[1], 4)),
        )
        for end in (read_commands, write_answers, *ends):
            os.close(end)
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def open(self, path: Path, *, width: int, dark: bool = False) -> Iterator[Page]:
        """A page of that width, once its charts are drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            yield Page(self, session, path, width, dark)
        finally:
            self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer; events that come before it are kept."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self._next(deadline)
            if answer.get("id") != number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                return answer["result"]

    def close(self) -> list[int]:
        """End it, and return the ids of all processes that it had."""
        tree = psutil.Process(self._process.pid).children(recursive=True)
        os.write(self._write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            self._process.wait(timeout=30)
        finally:
            for process in [self._process, *tree]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
            os.close(self._write)
            os.close(self._read)
            self._log.close()
        return [self._process.pid, *(child.pid for child in tree)]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._read, 1 << 20) if ready else b""
            if not received:
                raise RuntimeError(f"{self._process.args} does not answer; see {self._log.name}")
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """One page, as its reader has it."""

    def __init__(self, browser: Browser, session: str, path: Path, width: int, dark: bool) -> None:
        self._browser, self._session = browser, session
        for domain in ("Runtime", "Log", "Network", "Page"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.set_dark(dark)
        self._call("Page.navigate", url=path.as_uri())
        self.wait_for("document.documentElement?.dataset.drawn === 'yes'")

    def set_dark(self, dark: bool) -> None:
        """What the reader's system prefers."""
        value = "dark" if dark else "light"
        feature = {"name": "prefers-color-scheme", "value": value}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + TIMEOUT
        while not self.value(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"still not: {expression}; events: {self._browser.events}")
            time.sleep(0.05)

    def click(self, element: str) -> None:
        """With a mouse, in the middle of what a JavaScript expression gives."""
        self.value(f"({element}).scrollIntoView({{block: 'center', inline: 'center'}})")
        box = self.value(f"({element}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def press(self, key: str, text: str = "") -> None:
        """A key, wherever the focus is."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        event = {"key": key, "windowsVirtualKeyCode": codes[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        image = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and exceptions that nobody caught."""
        return [
            json.dumps(event["params"])
            for event in self._events(
                lambda method, params: (
                    method == "Runtime.exceptionThrown"
                    or (
                        method == "Runtime.consoleAPICalled"
                        and params["type"] in ("error", "warning", "assert")
                    )
                    or (
                        method == "Log.entryAdded"
                        and params["entry"]["level"] in ("error", "warning")
                    )
                )
            )
        ]

    def requests(self) -> list[str]:
        """Every address that it asked for."""
        events = self._events(lambda method, _: method == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in events]

    def _events(self, wanted: Callable[[str, dict[str, Any]], bool]) -> list[dict[str, Any]]:
        return [
            event
            for event in self._browser.events
            if event.get("sessionId") == self._session
            and wanted(event.get("method", ""), event.get("params", {}))
        ]

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, session=self._session, **params)
