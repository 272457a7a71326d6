"""A real Chromium without a window, driven over a pipe by its own protocol (CDP): look, click, drag, pinch, type.

Nothing but the browser itself is needed: requests go in on file descriptor 3, answers and events come out on 4, each
ended by a NUL.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0


def installed() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with a profile of its own."""

    def __init__(self) -> None:
        program = installed()
        assert program is not None
        self._home = Path(tempfile.mkdtemp(prefix="sc-browser-", dir="/tmp"))
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out))

        def give() -> None:
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            [
                program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._home}", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
                "--disable-component-update", "--disable-sync", "--disable-extensions", "--mute-audio",
                "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4),
            preexec_fn=give, env={**os.environ, "HOME": str(self._home)},
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, high_in, high_out):
            os.close(fd)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of one request; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, event: str, session: str) -> dict[str, Any]:
        """The next event of that name; one that came before counts."""
        while True:
            for one in self.events:
                if one.get("method") == event and one.get("sessionId") == session:
                    self.events.remove(one)
                    return dict(one["params"])
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str, **how: Any) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, target, session, url, **how)

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for fd in (self._to, self._from):
            os.close(fd)
        for _ in range(50):  # its children may be writing still
            shutil.rmtree(self._home, ignore_errors=True)
            if not self._home.exists():
                break
            time.sleep(0.05)


class Tab:
    """One page, and everything it complained about or asked the network for."""

    def __init__(self, browser: Browser, target: str, session: str, url: str, *, width: int = 1200, height: int = 900,
                 phone: bool = False, dark: bool = False, script: bool = True) -> None:  # fmt: skip
        self.browser, self.target, self.session = browser, target, session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
                  deviceScaleFactor=2 if phone else 1)  # fmt: skip
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone, maxTouchPoints=5 if phone else 1)
        self.media(dark=dark)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=url)
        browser.wait_for("Page.loadEventFired", session)
        if script:
            self.drawn()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def media(self, *, dark: bool = False, medium: str = "") -> None:
        """How the page is looked at: in the dark, or on paper (`print`)."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def js(self, code: str) -> Any:
        """The value of an expression, awaited."""
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def drawn(self) -> None:
        """Waits until what was changed has been drawn."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """(left, top, width, height) of an element, once it is in view."""
        code = (
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', behavior: 'instant'}); const box = one.getBoundingClientRect();"
            "return [box.x, box.y, box.width, box.height]; })()"
        )
        left, top, width, height = self.js(code)
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str) -> None:
        left, top, width, height = self.box(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, left + width / 2, top + height / 2, button="left", clickCount=1)
        self.drawn()

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.drawn()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, button="left", clickCount=1)
        for part in (0.5, 1.0):
            self.mouse("mouseMoved", start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part,
                       button="left", buttons=1)  # fmt: skip
        self.mouse("mouseReleased", *end, button="left", clickCount=1)
        self.drawn()

    def wheel(self, x: float, y: float, delta: float, *, ctrl: bool = False) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=delta, modifiers=2 if ctrl else 0)
        self.drawn()

    def touch(self, *fingers: list[tuple[float, float]]) -> None:
        """Each finger's way, point by point, all at the same time."""
        for number, points in enumerate(zip(*fingers, strict=True)):
            self.call("Input.dispatchTouchEvent", type="touchMove" if number else "touchStart",
                      touchPoints=[{"x": x, "y": y, "id": id} for id, (x, y) in enumerate(points)])  # fmt: skip
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.drawn()

    def key(self, name: str, text: str = "") -> None:
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.drawn()

    def picture(self, path: Path, *, whole: bool = False) -> Path:
        """A PNG of what is in view, or of the whole page."""
        done = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(done["data"]))
        return path

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    @property
    def requests(self) -> list[str]:
        """Everything that the page has asked for, itself included."""
        return [str(one["params"]["request"]["url"]) for one in self._told("Network.requestWillBeSent")]

    @property
    def complaints(self) -> list[str]:
        """What stands in its console as a warning or an error, and what was thrown."""
        logged = [one["params"]["entry"] for one in self._told("Log.entryAdded")]
        called = [one["params"] for one in self._told("Runtime.consoleAPICalled")]
        thrown = [one["params"]["exceptionDetails"] for one in self._told("Runtime.exceptionThrown")]
        bad = [entry for entry in logged if entry["level"] in ("warning", "error")]
        bad += [entry for entry in called if entry["type"] in ("warning", "error", "assert")]
        return [json.dumps(entry) for entry in bad + thrown]

    def _told(self, event: str) -> list[dict[str, Any]]:
        self.js("0")  # events come in order with answers
        return [
            one for one in self.browser.events if one.get("method") == event and one.get("sessionId") == self.session
        ]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
