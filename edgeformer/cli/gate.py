"""edgeformer profile --against: compare a candidate bundle with its baseline, for CI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeformer.cli.options import print_json, stdout
from edgeformer.formats.errors import InputError

if TYPE_CHECKING:
    from edgeformer.formats.device import DeviceProfile
    from edgeformer.run import Location
    from edgeformer.stages.profiling.gating.files import GateOptions
    from edgeformer.stages.profiling.request import ProfileOptions

Against = Annotated[
    str | None,
    typer.Option(
        metavar="BASELINE",
        help="Instead of judging: measure the bundle and this one in turns, and fail where the bundle is worse. A "
        "report (.json), whose bundle is the baseline, or a run or a bundle.",
    ),
]
MaxSlowdown = Annotated[
    str | None, typer.Option(metavar="SHARE", help="--against: slower by at most this. Default: 5%.")
]
MaxMemoryGrowth = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="--against: more memory by at most this; off: not checked. Default: 10%."),
]
MaxSizeGrowth = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="--against: a larger file by at most this; off: not checked. Default: 5%."),
]
MaxScoreLoss = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="--against: accuracy points (perplexity: its share) to lose; off: not checked. Default: 1%.",
    ),
]
EvalData = Annotated[
    Path | None,
    typer.Option(
        "--eval-data",
        metavar="FILE",
        help="--against: score both on this labelled file (TSV, CSV, JSONL, Parquet). Default: the baseline's held-out "
        "rows.",
    ),
]
JUnit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE.xml", help="--against: write the checks as JUnit XML.")
]
Summary = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE.md", help="--against: append a Markdown summary, for a CI's job summary."),
]


_SHARES = ("max-slowdown", "max-memory-growth", "max-size-growth", "max-score-loss")


class Gating:
    """What the options of the gate say; nothing of them is read without ``--against``."""

    def __init__(
        self,
        against: str | None,
        shares: tuple[str | None, ...],
        eval_data: Path | None,
        junit: Path | None,
        summary: Path | None,
    ) -> None:
        """``shares``: as given, in the order of the options."""
        self.against, self.eval_data, self.junit, self.summary = against, eval_data, junit, summary
        given = dict(zip(_SHARES, shares, strict=True))
        asked = {**given, "eval-data": eval_data, "junit": junit, "summary": summary}
        if against is None and (alone := [name for name, value in asked.items() if value is not None]):
            raise InputError(f"--{alone[0]}: says what --against may find; add --against BASELINE")
        if eval_data is not None and given["max-score-loss"] == "off":
            raise InputError("--eval-data: scores both on a file, but --max-score-loss off checks no score")
        self.shares = {name.replace("-", "_"): _share(text, name) for name, text in given.items() if text is not None}

    def options(self) -> GateOptions:
        """What the candidate may be worse by."""
        from edgeformer.stages.profiling.gating.files import GateOptions

        return GateOptions(**self.shares, eval_data=self.eval_data)


def run_gate(
    gating: Gating, location: Location, profile: DeviceProfile, options: ProfileOptions, where: tuple[Path, bool]
) -> None:
    """Measure both, print what came of it, and write what CI reads.

    Args:
        gating: the baseline and what is allowed.
        location: of the candidate.
        profile: of the device whose budget names the shape.
        options: shapes, threads and artifacts.
        where: the folder of runs; and whether to print one JSON document.

    Raises:
        InputError: what CI reads cannot be written there.
        typer.Exit: 3, something is worse than allowed; 4, not everything could be decided.
    """
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.workspace import require_writable
    from edgeformer.reporting.gate import append_summary, print_gate, write_junit
    from edgeformer.run import locate
    from edgeformer.stages.profiling.gating.gate import gate_bundles, named_baseline

    assert gating.against is not None
    artifacts, as_json = where
    for option, written in (("--junit", gating.junit), ("--summary", gating.summary)):
        if written is not None:
            require_writable(option, written)
    path = Path(gating.against)
    if path.suffix == ".json":
        baseline, notes = named_baseline(path)
    else:
        baseline, notes = locate(gating.against, artifacts).open_bundle(), []
    gate = gate_bundles(location, baseline, profile, (options, gating.options()), show_progress(), notes)
    if as_json:
        print_json(gate)
    else:
        print_gate(gate, stdout())
    if gating.junit is not None:
        write_junit(gate, gating.junit)
    if gating.summary is not None:
        append_summary(gate, gating.summary)
    if gate.exit_code:
        raise typer.Exit(gate.exit_code)


def _share(text: str, name: str) -> Any:
    from edgeformer.formats.units import parse_share

    parse: Callable[[str], float] = parse_share
    if text == "off" and name != "max-slowdown":
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"--{name}: {error}") from None
