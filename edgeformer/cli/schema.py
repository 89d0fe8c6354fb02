"""Command schema: JSON Schema of a recipe, device profile, bundle or report."""

from typing import Literal

from typer import Argument, Option

from edgeformer.artifacts.errors import InputError
from edgeformer.cli import options as opt


def command(
    document: Literal["recipe", "profile", "bundle", "report"] = Argument(
        ..., help="Kind of file.", show_default=False
    ),
    style: Literal["json", "markdown"] = Option(
        "json", "--format", help="JSON Schema, or Markdown tables of the keys."
    ),
    as_json: opt.Json = False,
) -> None:
    """Print the JSON Schema of a recipe, device profile, bundle or report.

    An editor with a YAML language server completes and checks a recipe whose first line is # yaml-language-server:
    $schema=recipe.schema.json

    Examples:
      edgeformer schema recipe
      edgeformer schema profile
      edgeformer schema recipe --format markdown
    """
    from edgeformer.report.schema import reference, schema_of

    if style == "json":
        opt.print_json(schema_of(document))
        return
    if as_json:
        raise InputError("--json: excludes --format markdown; leave out one of them")
    opt.say(reference(document))
