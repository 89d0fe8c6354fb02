"""Command schema: JSON Schema of a recipe, device profile, bundle or report."""

from __future__ import annotations

from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt


def command(
    document: Literal["recipe", "profile", "bundle", "report"] = Argument(
        ..., help="The kind of file.", show_default=False
    ),
    style: Literal["json", "markdown"] = Option("json", "--format", help="A JSON Schema, or its keys as tables."),
    as_json: opt.Json = False,
) -> None:
    """Print the keys of a file: as a JSON Schema, with which editors complete and check YAML, or as tables.

    Written to recipe.schema.json, an editor with a YAML language server takes it from a recipe's first line:
    # yaml-language-server: $schema=recipe.schema.json

    Examples:
      edgeformer schema recipe
      edgeformer schema profile
      edgeformer schema recipe --format markdown
    """
    from edgeformer.cli.console import say
    from edgeformer.report.schema import reference, schema_of

    if style == "json":
        opt.print_json(schema_of(document))
        return
    if as_json:
        raise InputError("--json: prints a JSON document; leave out --format markdown, or --json")
    say(reference(document))
