"""Signals that ask a process to end: caught, unless somebody wants them ignored."""

import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from edgeformer.cli.export import report_bundle_on_interrupt
from edgeformer.system.signals import handle_signals
from edgeformer.training.train import StopSignals

HANGUP = getattr(signal, "SIGHUP", None)


@pytest.mark.skipif(HANGUP is None, reason="this system has no SIGHUP")
def test_what_nohup_protects_goes_on_when_the_terminal_is_gone(tmp_path: Path) -> None:
    assert HANGUP is not None
    previous = signal.signal(HANGUP, signal.SIG_IGN)
    try:
        works: list[AbstractContextManager[object]] = [StopSignals(), report_bundle_on_interrupt(tmp_path)]
        for work in works:
            with work:
                signal.raise_signal(HANGUP)
            assert signal.getsignal(HANGUP) is signal.SIG_IGN
    finally:
        signal.signal(HANGUP, previous)


def test_the_others_are_caught_and_given_back() -> None:
    heard: list[int] = []
    previous = signal.getsignal(signal.SIGTERM)
    with handle_signals(("SIGTERM", "SIGNOSUCH"), lambda number, _: heard.append(number)):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is previous
