"""Command exits: early-exit thresholds with a guaranteed score drop."""

from pathlib import Path

from typer import Option

from edgeformer.cli import options as opt


def command(
    run: opt.Run = None,
    max_drop: str = Option("1%", metavar="SHARE", help="Largest acceptable score drop; 1% is one point of accuracy."),
    risk: str = Option("5%", metavar="SHARE", help="Probability that the guarantee is wrong; 5% is 95% confidence."),
    artifact: str | None = Option(
        None, metavar="ID", help="Choose thresholds for this step artifact only. Default: all."
    ),
    split: str = Option("validation", help="Rows that choose the thresholds: validation, or the name of a test set."),
    data: Path | None = Option(
        None, metavar="FILE", help="Labelled file whose rows choose the thresholds, not --split."
    ),
    text: opt.TextColumn = None,
    label: opt.LabelColumn = None,
    pair: opt.PairColumn = None,
    encoding: opt.Encoding = None,
    runtime: opt.Runtime = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Choose early-exit thresholds that keep the score drop within --max-drop.

    Runs held-out rows through every exit of the step artifact (export --exit all), and chooses the thresholds that save
    the most loops. A statistical test (Learn then Test) guarantees the score drop; the guarantee is wrong with a
    probability of at most --risk. Writes thresholds and measured times to bundle.json, for [b]predict --confidence
    auto[/b]. The validation split also chose the best epoch, so for an independent guarantee use --data or a test set.
    With too few rows, exits writes nothing (exit code 2).

    Examples:
      edgeformer exits --max-drop 1%
      edgeformer exits path/to/bundle --data held-out.tsv --max-drop 0.5% --risk 10%
    """
    from edgeformer.artifacts.units import parse_share
    from edgeformer.inference.evaluate import EvaluateOptions
    from edgeformer.inference.exits import GuaranteeOptions, calibrate_exits
    from edgeformer.report.sentences import exit_guarantee, exit_time
    from edgeformer.report.tables import guarantee_table

    location = opt.locate(run, artifacts)
    step = artifact or location.artifact
    rows = EvaluateOptions(step, split, data, text=text, label=label, pair=pair, runtime=runtime, encoding=encoding)
    drop, wrong = opt.parse_value("--max-drop", max_drop, parse_share), opt.parse_value("--risk", risk, parse_share)
    guarantees = calibrate_exits(location, GuaranteeOptions(rows, drop, wrong), opt.show_progress())
    paying = [id_ for id_, guarantee in guarantees.items() if guarantee.time.pays]
    recommended = min(paying, key=lambda id_: guarantees[id_].time.early_ms["mean"], default=None)
    if as_json:
        documents = {id_: guarantee.model_dump(mode="json") for id_, guarantee in guarantees.items()}
        pays = {id_: guarantee.time.pays for id_, guarantee in guarantees.items()}
        bundle = str(location.require_bundle())
        opt.print_json({"bundle": bundle, "guarantees": documents, "recommended": recommended, "pays": pays})
        return
    opt.stdout().print(guarantee_table(location.name, guarantees))
    for id_, guarantee in guarantees.items():
        opt.say(f"{id_}: {exit_guarantee(guarantee)}\n{id_}: {exit_time(guarantee.time)}")
    if recommended is None:
        opt.say(
            "not recommended on this machine: no artifact is known to be faster with early exit than with all loops"
        )
        command, purpose = f"profile {location.argument} --choose", "chooses among the artifacts without early exit"
    else:
        command = f"predict {location.argument} --confidence auto --artifact {recommended} TEXT"
        purpose = "uses these thresholds"
    opt.say_next(f"edgeformer {command}", purpose)
