"""What is built of a bundle's graphs, by every builder that was asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgeformer.backends import Builder, BuildJob, Unavailable
from edgeformer.backends.backend import ENGINES_FOLDER
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import ArtifactManifest


def device_of(builders: Sequence[Builder], target: str | None, recipe_target: str | None) -> DeviceProfile | None:
    """The device to build for; None where nothing needs one.

    Args:
        builders: those that were asked for.
        target: the profile that the command names.
        recipe_target: the one that the recipe names.

    Raises:
        InputError: a builder needs a device, and neither names one; or there is no such profile.
    """
    name = target or recipe_target
    needing = next((builder for builder in builders if builder.needs_device), None)
    if name is None and needing is not None:
        raise InputError(f"{needing.flag}: which device? Name its profile: --target rtx4050 (edgeformer list devices)")
    return load_profile(name) if name is not None and builders else None


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
