"""Whether a device is present on this host, by its name, its memory, or the part number of a Jetson's module."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.units import format_bytes
from edgeformer.system import nvidia
from edgeformer.system.host import board_names, cpu_name

# Error correction takes a sixteenth of some cards' memory (T4, L4); cards of one name differ by a third and more.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.1


@dataclass(frozen=True)
class DevicePresence:
    """Whether the device is present, why (not), and the GPU that computes on this host, if there is one."""

    present: bool
    reason: str
    gpu: nvidia.Gpu | None = None


def find_target(device: DeviceProfile, root: Path = Path("/")) -> DevicePresence:
    """Look for ``device`` on this host.

    A CPU profile without ``match`` is this host, whatever it is. For a GPU profile that is not present, ``gpu`` is the
    first other card, on which the host's rows are then measured.
    """

    def is_named(name: str) -> bool:
        """Whether it has the device's whole words ("NVIDIA L4" is not in "NVIDIA L40S") and none of its siblings'."""
        patterns = [rf"(?<!\w){re.escape(words)}(?!\w)" for words in (device.match or device.title, *device.match_not)]
        has_own, *has_siblings = [re.search(pattern, name, re.IGNORECASE) is not None for pattern in patterns]
        return has_own and not any(has_siblings)

    if device.kind == "cpu":
        name = cpu_name(root)
        if device.match is None or is_named(name):
            return DevicePresence(True, f"this host: {name}")
        return DevicePresence(False, f"this host's processor is {name}, not {device.match}")
    cards = nvidia.gpus()
    names: list[str] = []
    if device.boards:
        # All modules of a Jetson generation give their GPU one name ("Orin"); the part number distinguishes them.
        card, board = next((card for card in cards if is_named(card.name)), None), board_names(root)
        if any(part.lower() in name.lower() for part in device.boards for name in board):
            return DevicePresence(True, f"present: {board[0]}", card)  # an older JetPack has no NVML, and no card
        names = [card.name for card in cards]
        if card is not None and board:
            names = [f"{card.name} on {board[0]}, which has none of the part numbers {', '.join(device.boards)}"]
        elif card is not None:
            names = [f"{card.name} on an unknown module: /proc/device-tree cannot be read, as in most containers"]
    else:
        for card in cards:
            name = card.name
            if is_named(name):
                # Cards of one name have different memory (RTX 3050, A100); unknown memory counts as the same.
                expected, actual = device.memory_bytes, card.memory_bytes
                if expected is None or actual is None or _LEAST_MEMORY <= actual / expected.value <= _MOST_MEMORY:
                    return DevicePresence(True, f"present: {name}", card)
                name += f" with {format_bytes(actual)}"
            names.append(name)
    present = ", ".join(names) or "no NVIDIA card"
    return DevicePresence(False, f"this host has no {device.title} ({present})", next(iter(cards), None))


AUTO = "auto"  # device name of the profile that names this machine


def resolve_device(name: str | None, own: Path, note: Callable[[str], None] | None = None) -> DeviceProfile:
    """Return a device profile as :func:`load_profile` does.

    ``auto`` is the first profile that names this machine's card, board or processor, else ``host``. The user's
    profiles, in the folder ``own``, come before the shipped ones; a card comes before a processor. Profiles of
    ``machines add`` do not count: each is of one machine, and others have the same processor.
    """
    if name != AUTO:
        return load_profile(name, own, note)
    own_names = [path.stem for path in sorted(own.glob("[!.]*.yaml"))]
    profiles = [load_profile(name, own) for name in dict.fromkeys([*own_names, *shipped_names("profiles")])]
    named = [profile for profile in profiles if profile.address is None and (profile.match or profile.boards)]
    order = sorted(named, key=lambda profile: (profile.name not in own_names, profile.kind != "cuda"))
    present = (profile for profile in order if find_target(profile).present)
    return next(present, load_profile("host", own))
