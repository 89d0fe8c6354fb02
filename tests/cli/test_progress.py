"""The bar of training on a terminal: narrow ones show every figure too."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from edgeformer.cli import progress
from edgeformer.cli.progress import Bars, Lines


@pytest.mark.parametrize(
    ("width", "figures", "parts"),
    [
        (80, {"loss": 0.69312, "samples_per_s": 1234.5, "lr": 0.001}, ("loss 0.6931", "samples/s 1,23", "1.0e-03")),
        (140, {"loss": 0.5, "left_s": 3600.0}, (" 1 h 00 min left",)),  # of the whole work
        (140, {"samples_per_s": 0.423}, ("samples/s 0.42",)),
        (140, {"tokens_per_s": 12345.6, "most_left_s": 3600.0}, ("tokens/s 12,346", "at most 1 h 00 min left")),
    ],
)
def test_no_figure_is_cut(width: int, figures: dict[str, float], parts: tuple[str, ...]) -> None:
    bars, output = Bars(), io.StringIO()
    bars._console = Console(file=output, width=width, force_terminal=True, color_system=None)
    bars.start("Epoch 10/10", 67_349, "samples")
    bars.advance(32_000, **figures)
    bars._bars.refresh()  # type: ignore[union-attr]
    bars.finish()
    displayed = output.getvalue()
    for part in ("Epoch 10/10", "32,000/67,349 samples", *parts):
        assert part in displayed and "…" not in displayed and "left_s" not in displayed


def test_lines_come_though_the_work_does_not_advance(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.05)
    lines = Lines()
    lines.start("Predicting the peak memory", None)
    deadline = time.monotonic() + 10
    messages = ""
    while messages.count("Predicting the peak memory: ") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
        messages += capsys.readouterr().err
    assert messages.count("so far\n") >= 2
    for figures, text in (
        ({"loss": 0.5, "left_s": 7200.0}, "loss 0.5  2 h 00 min left"),
        ({"most_left_s": 7200.0}, "at most 2 h 00 min left"),
    ):
        lines.start("Epoch 1/2", 10, "samples")
        lines.advance(5, **figures)
        time.sleep(0.08)
        lines.finish()
        time.sleep(0.2)
        end = capsys.readouterr().err
        assert f"Epoch 1/2: 5/10 samples  {text}\n" in end and "left_s" not in end
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_time_left_does_not_grow_while_a_unit_takes_longer(monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.02)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))

    def line() -> str:
        capsys.readouterr()
        time.sleep(0.1)
        return capsys.readouterr().err.splitlines()[-1]

    lines = Lines()
    lines.start("Measuring a", 3, "shapes")
    time.sleep(0.05)
    now_s = 10.0
    lines.advance()
    assert line() == "Measuring a: 1/3 shapes  20 s left"
    now_s = 15.0
    assert line() == "Measuring a: 1/3 shapes  15 s left"
    now_s = 500.0
    assert line() == "Measuring a: 1/3 shapes  at least 10 s left"
    lines.start("Comparing a", None, "rounds")
    lines.advance()
    assert line().startswith("Comparing a: 1 round  ")
    lines.finish()
