"""What docs/browser.md says of pages is so."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.error import URLError

from edgeformer.runtimes.web.libraries import RUNTIME, RUNTIMES, TOKENIZERS
from tests.docs.document import ROOT, programs

DOCUMENT = ROOT / "docs" / "browser.md"


def test_the_server_sends_what_threads_need(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("the page", encoding="utf-8")
    (tmp_path / "isolated.py").write_text(programs(DOCUMENT)["isolated.py"], encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(tmp_path / "isolated.py"), str(tmp_path), str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        headers, content = asked(f"http://127.0.0.1:{port}/")
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert content == b"the page"
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"


def asked(address: str) -> tuple[dict[str, str], bytes]:
    """Headers and content, as soon as the server is there."""
    deadline = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as response:
                return dict(response.headers), response.read()
        except URLError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_versions_and_sizes_are_those_of_the_libraries() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"{RUNTIME.name}@{RUNTIME.version} {TOKENIZERS.name}@{TOKENIZERS.version}" in text
    both, one = (
        sum(file.size_bytes for runtime in some for file in runtime.files) for some in (RUNTIMES, RUNTIMES[:1])
    )
    assert f"({both / 2**20:.0f} MiB, or {one / 2**20:.0f} MiB with `--provider wasm`)" in text
