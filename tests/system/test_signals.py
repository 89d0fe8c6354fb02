"""Signals that ask a process to end: caught, unless somebody wants them ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from edgeformer.cli.export import report_bundle_on_interrupt
from edgeformer.system.signals import handle_signals
from edgeformer.training.train import StopSignals

HANGUP = getattr(signal, "SIGHUP", None)
needs_hangup = pytest.mark.skipif(HANGUP is None, reason="this system has no SIGHUP")


@pytest.fixture
def ignored() -> Iterator[signal.Signals]:
    """As nohup leaves it to its command."""
    assert HANGUP is not None
    previous = signal.signal(HANGUP, signal.SIG_IGN)
    yield HANGUP
    signal.signal(HANGUP, previous)


@needs_hangup
@pytest.mark.parametrize("command", ["train", "export"])
def test_what_nohup_protects_goes_on_when_the_terminal_is_gone(
    command: str, ignored: signal.Signals, tmp_path: Path
) -> None:
    works: dict[str, AbstractContextManager[object]] = {
        "train": StopSignals(), "export": report_bundle_on_interrupt(tmp_path),
    }  # fmt: skip
    with works[command]:
        signal.raise_signal(ignored)
    assert signal.getsignal(ignored) is signal.SIG_IGN


def test_the_others_are_caught_and_given_back() -> None:
    heard: list[int] = []
    previous = signal.getsignal(signal.SIGTERM)
    with handle_signals(("SIGTERM", "SIGNOSUCH"), lambda number, _: heard.append(number)):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is previous
