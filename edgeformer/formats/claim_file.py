"""The file of a claim: a ZIP archive of plain, unpacked members, whose last 64 bytes are the sha256 of all before them.

They are the archive's comment, so that any program opens the file. Nothing in it is compressed: it cannot hold more
than its own size. It may come from a stranger, so its outer form is checked before a library looks at it.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from typing_extensions import Self

from edgeformer.formats.claim import Claim
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import as_json, replacing, sha256_of
from edgeformer.formats.report import Report
from edgeformer.formats.report_file import parse_report, require_finite
from edgeformer.formats.workspace import MOST_JSON_BYTES, parse_manifest

CLAIM_FILE, REPORT_MEMBER, BUNDLE_FOLDER = "claim.json", "report.json", "bundle/"
MOST_BYTES = 2**32 - 2**20
"""Of a claim's file: what a ZIP archive holds without its extension to 64 bits, whose sizes nobody checks."""
_MOST_MEMBERS, _MOST_DIRECTORY_BYTES = 1_000, 1 << 20
_SUM_BYTES, _END_BYTES, _LOCATOR_BYTES = 64, 22, 20
_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_CHUNK = 1 << 20
_LONGEST_NAME = 200
"""Characters: less than any system allows of a path's part."""
_ENCRYPTED = 0x1


def write_claim(path: Path, claim: Claim, members: Mapping[str, bytes | Path]) -> ClaimFile:
    """Write a claim's file, and return it.

    Args:
        path: of the file.
        claim: whose ``members`` are not yet known.
        members: name → bytes, or the file that holds them.

    Raises:
        ArtifactError: together they are larger than a claim may be.
    """
    sums = {
        name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256_of(content)
        for name, content in members.items()
    }
    told = claim.model_copy(update={"members": sums})
    whole: dict[str, bytes | Path] = {CLAIM_FILE: as_json(told).encode(), **members}
    size = sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in whole.values())
    if size > MOST_BYTES - _MOST_DIRECTORY_BYTES:
        raise ArtifactError(f"{path}: would be larger than a claim may be (4 GB); make it without the bundle")
    with replacing(path) as temporary:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.comment = b"0" * _SUM_BYTES
            for name, content in whole.items():
                # Without the date: the same claim is the same file.
                with archive.open(zipfile.ZipInfo(name), "w") as target, _opened(content) as source:
                    shutil.copyfileobj(source, target, _CHUNK)
        with temporary.open("r+b") as file:
            digest = _sum_before_end(file)
            file.write(digest.encode())
    return ClaimFile(path, told, digest)


@contextmanager
def _opened(content: bytes | Path) -> Iterator[IO[bytes]]:
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream:
        yield stream


def _sum_before_end(file: IO[bytes]) -> str:
    """sha256 of all but the last 64 bytes, where the file then stands."""
    left = file.seek(0, 2) - _SUM_BYTES
    file.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (chunk := file.read(min(_CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


class ClaimFile:
    """A claim's file whose checksums all hold.

    Attributes:
        path: of the file.
        claim: its claim.json.
        sha256: of the whole file but its last 64 bytes, which say it.
    """

    def __init__(self, path: Path, claim: Claim, sha256: str) -> None:
        self.path = path
        self.claim = claim
        self.sha256 = sha256

    @classmethod
    def open(cls, path: Path) -> Self:
        """Check a claim's file and everything in it. Nothing is written.

        Raises:
            ArtifactError: it is missing, damaged, changed, larger than a claim may be, or has other members than its
                claim.json says.
        """
        try:
            with path.open("rb") as file:
                sha256 = _checked_form(path, file)
                with zipfile.ZipFile(file) as archive:
                    _check_members(path, archive)
                    content = _read(path, archive, CLAIM_FILE)
                    claim = parse_manifest(Claim, path / CLAIM_FILE, content)
                    require_finite(claim, path / CLAIM_FILE)
                    _check_sums(path, archive, claim)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ArtifactError:
            raise
        except Exception as error:  # zipfile raises nearly anything for damage
            raise _damaged(path, f"{type(error).__name__}: {str(error)[:120]}") from None
        return cls(path, claim, sha256)

    def report(self) -> Report:
        """The report inside. Raises ArtifactError where it is none."""
        with zipfile.ZipFile(self.path) as archive:
            return parse_report(self.path / REPORT_MEMBER, _read(self.path, archive, REPORT_MEMBER))

    def unpack(self, folder: Path) -> Path:
        """Write what is inside of the bundle into ``folder``, and return the bundle's folder there."""
        target = folder / BUNDLE_FOLDER.rstrip("/")
        with zipfile.ZipFile(self.path) as archive:
            for name in self.claim.members:
                if name.startswith(BUNDLE_FOLDER):
                    place = target / name.removeprefix(BUNDLE_FOLDER)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(name) as source, place.open("wb") as file:
                        shutil.copyfileobj(source, file, _CHUNK)
        return target


def _damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path}: is no claim, or a damaged one: {what}; make it again with edgeformer claim")


def _checked_form(path: Path, file: IO[bytes]) -> str:
    """The file's checksum, after its outer form was checked: what a ZIP library would read without end is refused."""
    size = file.seek(0, 2)
    if size > MOST_BYTES:
        raise _damaged(path, "larger than 4 GB, which no claim is")
    least = _SUM_BYTES + _END_BYTES
    file.seek(max(0, size - least - _LOCATOR_BYTES))
    tail = file.read()
    end = tail[-least:-_SUM_BYTES]
    if len(end) < _END_BYTES or end[:4] != _END or int.from_bytes(end[20:22], "little") != _SUM_BYTES:
        raise _damaged(path, "it does not end as a claim does")
    entries, directory = int.from_bytes(end[10:12], "little"), int.from_bytes(end[12:16], "little")
    if tail[:-least][:4] == _LOCATOR or entries > _MOST_MEMBERS or directory > _MOST_DIRECTORY_BYTES:
        raise _damaged(path, f"it says that it holds more than {_MOST_MEMBERS:,} files")
    digest = _sum_before_end(file)
    if file.read() != digest.encode():
        raise _damaged(path, "its bytes are not those that its checksum at the end is of")
    return digest


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Raises ArtifactError for a member that is packed, encrypted, given twice, or named as none may be."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if len(names) > _MOST_MEMBERS:
        raise _damaged(path, f"it holds more than {_MOST_MEMBERS:,} files")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise _damaged(path, f"{member.filename!r} is compressed, which nothing in a claim is")
        if member.flag_bits & _ENCRYPTED:
            raise _damaged(path, f"{member.filename!r} is encrypted")
        if not _allowed(member.filename):
            raise _damaged(path, f"it names {member.filename!r}, which no claim has")
    folders = {parent.as_posix() for name in names for parent in PurePosixPath(name).parents}
    if len(set(names)) < len(names) or folders.intersection(names):
        raise _damaged(path, "it names a file twice")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise _damaged(path, "its files lie over one another")


def _allowed(name: str) -> bool:
    """A claim's own two members, or a file below ``bundle/`` whose name leads nowhere else on any system."""
    if name in (CLAIM_FILE, REPORT_MEMBER):
        return True
    pure = PurePosixPath(name)
    plain = pure.as_posix() == name and ".." not in pure.parts and not any(character in name for character in "\\:\0")
    below = name.startswith(BUNDLE_FOLDER) and len(pure.parts) > 1
    return plain and below and len(name) <= _LONGEST_NAME


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """A JSON member. Raises ArtifactError where it is not there, or too large to be one."""
    try:
        size = archive.getinfo(name).file_size
    except KeyError:
        raise _damaged(path, f"it holds no {name}") from None
    if size > MOST_JSON_BYTES:
        raise _damaged(path, f"its {name} is larger than {MOST_JSON_BYTES >> 20} MiB")
    return archive.read(name)


def _check_sums(path: Path, archive: zipfile.ZipFile, claim: Claim) -> None:
    """Raises ArtifactError where members and claim.json do not name the same bytes."""
    there = {*archive.namelist()} - {CLAIM_FILE}
    if there != claim.members.keys():
        odd = sorted(there ^ claim.members.keys())[0]
        raise _damaged(path, f"{CLAIM_FILE} and the file itself do not agree on {odd!r}")
    for name, expected in claim.members.items():
        digest = hashlib.sha256()
        with archive.open(name) as member:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise _damaged(path, f"{name!r} is not what {CLAIM_FILE} says")
