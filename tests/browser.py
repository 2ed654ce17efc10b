"""A real browser for tests: headless Chromium, spoken to over two pipes in its own protocol, with no other software.

    with Browser(tmp_path) as page:
        page.open(path)
        assert page.run("document.title") == "..."

Whatever the page logs as an error, throws, or asks of the network is kept in `errors` and `requests`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest

SECONDS = 30.0  # for any answer
FLAGS = [
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-quic", "--disable-crash-reporter", "--disable-breakpad", "--hide-scrollbars", "--mute-audio",
    "--no-default-browser-check",
]  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, home: Path, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        program = find_program()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._heard = b""
        self._number, self._answers = 0, dict[int, dict[str, Any]]()
        self._session: str | None = None
        its_in, self._out = _pipe()
        self._in, its_out = _pipe()
        command = [program, *FLAGS, f"--user-data-dir={home}", f"--window-size={width},{height}", "about:blank"]
        shell = [
            "bash",
            "-c",
            f'exec "$@" 3<&{its_in} 4>&{its_out}',
            "bash",
            *command,
        ]  # it listens on 3 and answers on 4
        self._process = subprocess.Popen(
            shell, pass_fds=(its_in, its_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, env=os.environ | {"HOME": str(home)},
        )  # fmt: skip
        os.close(its_in)
        os.close(its_out)
        try:
            self._attach(width, height, dark)
        except BaseException:
            self.close()
            raise

    def _attach(self, width: int, height: int, dark: bool) -> None:
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, place: Path | str) -> None:
        """A file, or an address."""
        self.call("Page.navigate", url=place if isinstance(place, str) else place.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        end = time.monotonic() + SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"{script} was not true within {SECONDS:.0f} s; errors: {self.errors}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of what is there."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while self._number not in self._answers:
            self._listen(method, end)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return dict(answer["result"])

    def _listen(self, method: str, end: float) -> None:
        ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"Chromium did not answer {method} within {SECONDS:.0f} s"
        data = os.read(self._in, 1 << 20)
        assert data, f"Chromium ended while asked for {method}"
        *messages, self._heard = (self._heard + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._happened(message["method"], message["params"])

    def _happened(self, method: str, what: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent" and not what["request"]["url"].startswith(("data:", "blob:")):
            self.requests.append(what["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(what["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(what["args"])[:500])
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(what["entry"]["text"])

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(SECONDS)
        os.close(self._in)
        os.close(self._out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_program() -> str:
    """Chromium or Chrome. Where there is neither the test that asks is skipped; it fails where CI=true."""
    if found := shutil.which("chromium") or shutil.which("google-chrome"):
        return found
    missing = "there is no browser to test pages with; install chromium or google-chrome"
    if os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


def _pipe() -> tuple[int, int]:
    """With numbers above 9, so that they are not in the way of 3 and 4."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
