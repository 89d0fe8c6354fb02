"""Headless Chromium, controlled through a pipe (DevTools protocol) without a driver or another package."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_OLD = Path(__file__).resolve().parents[1] / "old_format"
CLASSIFIER, LANGUAGE = _OLD / "classifier-v1" / "bundle", _OLD / "language-v1" / "bundle"
"""Bundles: a classifier with exits, INT8 and a trimmed vocabulary; a language model with external weights."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ELSEWHERE = "elsewhere.test"
"""A name of this machine that browsers do not treat as localhost."""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio",
    "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    # No network: no other name or address resolves.
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


class Tab:
    """A tab of a browser; records requests and errors.

    Attributes:
        requests: addresses, in order.
        complaints: errors of scripts, of the content security policy and of downloads.
    """

    def __init__(self, browser: "Browser", session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        return self._browser.send(method, parameters, self._session, self)

    def open(self, address: str) -> None:
        """Open an address and wait until the page has started."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && !document.getElementById('main')?.hidden")

    def close(self) -> None:
        """Close the tab with its workers, storage and cache."""
        self._browser.send("Target.disposeBrowserContext", {"browserContextId": self._context})

    def run(self, expression: str) -> Any:
        """Return the value of an expression or promise; an exception fails the test."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        reply = self.send("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in reply:
            details = reply["exceptionDetails"]
            pytest.fail(details.get("exception", {}).get("description", details["text"]))
        return reply["result"].get("value")

    def wait(self, expression: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                text = self.run("document.body?.innerText.slice(0, 2000)")
                pytest.fail(f"{expression}: not within {seconds} s; {self.complaints}; the page says: {text}")
            time.sleep(0.02)

    def handle_event(self, method: str, parameters: dict[str, Any]) -> None:
        """Record an event of this tab."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]["exception"].get("description")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])


class Browser:
    """A running browser."""

    def __init__(self, process: subprocess.Popen[bytes], write_fd: int, read_fd: int) -> None:
        self._process = process
        self._output, self._input = os.fdopen(write_fd, "wb", buffering=0), os.fdopen(read_fd, "rb", buffering=0)
        self._buffer = b""
        self._count = 0
        self._tabs: dict[str, Tab] = {}

    def new_tab(self) -> Tab:
        """Open an empty tab with its own storage and cache."""
        context = self.send("Target.createBrowserContext", {})["browserContextId"]
        target = self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._tabs[session] = tab = Tab(self, session, context)
        return tab

    def send(
        self, method: str, parameters: dict[str, Any], session: str | None = None, tab: Tab | None = None
    ) -> dict[str, Any]:
        """Send a command and return its result; events that arrive first go to their tabs."""
        self._count += 1
        document = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            document["sessionId"] = session
            if tab is not None:
                self._tabs.setdefault(session, tab)
        self._output.write(json.dumps(document).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if answer.get("sessionId") in self._tabs:
                self._tabs[answer["sessionId"]].handle_event(answer["method"], answer.get("params", {}))

    def close(self) -> None:
        """Close the pipe, not the process."""
        self._output.close()
        self._input.close()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = self._input.read(1 << 16)
            assert piece, f"the browser ended with exit code {self._process.poll()}"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def headless() -> Iterator[Browser]:
    """Start a browser; skip the test if none is installed."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None or os.name == "nt":
        pytest.skip(f"needs one of {', '.join(_NAMES)}")
    (browser_in, our_out), (our_in, browser_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{browser_in} 4>&{browser_out}'
        command = ["bash", "-c", script, program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, pass_fds=(browser_in, browser_out), stderr=subprocess.DEVNULL)
        os.close(browser_in)
        os.close(browser_out)
        browser = Browser(process, our_out, our_in)
        try:
            yield browser
        finally:
            process.terminate()
            process.wait(timeout=20)
            browser.close()


@contextmanager
def served(
    tab: Tab, folder: Path, query: str = "", headers: dict[str, str] | None = None, *, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve a folder on this machine, open it in a tab, and yield its address, with a slash at the end."""

    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        address = f"http://{host}:{server.server_address[1]}/"
        tab.open(address + query)
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def npm_install(folder: Path, *packages: str, timeout_s: int = 180, **environment: str) -> None:
    """Install packages of npm in a folder, or skip the test with the reason."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm")
    (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    command = [npm, "install", "--no-audit", "--no-fund", "--fetch-retries=0", *packages]
    options: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **environment}, "capture_output": True}
    try:
        process = subprocess.run(command, text=True, timeout=timeout_s, check=False, **options)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm install did not end within {timeout_s} s")
    if process.returncode:
        pytest.skip(f"npm install failed: {' '.join(process.stderr.split())[:200]}")


def run_module(folder: Path, script: str) -> Any:
    """Run an ECMAScript module in a folder with Node.js, and return the JSON that it prints."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (folder / "run.js").write_text(script, encoding="utf-8")
    process = subprocess.run([node, "run.js"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr[-1500:]
    return json.loads(process.stdout)
