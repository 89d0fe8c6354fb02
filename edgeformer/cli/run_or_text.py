"""[RUN] TEXT…: which of the words is a run. A name that is no run's is an error, never a text for another run."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeformer.artifacts.errors import ArtifactError, InputError, nearest_names

if TYPE_CHECKING:
    from edgeformer.run import Location

NamedRun = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN", help="The run; then every word is a text, also one that looks like a name."),
]


def split(words: list[str], artifacts: Path, run: str | None, command: str) -> tuple[Location, list[str]]:
    """The run, and the words that are texts.

    With ``run`` every word is a text. Else the first word is the run if it names one and texts follow, or come on
    standard input. A first word that could only be a name (letters, digits, ``.``, ``_`` and ``-``) or a path must be
    one.

    Args:
        words: as they were typed.
        artifacts: the folder that holds the runs.
        run: of ``--run``.
        command: what is run, for messages.

    Raises:
        InputError: a first word that looks like a run and is none; the message says how to give it as a text.
        ArtifactError: no such run, or none at all.
    """
    from edgeformer.run import locate

    if run is not None:
        return locate(run, artifacts), words
    if words:
        try:
            return locate(words[0], artifacts), words[1:]
        except ArtifactError:
            followed = len(words) >= 2 or _has_input()
            if _is_there(words[0], artifacts) or (followed and _has_slash(words[0])):
                raise
            if followed and _is_name(words[0]):
                raise _no_such_run(words, artifacts, command) from None
    return locate(None, artifacts), words


def _no_such_run(words: list[str], artifacts: Path, command: str) -> InputError:
    from edgeformer.run import run_folders

    names = [folder.name for folder in run_folders(artifacts)]
    near = nearest_names(words[0], names, most=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    runs = ", ".join(names[-8:]) or "none yet"
    text = f"edgeformer {command} --run {near[0] if near else names[-1] if names else 'RUN'} {words[0]}"
    more = " …" if len(words) > 1 else ""
    return InputError(f"no run {words[0]!r}; {hint}runs in {artifacts}: {runs}; if it is a text: {text}{more}")


def _is_name(word: str) -> bool:
    from edgeformer.artifacts.data_config import NAME_PATTERN

    return re.fullmatch(NAME_PATTERN, word) is not None


def _has_input() -> bool:
    """Whether texts come on standard input: a file or a pipe; not the null device, nor where it is closed."""
    try:
        found = os.fstat(sys.stdin.fileno())
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size > 0)


def _has_slash(word: str) -> bool:
    """Whether it is written as a path; not a text such as "9/10, would watch again"."""
    return ("/" in word or "\\" in word) and not any(character.isspace() for character in word)


def _is_there(word: str, artifacts: Path) -> bool:
    """Whether it is a folder or file, which is no run then."""
    from edgeformer.run import is_there

    blank = not word or any(character.isspace() for character in word)
    return not blank and (is_there(Path(word)) or is_there(artifacts / word))
