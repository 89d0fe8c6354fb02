"""Packing: a wheel of this edgeformer, and the wheels of its dependencies for machines without a package index."""

import base64
import hashlib
import io
import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from edgeformer._version import __version__
from edgeformer.artifacts.documents import Kind, shipped_folder
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import replacing, replacing_folder
from edgeformer.system import child

WHEEL = f"edgeformer-{__version__}-py3-none-any.whl"
_KINDS: tuple[Kind, ...] = ("recipes", "profiles")
_PACK = re.compile(r"linux-(x86_64|aarch64)-cp(3[0-9]{2})")
_OLDEST_GLIBC, _NEWEST_GLIBC = 17, 28
"""Minor versions of glibc 2 in names of wheels: Debian 10 and everything newer runs them."""


def write_wheel(folder: Path) -> Path:
    """Write a wheel of the running package, and return its path. Equal packages give equal bytes.

    It has the files of the package, whether this runs from a clone or from an installed wheel; pip would need a clone,
    and the build backend from an index. Raises EdgeformerError if edgeformer was never installed here.
    """
    package, info = Path(__file__).resolve().parents[1], f"edgeformer-{__version__}.dist-info"
    try:
        core_metadata = metadata.distribution("edgeformer").read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        raise EdgeformerError(
            "edgeformer is not installed here, so its dependencies are unknown; pip install it"
        ) from None
    files = {
        f"edgeformer/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for kind in _KINDS:
        files |= {
            f"edgeformer/shipped/{kind}/{path.name}": path.read_bytes() for path in shipped_folder(kind).glob("*.yaml")
        }
    wheel = "Wheel-Version: 1.0\nGenerator: edgeformer\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files |= {f"{info}/METADATA": core_metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    records = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        records.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*records, f"{info}/RECORD,,\n"]).encode()
    archive_bytes = io.BytesIO()
    with zipfile.ZipFile(archive_bytes, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    with replacing(folder / WHEEL) as temporary:
        temporary.write_bytes(archive_bytes.getvalue())
    return folder / WHEEL


def download_pack(tag: str, folder: Path) -> list[Path]:
    """Collect this edgeformer and its dependencies in ``folder / tag`` for a machine without a package index.

    Returns the wheels. Raises InputError: ``tag`` is not like ``linux-aarch64-cp311``, and EdgeformerError: pip found
    no wheel of a dependency, or no index.
    """
    match = _PACK.fullmatch(tag)
    if match is None:
        raise InputError(
            f"--for {tag}: write linux-aarch64-cp311 or linux-x86_64-cp312, with the machine's Python version"
        )
    machine, python = match[1], match[2]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    with replacing_folder(folder / tag) as temporary:
        wheel = write_wheel(temporary)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--only-binary", ":all:"]
        command += ["--dest", str(temporary), "--implementation", "cp", "--python-version", python]
        command += [word for platform in platforms for word in ("--platform", platform)]
        process = child.run([*command, str(wheel)], is_edgeformer=False, capture_output=True, text=True, check=False)
        if process.returncode:
            errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
            raise EdgeformerError(
                f"--for {tag}: pip download failed: {'; '.join(errors[-2:]) or process.stderr[-500:]}"
            )
    return sorted((folder / tag).glob("*.whl"))
