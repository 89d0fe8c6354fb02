"""``serve`` as a child process: answers, refusals, limits, overload, and stopping under load."""

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
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from edgeformer.inference.predict import predict
from edgeformer.run import locate
from tests.cli.run_cli import edgeformer
from tests.conftest import OLD_FORMAT

pytest.importorskip("uvicorn")


CLASSIFIER = OLD_FORMAT / "classifier-v1"
JSON = {"Content-Type": "application/json"}
TEXTS = [f"{'very ' * (number % 12)}good film number {number}" for number in range(120)]


@contextmanager
def serving(*options: str, bundle: Path = CLASSIFIER / "bundle") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server; yield its process and port."""
    command = [sys.executable, "-m", "edgeformer", "serve", str(bundle), "--port", "0", "--json", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, text=True, encoding="utf-8", **pipes)
    try:
        line = child.stdout.readline()
        assert line, child.stderr.read()
        yield child, int(json.loads(line)["url"].rsplit(":", 1)[1])
    finally:
        child.terminate()
        child.communicate(timeout=60)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving("--max-texts", "8", "--max-characters", "300", "--max-body", "4KiB") as (_, number):
        yield number


Reply = tuple[int, dict[str, str], Any]


def connect(port: int) -> HTTPConnection:
    return HTTPConnection("127.0.0.1", port, timeout=60)


def request(port: int, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
    with closing(connect(port)) as connection:
        return request_on(connection, path, body, headers)


def request_on(connection: HTTPConnection, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
    """Return status, headers, and the body: parsed if it is JSON."""
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, content, headers or (JSON if body else {}))
    response = connection.getresponse()
    text = response.read().decode()
    is_json = response.headers.get("content-type", "") == "application/json"
    return response.status, dict(response.headers), json.loads(text) if is_json else text


def test_one_text_and_many_are_answered(port: int) -> None:
    status, _, document = request(port, "/predict", {"text": TEXTS[0]})
    assert status == 200 and (document["run"], document["artifact"]) == ("classifier-v1", "onnx-fp32")
    texts = [*TEXTS[:3], ""]
    predictions = request(port, "/predict", {"texts": texts})[2]["predictions"]
    expected = [answer.as_dict() for answer in predict(locate(str(CLASSIFIER), OLD_FORMAT), texts)[1]]
    assert [prediction.keys() for prediction in predictions] == [answer.keys() for answer in expected]
    assert [prediction["text"] for prediction in predictions] == texts
    assert predictions[3]["error"] == "the text is empty"
    assert predictions[2]["probability"] == pytest.approx(expected[2]["probability"], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "Invalid JSON"),
        (b'{"text": "\\ud800"}', 422, ""),
        ({"txt": "a"}, 422, "txt"),
        ({"text": 7}, 422, "text: Input should be a valid string"),
        ({"texts": []}, 422, "texts"),
        ({"text": "a", "texts": ["b"]}, 422, "either text or texts"),
        ({"texts": ["a", "b"], "pairs": ["c"]}, 422, "1 pairs for 2 texts"),
        ({"text": "a", "pair": "b"}, 422, "pairs: this classifier reads single texts"),
        ({"texts": ["a"] * 9}, 422, "has 9 texts, and the limit is 8"),
        ({"text": "a" * 301}, 422, "301 characters, and the limit is 300"),
        ({"text": "a" * 5000}, 413, "larger than 4,096 bytes"),
    ],
)
def test_invalid_requests_are_refused(port: int, body: object, status: int, message: str) -> None:
    reply = request(port, "/predict", body)
    assert (reply[0], message in reply[2]["error"]) == (status, True), reply


def test_pages_of_other_sites_cannot_read_answers(port: int) -> None:
    plain = request(port, "/predict", {"text": "a"}, {"Content-Type": "text/plain"})
    assert plain[0] == 415 and "application/json" in plain[2]["error"]
    status, headers, _ = request(port, "/predict", {"text": "a"}, {**JSON, "Origin": "https://example.org"})
    assert status == 200 and not [name for name in headers if name.lower().startswith("access-control")]
    assert request(port, "/healthz", headers={"Host": "example.org"})[0] == 400
    assert request(port, "/healthz", headers={"Host": f"[::1]:{port}"})[0] == 200
    replies = [request(port, path) for path in ("/", "/predict.js", "/server.js", "/show.js", "/page.css")]
    assert "default-src 'none'" in replies[0][1]["content-security-policy"]
    assert not re.search(r"https?://", "".join(content for _, _, content in replies))


def test_health_and_metrics(port: int) -> None:
    assert request(port, "/healthz")[2] == {"status": "ok", "run": "classifier-v1", "artifact": "onnx-fp32"}
    before = request(port, "/metrics")[2]
    request(port, "/predict", {"texts": ["a", ""]})
    after = request(port, "/metrics")[2]

    def count(text: str, name: str) -> float:
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)[1])  # type: ignore[index]

    for name, increase in (("edgeformer_texts_total", 2), ("edgeformer_texts_without_answer_total", 1)):
        assert count(after, name) - count(before, name) == increase
    assert count(after, "process_resident_memory_bytes") > 1e6


def test_openapi_document_matches_the_answers(port: int) -> None:
    document = request(port, "/openapi.json")[2]
    assert document["openapi"] == "3.1.0" and set(document["paths"]) == {"/predict", "/rank", "/healthz", "/metrics"}
    refused = request(port, "/rank", {"query": "a", "documents": ["b"]})
    assert refused[0] == 422 and "query: a classifier cannot rank texts; use" in refused[2]["error"]
    schemas = document["components"]["schemas"]
    responses = document["paths"]["/predict"]["post"]["responses"]
    assert set(responses) == {"200", "408", "413", "415", "422", "500", "503", "504"}
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))) == set(schemas)
    predictions = request(port, "/predict", {"texts": ["a", ""]})[2]["predictions"]
    keys = {key for prediction in predictions for key in prediction}
    assert keys - set(schemas["PredictionMessage"]["properties"]) <= {"loops"}


@pytest.mark.slow
def test_spans_of_a_token_classifier(tmp_path: Path) -> None:
    """Offsets in the text as it was sent, also of a text that is longer than the model reads at once."""
    pytest.importorskip("transformers")
    from tests.export.hf_models import token_classifier

    run = token_classifier(tmp_path)
    texts = ["Zoë 👩‍💻\r\nmet Jose\u0301 in Köln.", "The bridge of the town was made of wood. " * 5, "  "]
    expected = [answer.as_dict() for answer in predict(locate(str(run), run.parent), texts, "onnx-fp32")[1]]
    with serving(bundle=run / "bundle") as (_, port):
        status, _, answer = request(port, "/predict", {"texts": texts})
        _, _, document = request(port, "/openapi.json")
    assert status == 200 and answer["predictions"] == expected
    spans = [span for prediction in expected[:2] for span in prediction["spans"]]  # type: ignore[attr-defined]
    assert len(spans) > 4 and "spans" not in expected[2]
    assert {*spans[0]} == {*document["components"]["schemas"]["SpanMessage"]["properties"]}


def test_concurrent_clients_get_the_answers_to_their_own_texts() -> None:
    answers = [answer.as_dict() for answer in predict(locate(str(CLASSIFIER), OLD_FORMAT), TEXTS)[1]]
    probabilities = {answer["text"]: answer["probability"] for answer in answers}

    def client(number: int) -> None:
        with closing(connect(port)) as connection:
            for place in range(25):
                texts = [TEXTS[(number * 31 + place * 7 + extra) % len(TEXTS)] for extra in range(1 + place % 3)]
                status, _, document = request_on(connection, "/predict", {"texts": texts})
                assert status == 200
                for text, prediction in zip(texts, document["predictions"], strict=True):
                    assert prediction["text"] == text
                    assert prediction["probability"] == pytest.approx(probabilities[text], abs=1e-5)

    with serving() as (_, port), ThreadPoolExecutor(16) as pool:
        list(pool.map(client, range(16)))
        assert 'edgeformer_requests_total{status="200"} 400.0' in request(port, "/metrics")[2]


def test_too_many_requests_are_refused_while_health_is_answered() -> None:
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with serving("--max-connections", "2", "--timeout", "2s") as (_, port):
        slow = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
        for connection in slow:
            connection.sendall(head)
        deadline = time.monotonic() + 2
        while "edgeformer_requests_running 2.0" not in request(port, "/metrics")[2]:
            assert time.monotonic() < deadline
        status, headers, body = request(port, "/predict", {"text": "a"})
        assert (status, headers["retry-after"]) == (503, "1") and "the limit of 2 requests is reached" in body["error"]
        assert request(port, "/healthz")[0] == 200
        for connection in slow:
            assert connection.recv(99).startswith(b"HTTP/1.1 408 ")
            connection.close()
        assert request(port, "/predict", {"text": "a"})[0] == 200


def test_sigterm_under_load_finishes_the_accepted_requests() -> None:
    replies: list[object] = []

    def client() -> None:
        try:
            replies.append(request(port, "/predict", {"texts": ["very " * 50] * 100})[0])
        except (OSError, HTTPException) as error:
            replies.append(error)

    with serving("--max-batch", "1", "--queue", "2000") as (child, port):
        clients = [threading.Thread(target=client) for _ in range(12)]
        for thread in clients:
            thread.start()
        deadline = time.monotonic() + 60
        running = accepted = 0
        while accepted < 12:
            assert time.monotonic() < deadline
            metrics = request(port, "/metrics")[2]
            running = int(re.search(r"^edgeformer_requests_running (\d+)\.0$", metrics, re.M)[1])  # type: ignore[index]
            accepted = running + sum(map(int, re.findall(r"^edgeformer_requests_total{.*} (\d+)\.0$", metrics, re.M)))
        assert running, "every request finished before the last one was accepted"
        child.send_signal(signal.SIGTERM)
        for thread in clients:
            thread.join(60)
        assert child.wait(60) == 0
        assert child.stderr is not None and "stopped after 12 answered requests" in child.stderr.read()
    assert replies == [200] * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((str(CLASSIFIER), "--chat-template", "chat.jinja"), "--chat-template chat.jinja: cannot be read"),
        ((str(CLASSIFIER), "--chat-template", __file__), "is no language model; leave it out"),
        ((str(CLASSIFIER), "--cosine", "0.9"), "--cosine: classifier-v1 is no language model; leave it out"),
        ((str(CLASSIFIER), "--runtime", "fast"), "--runtime fast: "),
        ((str(CLASSIFIER), "--port", "PORT"), "another program uses this port"),
        ((str(CLASSIFIER), "--artifact", "none"), "--artifact none"),
        ((str(CLASSIFIER), "--timeout", "soon"), "is not a quantity"),
        (("absent",), "no run 'absent'"),
    ],
)
def test_refused_commands(port: int, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    outcome = edgeformer("serve", *(argument.replace("PORT", str(port)) for argument in arguments), cwd=tmp_path)
    assert outcome.code == 2 and message in " ".join(outcome.err.split()), outcome.err
