"""Is the device that a profile describes this very machine?"""

from __future__ import annotations

from dataclasses import dataclass

from edgeformer.runtime import nvidia
from edgeformer.schema.device import DeviceProfile
from edgeformer.schema.host import cpu_name


@dataclass(frozen=True)
class Target:
    """Whether the device is present, why (not), and the GPU that computes here if there is one."""

    present: bool
    reason: str
    gpu: nvidia.Gpu | None = None


def find_target(device: DeviceProfile) -> Target:
    """Look for ``device`` on this host by its profile's ``match``.

    A CPU profile without ``match`` means "this host, whatever it is". For a GPU profile that is not present,
    ``gpu`` is the first other card, on which the host's rows are then measured.
    """
    if device.kind == "cpu":
        name = cpu_name()
        if device.match is None or device.match.lower() in name.lower():
            return Target(True, f"this host: {name}")
        return Target(False, f"this host's processor is {name}, not {device.match}")
    cards = nvidia.gpus()
    wanted = device.match or device.title
    for card in cards:
        if wanted.lower() in card.name.lower():
            return Target(True, f"present: {card.name}", card)
    present = ", ".join(card.name for card in cards) or "no NVIDIA card"
    return Target(False, f"{device.title} is not present on this host ({present})", cards[0] if cards else None)
