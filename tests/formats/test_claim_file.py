"""The file of a claim: whole or refused; nothing in it leads out of its folder, and nothing is larger than it says."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest

from edgeformer.formats.claim import Claim, Environment
from edgeformer.formats.claim_file import CLAIM_FILE, REPORT_MEMBER, ClaimFile, write_claim
from edgeformer.formats.errors import ArtifactError

CLAIM = Claim(
    created="2026-11-23T00:00:00.000+00:00", run="tiny", device="host", members={}, whole_bundle=False,
    environment=Environment(host={"cpu": "Some CPU"}, threads=(1,)),
)  # fmt: skip
REPORT, MANIFEST = b'{"report": 1}', b'{"bundle": 1}'
MEMBERS = {REPORT_MEMBER: REPORT, "bundle/bundle.json": MANIFEST}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_claim(tmp_path / "host.claim.zip", CLAIM, MEMBERS)
    return tmp_path / "host.claim.zip"


def told(listed: dict[str, bytes], **changes: object) -> bytes:
    """claim.json that lists these members."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in listed.items()}
    return json.dumps({**CLAIM.model_dump(mode="json"), "members": sums, **changes}).encode()


def sealed(content: bytes) -> bytes:
    """An archive with the right checksum at its end: what a stranger can make, too."""
    return content[:-64] + hashlib.sha256(content[:-64]).hexdigest().encode()


def packed(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A claim's file with any members, in their order."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.comment = b"0" * 64
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return sealed(stream.getvalue())


def test_what_was_written_is_read_and_any_zip_program_opens_it(path: Path, tmp_path: Path) -> None:
    found = ClaimFile.open(path)
    assert found.claim.members.keys() == MEMBERS.keys() and found.claim.environment == CLAIM.environment
    assert found.sha256 == hashlib.sha256(path.read_bytes()[:-64]).hexdigest()
    assert (found.unpack(tmp_path / "out") / "bundle.json").read_bytes() == MANIFEST
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and archive.comment.decode() == found.sha256


def test_the_same_claim_is_the_same_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "member").write_bytes(REPORT)
    write_claim(tmp_path / "again.zip", CLAIM, {**MEMBERS, REPORT_MEMBER: tmp_path / "member"})
    assert (tmp_path / "again.zip").read_bytes() == path.read_bytes()


def test_every_flipped_byte_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        harmed = bytearray(content)
        harmed[place] ^= 1
        path.write_bytes(harmed)
        with pytest.raises(ArtifactError, match=r"host\.claim\.zip: is no claim, or a damaged one"):
            ClaimFile.open(path)


def test_every_truncation_is_noticed(path: Path) -> None:
    content = path.read_bytes()
    for length in (*range(0, 120), *range(120, len(content), 37), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match="is no claim, or a damaged one"):
            ClaimFile.open(path)
    path.write_bytes(content + b"x")
    with pytest.raises(ArtifactError, match="it does not end as a claim does"):
        ClaimFile.open(path)


@pytest.mark.parametrize(
    "name",
    ["../x", "bundle/../../x", "/etc/x", "bundle//x", "bundle/./x", "bundle\\..\\x", "C:x", "bundle/C:x", "bundle/",
     "x.onnx", "bundle", f"bundle/{'x' * 300}"],
)  # fmt: skip
def test_a_name_that_could_lead_elsewhere_is_refused(path: Path, tmp_path: Path, name: str) -> None:
    members = {**MEMBERS, name: b"out"}
    path.write_bytes(packed({CLAIM_FILE: told(members), **members}))
    with pytest.raises(ArtifactError, match=r"which no claim has|is no claim"):
        ClaimFile.open(path)
    assert not (tmp_path.parent / "x").exists()


def test_nothing_in_it_is_compressed_so_it_is_no_bomb(path: Path) -> None:
    members = {**MEMBERS, "bundle/zeros": bytes(1 << 20)}
    path.write_bytes(packed({CLAIM_FILE: told(members), **members}, zipfile.ZIP_DEFLATED))
    with pytest.raises(ArtifactError, match="is compressed, which nothing in a claim is"):
        ClaimFile.open(path)


def test_files_that_lie_over_one_another_are_refused(path: Path) -> None:
    """Two names of the same bytes: a quadratic bomb, if there are thousands."""
    large = b"x" * 5_000
    members = {**MEMBERS, "bundle/a": large, "bundle/b": large}
    content = packed({CLAIM_FILE: told(members), **members})
    directory = content.rindex(b"bundle/b") - 46
    first = content.rindex(b"bundle/a") - 46
    overlapped = content[: directory + 42] + content[first + 42 : first + 46] + content[directory + 46 :]
    path.write_bytes(sealed(overlapped))
    with pytest.raises(ArtifactError, match="is no claim, or a damaged one"):
        ClaimFile.open(path)


@pytest.mark.parametrize(
    ("members", "claimed", "said"),
    [
        ({**MEMBERS, "bundle/x": b"x"}, MEMBERS, "do not agree on 'bundle/x'"),
        (MEMBERS, {**MEMBERS, "bundle/x": b"x"}, "do not agree on 'bundle/x'"),
        ({**MEMBERS, REPORT_MEMBER: b"other"}, MEMBERS, "'report.json' is not what claim.json says"),
        ({**MEMBERS, "bundle/x": b"", "bundle/x/y": b""}, MEMBERS, "it names a file twice"),
        ({**MEMBERS, **{f"bundle/{n}": b"" for n in range(1_001)}}, MEMBERS, "holds more than 1,000 files"),
    ],
)
def test_members_that_claim_json_does_not_list(
    path: Path, members: dict[str, bytes], claimed: dict[str, bytes], said: str
) -> None:
    path.write_bytes(packed({CLAIM_FILE: told(claimed), **members}))
    with pytest.raises(ArtifactError, match=said):
        ClaimFile.open(path)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b"", "claim.json: damaged"),
        (b"[1]", "claim.json: damaged"),
        (b"[" * 100_000, "claim.json: damaged"),
        (told(MEMBERS, members=3), "members"),
        (told(MEMBERS, surprise=1), "surprise"),
        (told(MEMBERS).replace(b'"Some CPU"', b"1e999"), r"environment\.host\.cpu: is no finite number"),
        (b'"' + b"x" * (17 << 20), "larger than 16 MiB"),
    ],
)
def test_a_claim_json_that_is_none(path: Path, document: bytes, said: str) -> None:
    path.write_bytes(packed({CLAIM_FILE: document, **MEMBERS}))
    with pytest.raises(ArtifactError, match=said):
        ClaimFile.open(path)


def test_what_is_no_archive_at_all(tmp_path: Path) -> None:
    end_alone = sealed(b"PK\x05\x06" + bytes(16) + b"@\0" + bytes(64))
    for name, content in {"empty": b"", "text": b"x" * 500, "end": end_alone}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArtifactError, match="is no claim"):
            ClaimFile.open(tmp_path / name)
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(ArtifactError, match="cannot be read"):
            ClaimFile.open(missing)


def test_an_archive_that_says_it_has_more_files_than_a_claim_is_not_even_opened(path: Path) -> None:
    content = path.read_bytes()
    end = len(content) - 64 - 22
    for at, value in ((10, b"\xff\xff"), (12, b"\xff\xff\xff\xff")):
        path.write_bytes(sealed(content[: end + at] + value + content[end + at + len(value) :]))
        with pytest.raises(ArtifactError, match="it says that it holds more than 1,000 files"):
            ClaimFile.open(path)
    path.write_bytes(sealed(content[:end] + b"PK\x06\x07" + bytes(16) + content[end:]))
    with pytest.raises(ArtifactError, match="it says that it holds more than 1,000 files"):
        ClaimFile.open(path)
