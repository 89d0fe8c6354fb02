"""Finding recipes and device profiles, with or without .yaml: a path first, then the user's own profiles, then the ones
that ship with edgeformer."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import RecipeError
from edgeformer.formats.validation import validate
from edgeformer.formats.yaml_file import read_yaml

Kind = Literal["recipes", "profiles"]
_SUFFIXES = (".yaml", ".yml")


def shipped_folder(kind: Kind) -> Path:
    """Where the shipped files lie: inside an installed wheel, or at the top of a source checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped" / kind
    return installed if installed.is_dir() else package.parent / kind


def shipped_names(kind: Kind) -> list[str]:
    """Names of the shipped recipes or profiles, sorted."""
    return sorted(path.stem for path in shipped_folder(kind).glob("*.yaml"))


def own_profiles(artifacts: Path) -> Path:
    """The folder of the user's own device profiles: where `profile --calibrate` writes and every command looks."""
    return artifacts / "profiles"


def profile_names(local: Path) -> list[str]:
    """Names of the shipped device profiles and of those in the folder ``local``, sorted."""
    return sorted({*shipped_names("profiles"), *(path.stem for path in local.glob("*.yaml"))})


def find(kind: Kind, name: str, local: Path | None = None) -> Path:
    """The file that ``name`` (a path or a shipped name) stands for.

    Args:
        kind: what is looked for.
        name: a path or a name, with or without ``.yaml``.
        local: a folder of the user's own files; one of the same name is used instead of the shipped one.

    Raises:
        RecipeError: neither exists; the message lists the shipped names.
    """
    bare = Path(name).name
    candidates = [Path(name), *(Path(name + suffix) for suffix in _SUFFIXES)]
    if bare == name:  # a path that does not exist must not turn into a shipped recipe of the same name
        for folder in (local, shipped_folder(kind)):
            if folder is not None:
                candidates += [folder / bare, *(folder / (bare + suffix) for suffix in _SUFFIXES)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = shipped_names(kind)
    near = difflib.get_close_matches(Path(name).stem, names, n=1)
    what = "recipe" if kind == "recipes" else "device profile"
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(f"no {what} {name!r}: no such file, and {hint}the shipped ones are {', '.join(names)}")


def load_profile(name: str, local: Path | None = None) -> DeviceProfile:
    """Find, read and validate a device profile: a path, one of the user's own, or a shipped one.

    Args:
        name: a path, or a profile's name.
        local: the user's own profiles, see :func:`own_profiles`; None: those of nobody.

    Raises:
        RecipeError: there is none, or it is no profile.
    """
    return validate(DeviceProfile, read_yaml(find("profiles", name, local)))
