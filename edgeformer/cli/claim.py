"""edgeformer claim: a report becomes a file that another machine measures again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdout


def command(
    report: Annotated[
        Path,
        typer.Argument(metavar="REPORT", help="A report of edgeformer profile: its JSON file.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The claim. Default: REPORT with the ending .claim.zip."),
    ] = None,
    bundle: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="The bundle that was measured: a run or a folder. Default: where it lay."),
    ] = None,
    with_bundle: Annotated[
        bool,
        typer.Option("--with-bundle", help="Pack the whole bundle, so that the claim can be measured again anywhere."),
    ] = False,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Pack a report, the checksums of its bundle, the machine and its calibration into one file with its own checksum.

    The bundle must be what was measured, unchanged. Of the machine the claim holds what the report says of
    it (processor, card, cores, memory, versions, threads, power), and, made on that machine, its instructions and the
    profile of [b]profile --calibrate[/b]. [b]verify-claim[/b] checks it, measures its rows again, and makes a device
    profile of it.

    The report names the folder that the bundle lay in; the bundle's manifest its labels, and where its data came from.
    --with-bundle gives the model away, and its golden inputs.

    Examples:

      edgeformer claim artifacts/my-run/reports/host.json

      edgeformer claim artifacts/my-run/reports/host.json --with-bundle -o my-machine.claim.zip
    """
    from edgeformer.formats.documents import own_profiles
    from edgeformer.formats.workspace import require_writable
    from edgeformer.reporting.claim import print_claim
    from edgeformer.run import locate
    from edgeformer.stages.profiling.claiming.make import make_claim

    if output is not None:
        require_writable("-o", output)
    named = locate(bundle, artifacts).open_bundle() if bundle is not None else None
    made = make_claim(report, output, own_profiles(artifacts), whole=with_bundle, bundle=named)
    if as_json:
        claim = made.claim.model_dump(mode="json", by_alias=True)
        print_json({"path": str(made.path), "sha256": made.sha256, "claim": claim})
    else:
        print_claim(made, stdout())
