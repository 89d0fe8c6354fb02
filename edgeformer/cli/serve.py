"""Command serve: HTTP server with dynamic batching."""

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
    runtime: str | None = Option(
        None, metavar="NAME", help="Runtime or provider, e.g. openvino. Default: the artifact's first."
    ),
    chat_template: Path | None = Option(
        None, metavar="FILE", help="Language models: chat template (Jinja). Default: the model's own."
    ),
    cosine: opt.Cosine = None,
    max_batch: int = Option(
        32, min=1, help="Largest number of texts in one call; 1: no batching. Not for language models."
    ),
    queue: int = Option(
        1024, min=1, help="Largest number of waiting texts (language models: requests); more get status 503."
    ),
    timeout: str = Option(
        "30s",
        metavar="TIME",
        help="Time limit for answering a request (language models: for its first token), and for receiving it.",
    ),
    max_texts: int = Option(128, min=1, help="Largest number of texts per request."),
    max_characters: int = Option(20_000, min=1, help="Largest number of characters per text."),
    max_body: str = opt.advanced("1MiB", metavar="SIZE", help="Largest size of a request's body."),
    max_connections: int = opt.advanced(
        256, min=2, help="Largest number of simultaneous requests; more get status 503."
    ),
    allow_host: list[str] | None = Option(
        None, metavar="NAME", help="Also accept requests to this host name, e.g. of a proxy. May be repeated."
    ),
    allow_origin: list[str] | None = Option(
        None, metavar="URL", help="Web origin whose pages may read the answers (CORS). May be repeated."
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Serve a text model over HTTP.

    POST /predict takes {"text": …} or {"texts": […]}, and waiting texts are answered in batches. A language model has
    OpenAI's /v1/completions, /v1/chat/completions and /v1/models, also with streaming, and writes one text after the
    other. / is a page to try the model, /openapi.json describes the interface, /healthz and /metrics are for
    monitoring. SIGTERM and Ctrl-C finish accepted requests. The server has no encryption and no password: keep it on
    the loopback address, or use a proxy. Needs the extra serve, but not torch.

    Examples:
      edgeformer serve
      edgeformer serve path/to/bundle --port 9000 --artifact onnx-int8
      edgeformer serve smollm --artifact gguf-int8-decode
    """
    with needs_extra("serve", "serving"):
        from edgeformer.serve.server import ServeOptions, serve
        from edgeformer.serve.service import ServeLimits, Service
    from edgeformer.artifacts.units import parse_bytes, parse_milliseconds

    seconds = opt.parse_value("--timeout", timeout, parse_milliseconds) / 1e3
    body = opt.parse_value("--max-body", max_body, parse_bytes)
    if min(seconds, body) <= 0:
        raise InputError("--timeout, --max-body: must be greater than 0")
    limits = ServeLimits(max_batch, queue, seconds, max_texts, max_characters, body, max_connections)
    template = None
    if chat_template is not None:
        try:
            template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {chat_template}: cannot be read: {error}; give a text file") from None
    location = opt.locate(bundle, artifacts)

    def ready(service: Service, address: str) -> None:
        if as_json:
            facts = {"url": address, "run": service.name, "artifact": service.id, "limits": asdict(limits)}
            print(json.dumps(facts), flush=True)
        opt.say(f"{service.name} · {service.id}: {address} (Ctrl-C stops it)", err=True)
        if (reason := service.facts.get("chat_reason")) is not None:
            opt.say(f"note    no chats: {reason}", err=True)
        opt.say(f"next    {service.example.replace('ADDRESS', address)}", err=True)

    options = ServeOptions(
        host, port, artifact or location.artifact, runtime, template, limits, (*(allow_host or ()),),
        (*(allow_origin or ()),), cosine,
    )  # fmt: skip
    answered_requests = serve(location, options, ready)
    opt.say(f"stopped after {answered_requests:,} answered requests", err=True)
