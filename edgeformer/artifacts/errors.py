"""Errors that edgeformer raises on purpose, each with the exit code of the command.

Exit code 3 (finished, but incomplete) is mostly not an error: commands return it themselves.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class EdgeformerError(Exception):
    """Base class of all errors. ``str(error)`` is the complete message for the user, without a traceback.

    ``exit_code``: None: that of the class.
    """

    exit_code = 1

    def __init__(self, message: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class InputError(EdgeformerError):
    """The user's input cannot be used; nothing was written."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe, a device profile or a ``--set`` override is not valid."""


class DataError(InputError):
    """A data file, a column, a label or a tokenizer is missing or unusable."""


class AmbiguousDataError(DataError):
    """Data can be read in several ways, and the user has to choose one. Nothing was written."""

    exit_code = 3


class ArtifactError(InputError):
    """A run, bundle or artifact is missing, damaged or not what it claims to be."""


class NotBuiltError(InputError):
    """The manifest lists the requested artifacts, but export rejected them or could not build them."""

    exit_code = 3


class MissingDependencyError(EdgeformerError):
    """An optional package is needed for this command; the message names the extra to install."""


class NoisyMachineError(EdgeformerError):
    """Other work on the machine disturbed a measurement too much to use it; the message says what to do."""

    exit_code = 4


class InterruptedRun(EdgeformerError):
    """The user pressed Ctrl-C; the message says how to resume."""

    exit_code = 130


class AlreadyReported(EdgeformerError):
    """Ends this process without output, with the exit code of another process that prints the message."""


_LONGEST_NAME, _MOST_NAMES = 80, 1000
"""Maximum length of a name, and number of names, that difflib compares: it would take minutes for more."""


def nearest_names(name: str, allowed: Iterable[str], limit: int = 1) -> list[str]:
    """Return the ``limit`` allowed names nearest to ``name``; case and outer spaces are ignored."""
    readable = [candidate for candidate in allowed if len(candidate) <= _LONGEST_NAME][:_MOST_NAMES]
    folded = {candidate.strip().casefold(): candidate for candidate in reversed(readable)}
    near = difflib.get_close_matches(name[:_LONGEST_NAME].strip().casefold(), folded, n=limit, cutoff=0.5)
    return [folded[candidate] for candidate in near]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return ``did you mean 'x'? `` for the nearest allowed name, or an empty text if none is near."""
    near = nearest_names(name, allowed)
    return f"did you mean {near[0]!r}? " if near else ""


def install_hint(extra: str, *, reinstall: bool = False) -> str:
    """Return the command that installs edgeformer with an extra, and where to run it.

    It names the clone: edgeformer is not on the public package index, where anyone could claim its name.
    """
    forced = "--force-reinstall " if reinstall else ""
    return f'python -m pip install {forced}".[{extra}]" in the clone, or with the path of the wheel in place of the dot'


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Wrap imports of packages that come with an extra. Raises MissingDependencyError, which names it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("edgeformer"):
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {error.name}, which is not installed; install it with: {install_hint(extra)}"
        ) from None
