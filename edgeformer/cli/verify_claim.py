"""edgeformer verify-claim: does somebody's report hold on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdout
from edgeformer.formats.errors import InputError


def command(
    claim: Annotated[Path, typer.Argument(metavar="CLAIM", help="A file of edgeformer claim.", show_default=False)],
    bundle: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The bundle that the claim is about, where it is not inside: a run or a folder."
        ),
    ] = None,
    tolerance: Annotated[
        str, typer.Option(metavar="SHARE", help="A time holds that is off by less than this.")
    ] = "15%",
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Begin no new round later than this. Default: 10 for every five rows."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure the rows again, or check the file alone.")
    ] = True,
    write_profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Write the claim's facts as a device profile, called as the file is."),
    ] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Check a claim, and measure its rows again where this is a machine of the claimed kind.

    The file must be whole; report, bundle and calibration must belong together; and no number in it may contradict
    another. Then every row is [b]confirmed[/b], [b]contradicted[/b], [b]undecided[/b] (this machine is too noisy to
    say) or [b]not comparable[/b], with the reason: another processor or card, another version, another speed. Rows are
    measured in turn, in fresh processes, until a sequential test is sure of each.

    Exit code 0: all that was measured here holds; 2: the file is damaged or contradicts itself; 3: a row is
    contradicted; 4: none is, but nothing could be compared, a row is undecided, or another time was excused.

    Examples:

      edgeformer verify-claim my-machine.claim.zip

      edgeformer verify-claim host.claim.zip --bundle path/to/bundle --tolerance 10%

      edgeformer verify-claim my-machine.claim.zip --no-measure

      edgeformer verify-claim my-machine.claim.zip --write-profile profiles/my-machine.yaml
    """
    from edgeformer.cli.console import say
    from edgeformer.cli.progress import show_progress
    from edgeformer.formats.claim import CONTRADICTED
    from edgeformer.formats.units import parse_share
    from edgeformer.reporting.claim import print_claim_verification
    from edgeformer.run import locate
    from edgeformer.stages.profiling.claiming.check import ClaimOptions, verify_claim
    from edgeformer.stages.profiling.claiming.contribute import require_free, write_contribution
    from edgeformer.stages.profiling.claiming.rounds import AgainRules

    try:
        share = parse_share(tolerance)
    except ValueError as error:
        raise InputError(f"--tolerance: {error}") from None
    if share <= 0:
        raise InputError("--tolerance: two measurements are never equal; allow more than 0%")
    if write_profile is not None:
        require_free(write_profile)
    named = locate(bundle, artifacts).open_bundle() if bundle is not None else None
    options = ClaimOptions(AgainRules(tolerance=share, longest_s=None if minutes is None else minutes * 60), measure)
    found, opened = verify_claim(claim, named, options, show_progress())
    if as_json:
        print_json({**found.model_dump(mode="json"), "exit_code": found.exit_code})
    else:
        print_claim_verification(found, stdout())
    if write_profile is not None and found.exit_code == CONTRADICTED:
        say(f"{write_profile}: not written, because the claim does not hold here", err=True)
    elif write_profile is not None:
        write_contribution(opened, found, write_profile)
        say(f"profile {write_profile}", err=as_json)
    if found.exit_code:
        raise typer.Exit(found.exit_code)
