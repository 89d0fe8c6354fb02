"""What `doctor` says of a Jetson: which JetPack it has, what edgeformer can do with that, and what a venv hides.

Nobody has run edgeformer on a Jetson. What stands here was read in NVIDIA's release notes and in the reports of users.
"""

from __future__ import annotations

import re
import sys
from importlib import util
from pathlib import Path

from edgeformer.machine.capability import Capability

_RELEASE = Path("etc/nv_tegra_release")
_TENSORRT = "usr/lib/python3*/dist-packages/tensorrt"
_OF_RELEASE = {
    (35, 0): (
        "JetPack 5",
        "its Python is 3.8, where 3.10 is needed, and its TensorRT 8 has no strongly typed networks",
    ),
    (36, 0): ("JetPack 6.0", "its TensorRT 8.6 has no strongly typed networks"),
    (36, 4): ("JetPack 6.1 or 6.2", None),
    (38, 0): ("JetPack 7", None),
}
"""(L4T release, its first revision) → what it is called, and why no engine is built or run there."""


def jetson_capability(root: Path = Path("/")) -> list[Capability]:
    """The line of a Jetson; none on other machines.

    Args:
        root: where the system's files lie.
    """
    try:
        text = (root / _RELEASE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    if found is None:
        return [Capability("jetpack", "unavailable", None, f"{root / _RELEASE} names no release")]
    release, revision = int(found[1]), found[2]
    known = [key for key in _OF_RELEASE if key <= (release, int(revision.split(".")[0]))]
    name, problem = _OF_RELEASE[max(known)] if known else ("JetPack 4 or older", "its Python is older than 3.10")
    version, detail = f"L4T {release}.{revision}", f"{name}; nobody has run edgeformer on a Jetson yet"
    if problem is not None:
        remedy = "ONNX graphs run on its processor with Python 3.10 or newer; engines need JetPack 6.1 or newer"
        return [Capability("jetpack", "unavailable", version, f"{detail}; {problem}", remedy)]
    if hidden := hidden_tensorrt(root):
        return [Capability("jetpack", "unavailable", version, f"{detail}; {hidden}", _SEEN)]
    return [Capability("jetpack", "available", version, detail)]


_SEEN = (
    "make the environment anew with the system's own Python: python3 -m venv --system-site-packages .venv; no index "
    "has TensorRT for a Jetson"
)


def hidden_tensorrt(root: Path = Path("/")) -> str | None:
    """Why JetPack's TensorRT cannot be imported although it is installed; None: it can be, or is not there.

    Args:
        root: where the system's files lie.
    """
    installed = sorted(root.glob(_TENSORRT))
    if not installed or util.find_spec("tensorrt") is not None:
        return None
    own = re.sub(r"\D*", "", installed[0].parts[-3].removeprefix("python3"))
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own and own != str(sys.version_info.minor):
        return f"JetPack's TensorRT in {installed[0]} is for Python 3.{own}, and this is Python {mine}"
    return f"JetPack's TensorRT in {installed[0]} is not seen from this environment ({sys.prefix})"
