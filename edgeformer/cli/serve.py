"""Command serve: HTTP server with dynamic batching."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from typer import Option

from edgeformer.artifacts.errors import InputError, needs_extra
from edgeformer.cli import options as opt


def command(
    bundle: opt.Run = None,
    host: str = Option("127.0.0.1", help="Address to listen at. 0.0.0.0: every one of this machine."),
    port: int = Option(8000, min=0, max=65535, help="0: a free one."),
    artifact: str | None = Option(None, metavar="ID", help="Default: the bundle's first artifact that runs here."),
    max_batch: int = Option(32, min=1, help="Texts of one call of the model. 1: no batching."),
    queue: int = Option(1024, min=1, help="Texts that may wait; more are refused with 503."),
    timeout: str = Option("30s", metavar="TIME", help="From a request to its answer; also for a head to come."),
    max_texts: int = Option(128, min=1, help="Texts of one request."),
    max_characters: int = Option(20_000, min=1, help="Characters of one text."),
    max_body: str = Option("1MiB", metavar="SIZE", help="Of one request."),
    max_connections: int = Option(256, min=2, help="Requests at once; more are refused with 503."),
    allow_host: list[str] | None = Option(None, metavar="NAME", help="A name of a proxy in front. May be repeated."),
    allow_origin: list[str] | None = Option(None, metavar="URL", help="A site that may read the answers (CORS)."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Serve a classifier or an embedding model over HTTP (needs the extra serve, no torch).

    POST /predict takes {"text": …} or {"texts": […]}; / is a page to try it, /openapi.json the description, /healthz
    and /metrics are for what watches it. SIGTERM and Ctrl-C finish what was accepted. There is neither encryption nor
    a password: leave it at the loopback address, or put a proxy in front.

    Examples:
      edgeformer serve
      edgeformer serve path/to/bundle --port 9000 --artifact onnx-int8
    """
    with needs_extra("serve", "serving"):
        from edgeformer.inference.server import ServeOptions, serve
        from edgeformer.inference.serving_engine import Limits
    from edgeformer.artifacts.units import parse_bytes, parse_milliseconds
    from edgeformer.cli.console import say
    from edgeformer.inference.predict import Predictor
    from edgeformer.run import locate

    seconds = opt.parse_value("--timeout", timeout, parse_milliseconds) / 1e3
    body = opt.parse_value("--max-body", max_body, parse_bytes)
    if min(seconds, body) <= 0:
        raise InputError("--timeout and --max-body must be greater than 0")
    limits = Limits(max_batch, queue, seconds, max_texts, max_characters, body, max_connections)
    location = locate(bundle, artifacts)

    def ready(model: Predictor, address: str) -> None:
        if as_json:
            facts = {"url": address, "run": model.name, "artifact": model.id, "limits": asdict(limits)}
            print(json.dumps(facts), flush=True)
        say(f"{model.name} · {model.id}: {address} (Ctrl-C stops it)", err=True)

    options = ServeOptions(
        host, port, artifact or location.artifact, limits, (*(allow_host or ()),), (*(allow_origin or ()),)
    )
    answered_requests = serve(location.open_bundle(), options, ready)
    say(f"stopped; {answered_requests:,} requests for predictions had their response", err=True)
