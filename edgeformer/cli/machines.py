"""Command machines: real machines that commands with --on use over SSH."""

from contextlib import closing
from pathlib import Path

import typer
from typer import Argument, Option

from edgeformer.cli import options as opt

app = typer.Typer(no_args_is_help=True, help="Real machines that profile, verify and gate use with --on.")
Host = typer.Argument(..., metavar="HOST", help="[USER@]HOST, or a name of ~/.ssh/config.")


@app.command("add")
def add(
    host: str = Host,
    run: list[str] | None = Argument(
        None, metavar="[RUN…]", help="Runs to calibrate with. Default: the newest finished run."
    ),
    name: str = Option(..., "--name", metavar="NAME", help="Name of the machine for --on and --device."),
    device: str | None = Option(
        None,
        metavar="PROFILE",
        help="Copy the facts of this profile and calibrate nothing, e.g. for the GPU of a Jetson.",
    ),
    allow_noise: opt.AllowNoise = False,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Calibrate a machine, and write a device profile with its measured facts.

    Times the runs there and compares estimates with measurements, for some minutes. Afterwards --on NAME
    measures there, and --device NAME estimates it without the machine. With three runs that differ, the error for other
    models is known, too.

    Examples:
      edgeformer machines add pi@raspberrypi --name kitchen-pi
      edgeformer machines add jetson --name robot --device jetson-orin-nano-8gb
    """
    from edgeformer.artifacts.documents import load_profile, own_profiles
    from edgeformer.machines.commands import add_machine
    from edgeformer.report.tables import print_calibration

    progress = opt.show_progress()
    base = load_profile(device, own_profiles(artifacts), progress.message) if device is not None else None
    bundles = [opt.locate(argument, artifacts).open_bundle() for argument in run or (None,)] if base is None else []
    options = ["--allow-noise"] * allow_noise
    profile, path = add_machine(name, host, bundles, base, options, artifacts, progress)
    if as_json:
        opt.print_json({"path": str(path), "profile": profile.model_dump(mode="json", by_alias=True)})
        return
    if profile.calibration is not None and base is None:
        print_calibration(profile.calibration, path, opt.stdout())
    else:
        opt.say(f"profile {path}")
    opt.say_next(f"edgeformer profile --on {name}")


@app.command("list")
def list_machines(artifacts: opt.Artifacts = Path("artifacts"), as_json: opt.Json = False) -> None:
    """List the machines that were added, with their addresses."""
    from edgeformer.report.listing import device_records, device_table

    rows = [row for row in device_records(artifacts) if row.get("address") or "kind" not in row]
    if as_json:
        opt.print_json({"machines": rows})
    elif rows:
        opt.stdout().print(device_table(rows))
    else:
        opt.say(f"no machines in {artifacts}; add one: edgeformer machines add USER@HOST --name NAME")


@app.command("pack")
def pack(
    platform: str = Option(
        ..., "--for", metavar="PLATFORM", help="System, architecture and Python of the machine: linux-aarch64-cp311."
    ),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Collect edgeformer and its dependencies for a machine that reaches no package index.

    Writes DIR/packs/PLATFORM, from which --on installs edgeformer on every such machine. Without SSH, copy the folder
    and run pip install --no-index --find-links FOLDER edgeformer.

    Examples:
      edgeformer machines pack --for linux-aarch64-cp311
    """
    from edgeformer.artifacts.units import format_bytes
    from edgeformer.machines.commands import PACKS_FOLDER
    from edgeformer.machines.packing import download_pack

    wheels = download_pack(platform, artifacts / PACKS_FOLDER)
    size_bytes = sum(path.stat().st_size for path in wheels)
    folder = wheels[0].parent
    if as_json:
        opt.print_json({"path": str(folder), "wheels": [path.name for path in wheels], "size_bytes": size_bytes})
    else:
        opt.say(f"pack    {folder}: {len(wheels)} wheels, {format_bytes(size_bytes)}")
        opt.say_next("edgeformer profile --on HOST")


@app.command("clean")
def clean(
    hosts: list[str] = Argument(..., metavar="HOST…", help="[USER@]HOST, or a name of machines add."),
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Stop the jobs of edgeformer on the named machines, and remove everything that --on has written there.

    Examples:
      edgeformer machines clean pi@raspberrypi
    """
    from edgeformer.artifacts.units import format_bytes
    from edgeformer.machines.commands import find_targets
    from edgeformer.machines.connection import Connection

    removed: dict[str, int] = {}
    for target in find_targets(hosts, artifacts):
        with closing(Connection(target.address)) as connection:
            removed[target.name] = connection.call("clean", {})["bytes"]
    if as_json:
        opt.print_json({"removed_bytes": removed})
    else:
        for name, size_bytes in removed.items():
            opt.say(f"{name}: removed {format_bytes(size_bytes)}")
