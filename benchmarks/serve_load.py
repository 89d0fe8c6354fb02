"""`edgeformer serve` under load: p50 and p99 against requests per second, what batching buys, overload, and a stop.

    python benchmarks/serve_load.py run BUNDLE [--requests 10000] [--rounds 2] [--out FILE.json]
    python benchmarks/serve_load.py table FILE.json

Servers are processes of their own at the loopback address; clients are connections of this process, each of which sends
its next request when the last one is answered. Batching on and off alternate: A B A B. Every answer is compared with
what the session says of that text alone. ``--requests`` is what the largest number of clients sends in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tabulate import tabulate

from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.serve.queue import open_served_predictor
from edgeformer.system.capability import installed_version
from edgeformer.system.host import cpu_name, usable_cores

LIBRARIES = ("onnxruntime", "tokenizers", "starlette", "uvicorn")
CLIENTS = (1, 8, 64)
MODES = {"on": (), "off": ("--max-batch", "1")}
HEAD = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
DIFFERENT = 256
"""Texts that are asked for, again and again."""
TOLERANCE = 1e-4
FEW = 400
"""Requests of the smaller numbers of clients."""


@dataclass
class Load:
    """What clients saw.

    Attributes:
        milliseconds: of every request that was answered with 200.
        statuses: how often each came; ``lost``: a connection broke with no response.
        mixed_up: answers that were not those of their text.
        seconds: from the first request to the last response.
    """

    milliseconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    mixed_up: int = 0
    seconds: float = 0.0


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port."""
    command = [sys.executable, "-m", "edgeformer", "serve", str(folder), "--port", "0", "--json", *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    assert child.stdout is not None
    try:
        yield child, int(json.loads(child.stdout.readline())["url"].rsplit(":", 1)[1])
    finally:
        child.terminate()
        child.wait(120)


def expected(folder: Path) -> dict[str, tuple[str, float]]:
    """Text → label and probability, one text in each call."""
    texts = [f"{number} {row.text}" for number, row in enumerate(islice(synthetic_reviews(DIFFERENT, 1), DIFFERENT))]
    case_figures = {}
    with open_served_predictor(Bundle.open(folder), None) as model:
        for text in texts:
            window = model.answering.read([text])
            answer: Any = model.answering.answers(window, model.answering.run(model.run, window))[0]
            case_figures[text] = (answer.label, answer.probability)
    return case_figures


async def one_client(port: int, texts: list[str], expected_answers: dict[str, tuple[str, float]], load: Load) -> None:
    """Ask for each text on one connection, one after the other; ends where the server closes it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        load.statuses["refused"] += len(texts)
        return
    for text in texts:
        body = json.dumps({"text": text}).encode()
        head = f"{HEAD}Content-Length: {len(body)}\r\n\r\n"
        started = time.perf_counter()
        try:
            writer.write(head.encode() + body)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            status = lines[0].split()[1]
            sizes = [line.split(":")[1] for line in lines if line.lower().startswith("content-length:")]
            content = await reader.readexactly(int(sizes[0]))
        except asyncio.IncompleteReadError as error:
            load.statuses["half" if error.partial else "lost"] += 1
            break
        except OSError:
            load.statuses["lost"] += 1
            break
        load.statuses[status] += 1
        if status == "200":
            load.milliseconds.append(1e3 * (time.perf_counter() - started))
            (answer,) = json.loads(content)["predictions"]
            label, probability = expected_answers[text]
            right = answer["text"] == text and abs(answer["probability"] - probability) < TOLERANCE
            load.mixed_up += not (right and answer["label"] == label)
    writer.close()


async def drive(port: int, clients: int, requests: int, expected_answers: dict[str, tuple[str, float]]) -> Load:
    """So many requests in all, from so many clients at once."""
    texts, load = [*expected_answers], Load()
    started = time.perf_counter()
    shares = [requests // clients + (number < requests % clients) for number in range(clients)]
    jobs = [
        one_client(port, [texts[(41 * number + place) % len(texts)] for place in range(share)], expected_answers, load)
        for number, share in enumerate(shares)
    ]
    await asyncio.gather(*jobs)
    load.seconds = time.perf_counter() - started
    return load


def resident_bytes(port: int) -> int:
    """Of the server, as it says."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("process_resident_memory_bytes "))


def figures(load: Load) -> dict[str, object]:
    """Of one block of requests."""
    times = sorted(load.milliseconds)
    cuts = statistics.quantiles(times, n=100)
    return {
        "statuses": dict(load.statuses),
        "mixed_up": load.mixed_up,
        "requests_per_s": len(times) / load.seconds,
        "p50_ms": cuts[49],
        "p99_ms": cuts[98] if len(times) >= 662 else None,
    }


def under_load(
    folder: Path, requests: int, rounds: int, expected_answers: dict[str, tuple[str, float]]
) -> Iterator[dict[str, object]]:
    """Blocks of requests, batching on and off in turn."""
    for number in range(rounds):
        for mode, options in MODES.items():
            with server(folder, *options) as (_, port):
                asyncio.run(drive(port, 4, 32, expected_answers))
                start = resident_bytes(port)
                for clients in CLIENTS:
                    count = requests // (rounds * len(MODES)) if clients == CLIENTS[-1] else FEW
                    case_figures = figures(asyncio.run(drive(port, clients, count, expected_answers)))
                    resident = {"resident_before_bytes": start, "resident_after_bytes": resident_bytes(port)}
                    yield {"batching": mode, "round": number, "clients": clients, **case_figures, **resident}


def overload(folder: Path, expected_answers: dict[str, tuple[str, float]]) -> dict[str, object]:
    """A queue of 16 texts and 64 clients: what is not taken is refused, and the rest is answered well."""
    with server(folder, "--queue", "16", "--max-batch", "1") as (_, port):
        load = asyncio.run(drive(port, 64, 2000, expected_answers))
        return {"statuses": dict(load.statuses), "mixed_up": load.mixed_up, "resident_bytes": resident_bytes(port)}


def stopped(folder: Path, expected_answers: dict[str, tuple[str, float]]) -> dict[str, object]:
    """SIGTERM while 64 clients ask: responses that the server says it gave, and those that arrived whole."""
    with server(folder) as (child, port):

        async def load_and_stop() -> Load:
            running = asyncio.create_task(drive(port, 64, 6400, expected_answers))
            await asyncio.sleep(3)
            child.send_signal(signal.SIGTERM)
            return await running

        load = asyncio.run(load_and_stop())
        code = child.wait(120)
        assert child.stderr is not None
        last_line = next(line for line in child.stderr if line.startswith("stopped;"))
    answered = int(last_line.split()[1].replace(",", ""))
    total = sum(count for status, count in load.statuses.items() if status.isdigit())
    return {"exit_code": code, "told_by_the_server": answered, "arrived_whole": total, "half": load.statuses["half"],
            "mixed_up": load.mixed_up}  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """Rows per number of clients as Markdown: medians over the rounds; the gain is that of the same round."""
    rows = []
    for clients in CLIENTS:
        of = {
            mode: [b for b in document["blocks"] if (b["batching"], b["clients"]) == (mode, clients)] for mode in MODES
        }
        rounds = min(map(len, of.values()))  # where it was stopped midway, those that have both
        blocks = {mode: case_figures[:rounds] for mode, case_figures in of.items()}
        gains = [on["requests_per_s"] / off["requests_per_s"] for on, off in zip(*blocks.values(), strict=True)]
        gain = f"{statistics.median(gains):.2f}× ({min(gains):.2f}–{max(gains):.2f})"
        for mode, case_figures in blocks.items():
            cells = [
                statistics.median(b["requests_per_s"] for b in case_figures),
                statistics.median(b["p50_ms"] for b in case_figures),
            ]
            p99 = [b["p99_ms"] for b in case_figures if b["p99_ms"] is not None]
            requests = sum(sum(b["statuses"].values()) for b in case_figures)
            last = f"{statistics.median(p99):.1f}" if p99 else "–"
            answered = gain if mode == "on" else ""
            rows.append([f"{clients}", mode, f"{requests:,}", *(f"{cell:.1f}" for cell in cells), last, answered])
    heads = ["clients", "batching", "requests", "requests/s", "p50 ms", "p99 ms", "gain in requests/s"]
    return tabulate(rows, heads, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--remark", help="what else ran on this machine")
    options = parser.parse_args()
    if options.what == "table":
        print(table(json.loads(options.path.read_text(encoding="utf-8"))))
        return
    expected_answers = expected(options.path)
    bundle = Bundle.open(options.path)
    blocks: list[dict[str, object]] = []
    document: dict[str, object] = {
        "model": bundle.name,
        "parameters": bundle.manifest.parameters,
        "artifact": bundle.built()[0].id,
        "host": {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "load_average": os.getloadavg(),
            "remark": options.remark,
            "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in LIBRARIES}},
        },
        "blocks": blocks,
    }

    def save() -> None:  # after each: what is stopped midway keeps what it has
        if options.out:
            write_json(options.out, document)

    for block in under_load(options.path, options.requests, options.rounds, expected_answers):
        blocks.append(block)
        print(json.dumps(block), file=sys.stderr)
        save()
    document["overload"] = overload(options.path, expected_answers)
    document["stopped"] = stopped(options.path, expected_answers)
    save()
    print(table(document))


if __name__ == "__main__":
    main()
