"""edgeformer list: recipes, device profiles and runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgeformer.cli.options import Artifacts, Json

if TYPE_CHECKING:
    from edgeformer.schema.manifest import RunManifest


def command(
    what: Annotated[Literal["recipes", "devices", "runs"], typer.Argument(help="What to list.")],
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """List the shipped recipes, the hardware profiles, or the runs in artifacts/."""
    from edgeformer.cli.console import print_json, stdout
    from edgeformer.reporting.tables import plain_table

    rows = _recipes() if what == "recipes" else _devices() if what == "devices" else _runs(artifacts)
    if as_json:
        print_json({what: rows})
    elif rows:
        stdout().print(plain_table(what, rows))
    else:
        typer.echo(f"no {what} in {artifacts}; train one: edgeformer train quickstart")


def _recipes() -> list[dict[str, Any]]:
    from edgeformer.schema.shipped import load_recipe, shipped_names

    recipes = [load_recipe(name) for name in shipped_names("recipes")]
    return [{"name": r.name, "task": r.task, "target": r.target, "description": r.description} for r in recipes]


def _devices() -> list[dict[str, Any]]:
    from edgeformer.schema.shipped import load_profile, shipped_names

    profiles = [load_profile(name) for name in shipped_names("profiles")]
    return [
        {
            "name": p.name,
            "device": p.title,
            "kind": p.kind,
            "compute_capability": p.compute_capability.value if p.compute_capability else None,
            "usable_memory_bytes": p.usable_memory_bytes.value if p.usable_memory_bytes else None,
        }
        for p in profiles
    ]


def _scores(manifest: RunManifest) -> dict[str, Any]:
    from edgeformer.schema.scores import LanguageScore

    test = manifest.test
    if isinstance(test, LanguageScore):
        return {"accuracy": None, "f1": None, "perplexity": test.perplexity, "leaks": manifest.leaks}
    found = {"accuracy": test.accuracy if test else None, "f1": test.f1 if test else None}
    return {**found, "leaks": True} if manifest.leaks else found  # imported, without a score


def _runs(artifacts: Path) -> list[dict[str, Any]]:
    from edgeformer.schema.errors import ArtifactError
    from edgeformer.schema.workspace import read_run, run_folders

    rows: list[dict[str, Any]] = []
    for folder in run_folders(artifacts):
        try:
            manifest = read_run(folder)
        except ArtifactError as error:
            rows.append({"run": folder.name, "status": f"unreadable: {error}"})
            continue
        rows.append(
            {
                "run": manifest.run,
                "status": manifest.status,
                "started": manifest.started,
                "split": manifest.data.split,
                "synthetic": manifest.data.synthetic,
                "parameters": manifest.parameters,
                **_scores(manifest),
                "bundle": (folder / "bundle" / "bundle.json").is_file(),
            }
        )
    return rows
