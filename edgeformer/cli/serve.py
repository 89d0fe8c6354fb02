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
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0: all addresses of this machine."),
    port: int = Option(8000, min=0, max=65535, help="Port to listen on; 0: a free port."),
    artifact: str | None = Option(
        None, metavar="ID", help="Artifact to serve. Default: the bundle's first that runs here."
    ),
    max_batch: int = Option(32, min=1, help="Largest number of texts in one call of the model; 1: no batching."),
    queue: int = Option(1024, min=1, help="Largest number of waiting texts; more get status 503."),
    timeout: str = Option(
        "30s", metavar="TIME", help="Time limit for answering a request, and for receiving its header."
    ),
    max_texts: int = Option(128, min=1, help="Largest number of texts per request."),
    max_characters: int = Option(20_000, min=1, help="Largest number of characters per text."),
    max_body: str = Option("1MiB", metavar="SIZE", help="Largest size of a request's body."),
    max_connections: int = Option(256, min=2, help="Largest number of simultaneous requests; more get status 503."),
    allow_host: list[str] | None = Option(
        None, metavar="NAME", help="Also accept requests to this host name, e.g. of a proxy. May be repeated."
    ),
    allow_origin: list[str] | None = Option(
        None, metavar="URL", help="Web origin whose pages may read the answers (CORS). May be repeated."
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Serve a text model (but no language model) over HTTP with dynamic batching.

    POST /predict takes {"text": …} or {"texts": […]}. / is a page to try the model, /openapi.json describes the
    interface, /healthz and /metrics are for monitoring. SIGTERM and Ctrl-C finish accepted requests. The server has no
    encryption and no password: keep it on the loopback address, or use a proxy. Needs the extra serve, but not torch.

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
        raise InputError("--timeout, --max-body: must be greater than 0")
    limits = Limits(max_batch, queue, seconds, max_texts, max_characters, body, max_connections)
    location = locate(bundle, artifacts)

    def ready(model: Predictor, address: str) -> None:
        if as_json:
            facts = {"url": address, "run": model.name, "artifact": model.id, "limits": asdict(limits)}
            print(json.dumps(facts), flush=True)
        say(f"{model.name} · {model.id}: {address} (Ctrl-C stops it)", err=True)
        header = "'Content-Type: application/json'"
        say(f'next    curl {address}/predict -H {header} -d \'{{"text": "TEXT"}}\'', err=True)

    options = ServeOptions(
        host, port, artifact or location.artifact, limits, (*(allow_host or ()),), (*(allow_origin or ()),)
    )
    answered_requests = serve(location.open_bundle(), options, ready)
    say(f"stopped after {answered_requests:,} answered requests", err=True)
