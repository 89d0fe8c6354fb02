"""serve as a process of its own: answers that belong to their questions, limits, overload, and a stop under load."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from edgeformer.inference.predict import predict
from edgeformer.run import locate
from tests.cli.run_cli import edgeformer

pytest.importorskip("uvicorn")

from edgeformer.inference.server import _listening

OLD = Path(__file__).parents[1] / "old_format"
JSON = {"Content-Type": "application/json"}
TEXTS = [f"{'very ' * (number % 12)}good film number {number}" for number in range(120)]


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a child process, and its port."""
    command = [sys.executable, "-m", "edgeformer", "serve", str(OLD / "classifier-v1" / "bundle"), "--port", "0"]
    child = subprocess.Popen(
        [*command, "--json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert child.stdout is not None and child.stderr is not None
    try:
        line = child.stdout.readline()
        assert line, child.stderr.read()
        yield child, int(json.loads(line)["url"].rsplit(":", 1)[1])
    finally:
        child.terminate()
        child.communicate(timeout=60)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("--max-texts", "8", "--max-characters", "300", "--max-body", "4KiB") as (_, found):
        yield found


Reply = tuple[int, dict[str, str], Any]


def ask(port: int, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        return ask_on(connection, path, body, headers)
    finally:
        connection.close()


def ask_on(connection: HTTPConnection, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, content, headers or (JSON if body else {}))
    response = connection.getresponse()
    text = response.read().decode()
    kind = response.headers.get("content-type", "")
    return response.status, dict(response.headers), json.loads(text) if kind == "application/json" else text


def test_one_text_and_many(port: int) -> None:
    status, _, one = ask(port, "/predict", {"text": TEXTS[0]})
    assert status == 200 and (one["run"], one["artifact"]) == ("classifier-v1", "onnx-fp32")
    many = ask(port, "/predict", {"texts": [*TEXTS[:3], ""]})[2]["predictions"]
    wanted = [answer.as_dict() for answer in predict(locate(str(OLD / "classifier-v1"), OLD), [*TEXTS[:3], ""])[1]]
    assert [found.keys() for found in many] == [found.keys() for found in wanted]
    assert [found["text"] for found in many] == [*TEXTS[:3], ""] and many[3]["error"] == "the text is empty"
    assert many[2]["probability"] == pytest.approx(wanted[2]["probability"], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 422, "Invalid JSON"),
        (b'{"text": "\\ud800"}', 422, ""),
        ({"txt": "a"}, 422, "txt"),
        ({"text": 7}, 422, "text: Input should be a valid string"),
        ({"texts": []}, 422, "texts"),
        ({"text": "a", "texts": ["b"]}, 422, "either text or texts"),
        ({"texts": ["a", "b"], "pairs": ["c"]}, 422, "1 pairs for 2 texts"),
        ({"text": "a", "pair": "b"}, 422, "pairs: this classifier was trained on single texts"),
        ({"texts": ["a"] * 9}, 422, "9, but at most 8"),
        ({"text": "a" * 301}, 422, "301 characters, but at most 300"),
        ({"text": "a" * 5000}, 413, "larger than 4,096 bytes"),
    ],
)
def test_what_is_refused(port: int, body: object, status: int, said: str) -> None:
    found = ask(port, "/predict", body)
    assert (found[0], said in found[2]["error"]) == (status, True), found


def test_pages_of_other_sites_get_nothing(port: int) -> None:
    plain = ask(port, "/predict", {"text": "a"}, {"Content-Type": "text/plain"})
    assert plain[0] == 415 and "application/json" in plain[2]["error"]
    status, headers, _ = ask(port, "/predict", {"text": "a"}, {**JSON, "Origin": "https://example.org"})
    assert status == 200 and not [name for name in headers if name.lower().startswith("access-control")]
    assert ask(port, "/healthz", headers={"Host": "example.org"})[0] == 400
    assert ask(port, "/healthz", headers={"Host": f"[::1]:{port}"})[0] == 200


def test_what_watches_it(port: int) -> None:
    assert ask(port, "/healthz")[2] == {"status": "ok", "run": "classifier-v1", "artifact": "onnx-fp32"}
    before = ask(port, "/metrics")[2]
    ask(port, "/predict", {"texts": ["a", ""]})
    after = ask(port, "/metrics")[2]

    def count(text: str, name: str) -> float:
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])  # type: ignore[index]

    for name, more in (("edgeformer_texts_total", 2), ("edgeformer_texts_without_answer_total", 1)):
        assert count(after, name) - count(before, name) == more
    assert count(after, "process_resident_memory_bytes") > 1e6


def test_the_description_is_what_is_answered(port: int) -> None:
    document = ask(port, "/openapi.json")[2]
    assert document["openapi"] == "3.1.0" and set(document["paths"]) == {"/predict", "/healthz", "/metrics"}
    schemas = document["components"]["schemas"]
    assert {"200", "408", "413", "415", "422", "500", "503", "504"} == set(
        document["paths"]["/predict"]["post"]["responses"]
    )
    references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(references) == set(schemas)
    answer = ask(port, "/predict", {"texts": ["a", ""]})[2]["predictions"]
    assert {key for found in answer for key in found} - set(schemas["PredictionMessage"]["properties"]) <= {"loops"}


def test_the_page_needs_nothing_from_elsewhere(port: int) -> None:
    status, headers, page = ask(port, "/")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert ask(port, "/page.js")[0] == ask(port, "/page.css")[0] == 200
    assert not re.search(r"https?://", page + ask(port, "/page.js")[2] + ask(port, "/page.css")[2])


def test_answers_are_not_mixed_up() -> None:
    """16 clients at once; every answer is that of its own text."""
    wanted = {
        answer.text: answer.as_dict()["probability"]
        for answer in predict(locate(str(OLD / "classifier-v1"), OLD), TEXTS)[1]
    }

    def client(number: int) -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        for place in range(25):
            texts = [TEXTS[(number * 31 + place * 7 + extra) % len(TEXTS)] for extra in range(1 + place % 3)]
            status, _, found = ask_on(connection, "/predict", {"texts": texts})
            assert status == 200
            for text, prediction in zip(texts, found["predictions"], strict=True):
                assert prediction["text"] == text
                assert prediction["probability"] == pytest.approx(wanted[text], abs=1e-5)
        connection.close()
        return place + 1

    with serving() as (_, port), ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(client, range(16))) == 400
        assert 'edgeformer_requests_total{status="200"} 400.0' in ask(port, "/metrics")[2]


def test_overload_is_said_and_what_was_taken_is_answered() -> None:
    with serving("--queue", "8", "--max-batch", "1") as (_, port), ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda _: ask(port, "/predict", {"texts": ["very " * 50] * 8}), range(64)))
    statuses = [status for status, _, _ in replies]
    assert set(statuses) == {200, 503}
    for status, headers, body in replies:
        if status == 503:
            assert int(headers["retry-after"]) >= 1 and "are waiting; try again in" in body["error"]
        else:
            assert len(body["predictions"]) == 8


def test_connections_that_send_nothing_are_in_nobodys_way() -> None:
    """Nothing, half a head, and half a head behind an answer: others are answered, and these are closed."""
    half = b"GET /healthz HTTP/1.1\r\nHost: local"
    with serving("--max-connections", "4", "--timeout", "2s") as (_, port), ExitStack() as opened:
        behind = HTTPConnection("127.0.0.1", port, timeout=60)
        assert ask_on(behind, "/healthz")[0] == 200
        behind.sock.sendall(half)
        started = time.monotonic()
        silent = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(520)]
        assert silent[0].recv(1) == b"" and time.monotonic() - started < 2  # the oldest makes room
        for one in silent[9::2]:
            one.sendall(half)
        assert ask(port, "/healthz")[0] == ask(port, "/predict", {"text": "a"})[0] == 200
        for one in (*silent, behind.sock):
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        behind.close()
        assert time.monotonic() - started < 10


def test_too_many_requests_are_refused_and_what_watches_is_answered() -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with serving("--max-connections", "2", "--timeout", "2s") as (_, port):
        slow = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
        for one in slow:
            one.sendall(head)
        deadline = time.monotonic() + 2
        while "edgeformer_requests_running 2.0" not in ask(port, "/metrics")[2]:
            assert time.monotonic() < deadline
        status, headers, body = ask(port, "/predict", {"text": "a"})
        assert (status, headers["retry-after"]) == (503, "1") and "2 requests are in work" in body["error"]
        assert ask(port, "/healthz")[0] == 200
        for one in slow:
            assert one.recv(99).startswith(b"HTTP/1.1 408 ")
            one.close()
        assert ask(port, "/predict", {"text": "a"})[0] == 200


def test_a_stop_under_load_finishes_what_was_accepted() -> None:
    """SIGTERM while requests are running: each of them gets its whole answer, and the process ends well."""
    replies: list[object] = []

    def client() -> None:
        try:
            replies.append(ask(port, "/predict", {"texts": ["very " * 50] * 100})[0])
        except (OSError, HTTPException) as error:
            replies.append(error)

    with serving("--max-batch", "1", "--queue", "2000") as (child, port):
        clients = [threading.Thread(target=client) for _ in range(12)]
        for one in clients:
            one.start()
        deadline = time.monotonic() + 60
        running = accepted = 0
        while accepted < 12:
            assert time.monotonic() < deadline
            metrics = ask(port, "/metrics")[2]
            running = int(re.search(r"^edgeformer_requests_running (\d+)\.0$", metrics, re.M)[1])  # type: ignore[index]
            accepted = running + sum(map(int, re.findall(r"^edgeformer_requests_total{.*} (\d+)\.0$", metrics, re.M)))
        assert running, "every request finished before the last one was accepted"
        child.send_signal(signal.SIGTERM)
        for one in clients:
            one.join(60)
        assert child.wait(60) == 0
        assert child.stderr is not None and "stopped; 12 requests" in child.stderr.read()
    assert replies == [200] * 12


def test_answers_do_not_wait_for_the_clients_acknowledgement() -> None:
    """Nagle's algorithm is off for what asyncio accepts; on, head and body of an answer are 40 ms apart."""

    async def accepted() -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            told.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=_listening("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            found = await told
            writer.close()
            return found

    assert asyncio.run(accepted())


def test_what_cannot_be_served_is_said(port: int, tmp_path: Path) -> None:
    for arguments, said in (
        ((str(OLD / "language-v1"),), "has no labels, so there is nothing to serve; use edgeformer generate"),
        ((str(OLD / "classifier-v1"), "--port", str(port)), f"--port {port}: another program listens there"),
        ((str(OLD / "classifier-v1"), "--artifact", "none"), "--artifact none"),
        ((str(OLD / "classifier-v1"), "--timeout", "soon"), "is not a quantity"),
        (("absent",), "no run 'absent'"),
    ):
        outcome = edgeformer("serve", *arguments, cwd=tmp_path)
        assert outcome.code == 2 and said in " ".join(outcome.err.split()), outcome.err
