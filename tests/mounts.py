"""Disks of a test's own, mounted in a namespace of its own: they are gone with it, whatever happens."""

import subprocess
from pathlib import Path


def on_disk(disk: Path, options: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command while another disk lies over the folder ``disk``.

    Args:
        disk: an empty folder.
        options: of mounting it: ``size=16m`` (it fills up), ``ro`` (nothing can be written).
        command: and its arguments.
    """
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    line = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(disk), *command]
    return subprocess.run(line, capture_output=True, text=True, check=False)
