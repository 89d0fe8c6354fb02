"""A record says something of the very file that it was made of, and of nothing else."""

from typing import Any

from edgeformer.artifacts.bundle_files import TargetRecord, TargetRecords, completed, files_sha256
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Parity
from tests.benchmark.choice_cases import accuracy, artifact, bundle

CARD = "NVIDIA GeForce RTX 4050 Laptop GPU"
OPEN = Parity(status="unavailable", tolerance=1e-2, tolerance_kind="relative", reason="not here")


def engine(sha256: str = "a" * 64, **changes: Any) -> ArtifactManifest:
    facts = {"format": "tensorrt-rtx", "precision": "fp16", "validation": None, "parity": OPEN, "sha256": sha256}
    return artifact("engine", **{**facts, **changes})


def record(manifest: BundleManifest, device: str = CARD, **changes: Any) -> TargetRecord:
    entry = next(entry for entry in manifest.artifacts if entry.id == "engine")
    facts: dict[str, Any] = {
        "artifact": entry.id, "artifact_sha256": files_sha256(entry, manifest.files), "device": device,
        "compute_capability": "8.9", "runtime": {"tensorrt-rtx": "1.7.1"},
        "recorded": "2026-11-22T00:00:00.000+00:00", "code_version": "1", "status": "verified",
        "parity": Parity(status="measured", n=64, max_abs_error=1e-3, tolerance=1e-2, tolerance_kind="relative"),
        "score": accuracy(0.90), "validation": accuracy(0.91),
    }  # fmt: skip
    return TargetRecord.model_validate(facts | changes).signed()


def test_a_record_completes_what_export_left_open() -> None:
    manifest = bundle(artifact("exact"), engine())
    complete = completed(manifest, TargetRecords(records=(record(manifest),)).completing(manifest))
    exact, scored = complete.artifacts
    assert scored.validation == accuracy(0.91) and scored.parity is not None and scored.parity.status == "measured"
    assert scored.status == "built" and exact == manifest.artifacts[0]
    failed = record(manifest, status="failed", reason="parity: too far off", validation=None)
    _, rejected = completed(manifest, TargetRecords(records=(failed,)).completing(manifest)).artifacts
    assert (rejected.status, rejected.reason) == ("rejected", f"on {CARD}: parity: too far off")


def test_a_record_of_other_files_or_an_edited_one_is_refused() -> None:
    manifest = bundle(engine())
    for key, value in {"validation": accuracy(0.99), "artifact_sha256": "b" * 64, "device": "another"}.items():
        edited = record(manifest).model_copy(update={key: value})
        assert "was changed since it was written" in str(edited.why_refused(manifest))
    assert "no such artifact" in str(record(manifest, artifact="other").why_refused(manifest))
    gone = bundle(engine(status="rejected"))
    assert "no such artifact" in str(record(manifest).why_refused(gone))
    parts = {"embed": "engines/embed", "loop": "onnx/engine.onnx"}
    first, second = (bundle(engine(role="step", parts=parts), files={"engines/embed": sha * 64}) for sha in "cd")
    signed = record(first)
    assert signed.why_refused(first) is None
    assert "built again" in str(signed.why_refused(second))
    kept, rebuilt = record(bundle(engine("a" * 64))), bundle(engine("b" * 64))
    for part in ("built again", "aaaaaaaaaaaa…", "bbbbbbbbbbbb…", "verify --write"):
        assert part in kept.why_refused(rebuilt)
    records = TargetRecords(records=(kept,))
    assert records.completing(rebuilt) == {} and records.of(rebuilt).records == ()


def test_the_latest_of_a_device_counts_and_the_device_that_is_asked_about() -> None:
    manifest = bundle(engine())
    old, new = (record(manifest, recorded=f"2026-11-2{day}", validation=accuracy(day / 10)) for day in (1, 2))
    other = record(manifest, "NVIDIA GeForce RTX 4090", recorded="2026-11-23", validation=accuracy(0.3))
    records = TargetRecords().with_new([old]).with_new([other, new])
    assert len(records.records) == 2
    assert records.completing(manifest)["engine"] == other
    assert records.completing(manifest, "RTX 4050")["engine"] == new
    parsed = TargetRecords.model_validate_json(records.model_dump_json(), strict=False)
    assert parsed == records and all(record.why_refused(manifest) is None for record in parsed.records)
    compared = bundle(engine(parity=OPEN.model_copy(update={"status": "measured"}), validation=accuracy(0.8)))
    assert TargetRecords(records=(record(compared),)).completing(compared) == {}, "export scored it itself"
