"""Serving a bundle until somebody stops it. Imports uvicorn: import this file only where something is served."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import uvicorn

from edgeformer.bundle import Bundle
from edgeformer.formats.errors import InputError
from edgeformer.machine.switching import switching_often
from edgeformer.stages.serving.application import Application
from edgeformer.stages.serving.connections import protocol_within
from edgeformer.stages.serving.engine import Engine
from edgeformer.stages.serving.limits import Limits
from edgeformer.stages.serving.metrics import Metrics
from edgeformer.stages.serving.served import Served, served

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeOptions:
    """Where and what is served.

    Attributes:
        host: address to listen at.
        port: 0: a free one.
        artifact: an id; None: the first that runs here.
        limits: of requests.
        hosts: names by which it may be asked for, beside those of this machine; without any, a server that does not
            listen at the loopback address alone can be asked for by every name.
        origins: sites whose pages may read the answers.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    artifact: str | None = None
    limits: Limits = field(default_factory=Limits)
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def serve(bundle: Bundle, options: ServeOptions, ready: Callable[[Served, str], None]) -> int:
    """Answer until SIGTERM or Ctrl-C, then finish what was accepted.

    Args:
        bundle: of a classifier or an embedding model.
        options: where and how.
        ready: is told the model, and the address of the server, when it listens.

    Returns:
        How many requests for predictions were answered.

    Raises:
        InputError: the address cannot be had, or the model cannot be served.
        ArtifactError: no artifact can run here, or a file is damaged.
    """
    metrics = Metrics()
    with (
        served(bundle, options.artifact) as model,
        _listening(options.host, options.port) as listening,
        Engine(model.answering, model.run, options.limits, metrics) as engine,
        switching_often(),
    ):
        application = Application(model, engine, options.limits, metrics).asgi(_hosts(options), options.origins)
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=protocol_within(options.limits),
            ws="none",
            timeout_graceful_shutdown=round(options.limits.timeout_s) + 1,
        )
        ready(model, _address(listening))
        _until_stopped(uvicorn.Server(config), listening)
    return metrics.responses


def _until_stopped(server: uvicorn.Server, listening: socket.socket) -> None:
    """Run it. A signal that stopped it well, which it raises again at its end, ends this process as if it had not."""
    if threading.current_thread() is not threading.main_thread():
        server.run([listening])
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        server.run([listening])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=1024)
        # Named as TCP, or asyncio leaves Nagle's algorithm on: every answer would wait 40 ms for the client's ACK.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=made.detach())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"--port {port}: another program listens there; choose another one, or 0 for a free one"
            ) from None
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _hosts(options: ServeOptions) -> tuple[str, ...]:
    # Of [::1]:8000 older versions of starlette take what is before the first colon.
    here = ("localhost", "127.0.0.1", "[::1]", "::1", "[")
    if options.host in _LOOPBACK:
        return (*here, *options.hosts)
    return (*here, *options.hosts, options.host) if options.hosts else ()  # a health check asks from here
