"""Is the device that a profile describes this very machine?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.units import format_bytes
from edgeformer.machine import nvidia
from edgeformer.machine.host import board_names, cpu_name

# Error correction takes a sixteenth of some cards' memory (T4, L4); cards of one name differ by a third and more.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.1


@dataclass(frozen=True)
class Target:
    """Whether the device is present, why (not), and the GPU that computes here if there is one."""

    present: bool
    reason: str
    gpu: nvidia.Gpu | None = None


def find_target(device: DeviceProfile, root: Path = Path("/")) -> Target:
    """Look for ``device`` on this host: by its name, by its memory too, and a Jetson by its part number.

    A CPU profile without ``match`` means "this host, whatever it is". For a GPU profile that is not present,
    ``gpu`` is the first other card, on which the host's rows are then measured.

    Args:
        device: what is looked for.
        root: where the system's files lie.
    """
    if device.kind == "cpu":
        return _find_processor(device, cpu_name(root))
    cards = nvidia.gpus()
    if device.boards:
        return _find_board(device, cards, board_names(root))
    for card in cards:
        if _named(device, card.name) and _as_large(device, card):
            return Target(True, f"present: {card.name}", card)
    present = ", ".join(_described(device, card) for card in cards) or "no NVIDIA card"
    return Target(False, f"{device.title} is not present on this host ({present})", _first(cards))


def _find_processor(device: DeviceProfile, name: str) -> Target:
    if device.match is None or _named(device, name):
        return Target(True, f"this host: {name}")
    return Target(False, f"this host's processor is {name}, not {device.match}")


def _find_board(device: DeviceProfile, cards: list[nvidia.Gpu], board: tuple[str, ...]) -> Target:
    """All modules of a Jetson generation give their GPU one name ("Orin"); the part number tells them apart."""
    if any(part.lower() in name.lower() for part in device.boards for name in board):
        # An older JetPack has no NVML: the GPU is there all the same.
        gpu = next((card for card in cards if _named(device, card.name)), None)
        return Target(True, f"present: {board[0]}", gpu)
    like = next((card.name for card in cards if _named(device, card.name)), None)
    if like is not None and not board:
        found = f"{like}, but which module it is on cannot be seen: /proc/device-tree is hidden, as in most containers"
    elif like is not None:
        found = f"{like} on {board[0]}, which is none of the part numbers {', '.join(device.boards)}"
    else:
        found = ", ".join(card.name for card in cards) or "no NVIDIA card"
    return Target(False, f"{device.title} is not present on this host ({found})", _first(cards))


def _named(device: DeviceProfile, name: str) -> bool:
    """Whole words only ("NVIDIA L4" is not in "NVIDIA L40S"), and none of the siblings' words."""
    return _has_words(name, device.match or device.title) and not any(
        _has_words(name, word) for word in device.match_not
    )


def _has_words(name: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", name, re.IGNORECASE) is not None


def _as_large(device: DeviceProfile, card: nvidia.Gpu) -> bool:
    """Cards of one name come with different memory (RTX 3050, A100); not known counts as the same."""
    if device.memory_bytes is None or card.memory_bytes is None:
        return True
    return _LEAST_MEMORY <= card.memory_bytes / device.memory_bytes.value <= _MOST_MEMORY


def _described(device: DeviceProfile, card: nvidia.Gpu) -> str:
    """With its memory where that is what makes it another card."""
    return f"{card.name} with {format_bytes(card.memory_bytes)}" if _named(device, card.name) else card.name


def _first(cards: list[nvidia.Gpu]) -> nvidia.Gpu | None:
    return cards[0] if cards else None
