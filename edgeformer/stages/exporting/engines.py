"""What is built of a bundle's graphs, by every builder that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeformer.backends import Builder, BuildJob, Unavailable
from edgeformer.backends.backend import ENGINES_FOLDER
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.shipped import load_profile


def device_of(builders: Sequence[Builder], name: str | None, profiles: Path) -> DeviceProfile | None:
    """The device to build for; None where nothing needs one.

    Args:
        builders: those that were asked for.
        name: of its profile, as the command or else the recipe says; None: neither does.
        profiles: the user's own profiles.

    Raises:
        InputError: a builder needs a device, and none is named; or there is no such profile.
    """
    needing = next((builder for builder in builders if builder.needs_device), None)
    if name is None and needing is not None:
        raise InputError(f"{needing.flag}: which device? Name its profile: --target rtx4050 (edgeformer list devices)")
    return load_profile(name, profiles) if name is not None and builders else None


def build(builders: Sequence[Builder], device: DeviceProfile | None, job: BuildJob) -> Iterator[ArtifactManifest]:
    """What each builder makes of the graphs, or one entry that says why it makes nothing.

    Args:
        builders: those that were asked for, in their order.
        device: None only where no builder needs one.
        job: what to build from.
    """
    for builder in builders:
        target = builder.plan(device)
        if isinstance(target, Unavailable):
            yield ArtifactManifest(
                id=f"{target.format}-{job.precision}",
                file=None,
                format=target.format,
                precision=job.precision,
                status="unavailable",
                reason=target.reason,
            )
        else:
            (job.bundle / ENGINES_FOLDER).mkdir(exist_ok=True)
            yield from builder.build(target, job)
