"""Pages of the documentation site that are made from the program when the site is built.

MkDocs calls :func:`on_files`. The command line comes from Typer, the keys of files from their pydantic models and the
list of devices from ``profiles/``, so none of these pages can be out of date.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from tabulate import tabulate

from edgeformer.cli.app import app
from edgeformer.report.listing import device_records
from edgeformer.report.schema import reference


def on_files(files: Files, config: Any) -> Files:
    """Add the generated reference pages."""
    pages = {
        "reference/cli.md": command_reference(),
        "reference/recipe.md": reference("recipe"),
        "reference/devices.md": device_list(),
        "reference/device-profile.md": reference("profile"),
        "reference/bundle.md": reference("bundle"),
        "reference/report.md": reference("report"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=f"{text}\n"))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Adapt a page: names instead of Sphinx roles, no line break within an option, a link from a plot to its file."""
    html = re.sub(r":\w+:<code>(?:~[\w.]*\.)?([\w.]+)</code>", r"<code>\1</code>", html)
    html = re.sub("<code>[^<]+</code>", lambda code: _keep_options_whole(code[0]), html)
    return re.sub(r'<img [^>]*src="([^"]+\.png)"[^>]*>', r'<a href="\1">\g<0></a>', html)


def _keep_options_whole(code: str) -> str:
    """Forbid a line break within ``--option``, allow one within a long path; show a cell's pipe without a backslash."""
    code = re.sub(r"--[\w-]+", r'<span class="option">\g<0></span>', code.replace("\\|", "|"))
    is_path = code.count("/") + code.count("::") > 2 and " " not in code  # of the tag's own slashes there is one
    return re.sub(r"(?<!<)/|::", r"\g<0><wbr>", code) if is_path else code


def command_reference() -> str:
    """Return every command with its arguments and options, in the groups of ``edgeformer --help``."""
    root = typer.main.get_command(app)
    parts = ["# Command line", "`edgeformer COMMAND --help` prints the same.", EXIT_CODES]
    commands = root.commands  # type: ignore[attr-defined]
    for group in dict.fromkeys(command.rich_help_panel for command in commands.values()):
        parts.append(f"## {group}")
        for name, command in commands.items():
            if command.rich_help_panel == group:
                subcommands = getattr(command, "commands", {"": command})
                for subcommand in subcommands:
                    parts += _command(f"{name} {subcommand}".strip(), subcommands[subcommand])
    return "\n\n".join(parts)


EXIT_CODES = """| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | bad input or usage; nothing was written |
| 3 | done, but an artifact was rejected or unavailable, or a limit is not met |
| 4 | undecided, because other programs disturbed the measurement |
| 130 | interrupted; can be resumed |"""


def _command(title: str, command: Any) -> list[str]:
    context = command.make_context(title, [], resilient_parsing=True)
    usage = " ".join(["edgeformer", title, *command.collect_usage_pieces(context)])
    text, _, examples = (command.help or "").partition("Examples:\n")
    rows = {"": ["| option | meaning |", "|---|---|"], "Advanced": ["| advanced option | meaning |", "|---|---|"]}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:  # a hidden option
            continue
        cells = (cell.replace("|", r"\|") for cell in record)
        rows[parameter.rich_help_panel or ""].append("| `{}` | {} |".format(*cells))
    tables = ["\n".join(lines) for lines in rows.values() if len(lines) > 2]
    parts = [f"### edgeformer {title}", f"    {usage}", text, *tables]
    if examples:
        parts.append(f"```bash\n{dedent(examples).strip()}\n```")
    return [re.sub(r"\[/?b\]", "", part) for part in parts]


def device_list() -> str:
    """Return a table of the shipped device profiles."""
    rows = [
        {
            "name": f"`{row['name']}`",
            "device": row["device"],
            "memory, GiB": (row["memory_bytes"] or 0) / 2**30 or None,
            "bandwidth, GB/s": (row["bandwidth_bytes_per_s"] or 0) / 1e9 or None,
            "FP16, TFLOP/s": (row["fp16_ops_per_s"] or 0) / 1e12 or None,
        }
        for row in device_records(Path("artifacts"))
    ]
    table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g", missingval="")
    return "\n\n".join(["# Devices", "`edgeformer list devices` prints the profiles that edgeformer ships.", table])
