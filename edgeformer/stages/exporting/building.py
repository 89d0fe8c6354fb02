"""Which builders an export runs, and what each of them can build for here: the same for a run and a wrapped graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeformer.backends import Builder, Target, Unavailable, builder_named
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import InputError
from edgeformer.stages.exporting.variants import ExportOptions

Plans = tuple[tuple[Builder, Target | Unavailable], ...]
"""Each builder, with what it builds for here, or why it builds nothing."""


def builders_asked(options: ExportOptions) -> tuple[Builder, ...]:
    """The builders that were named, each once.

    Raises:
        InputError: no builder is called so; a device is named, and nothing is built for it.
    """
    builders = tuple(builder_named(name) for name in dict.fromkeys(options.build))
    if options.target is not None and not builders:
        raise InputError("--target: says what is built for; add --trt, or --build with a builder's name")
    return builders


def plans_of(builders: Sequence[Builder], options: ExportOptions, usual: str | None, profiles: Path) -> Plans:
    """What each builder can build for here: the device that was named, or else the ``usual`` one.

    Args:
        builders: that run.
        options: of the export.
        usual: profile of the recipe's device; None: there is none.
        profiles: the user's own device profiles.

    Raises:
        InputError: one needs a device, and none is named; one is named, and none of them builds for it.
    """
    needing = next((builder for builder in builders if builder.needs_device), None)
    name = options.target or (usual if needing is not None else None)
    if name is None and needing is not None:
        raise InputError(f"{needing.flag}: which device? Name its profile: --target rtx4050 (edgeformer list devices)")
    device = load_profile(name, profiles) if name is not None else None
    plans = tuple((builder, builder.plan(device)) for builder in builders)
    if options.target is not None and not any(isinstance(to, Unavailable) or to.device for _, to in plans):
        names = ", ".join(builder.name for builder in builders)
        raise InputError(f"--target: {names}: what it builds is the same for every device; leave it out, or add --trt")
    return plans
