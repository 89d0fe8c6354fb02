"""Requests: shapes, limits, artifacts and the report's name that options resolve to."""

import json
from pathlib import Path

import psutil
import pytest

from edgeformer.artifacts.device import Budget, DeviceProfile
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.report import MeasureRules
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.limits import Limit, limit_of
from edgeformer.benchmark.request import ProfileOptions, question_of, resolve
from edgeformer.bundle import Bundle
from edgeformer.tasks import all_tasks, get_task
from tests.runtimes.tiny_bundle import artifact_of, write_bundle, write_manifest

CPU, RTX, PI = load_profile("host"), load_profile("rtx4050"), load_profile("raspberry-pi-5")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def manifest(folder: Path) -> BundleManifest:
    return Bundle.open(folder).manifest


def long_model(manifest: BundleManifest) -> BundleManifest:
    return manifest.model_copy(update={"max_positions": 512, "max_length": 512})


def test_the_shape_of_the_budget_is_the_default_always_measured_and_cut_to_the_model(manifest: BundleManifest) -> None:
    request = resolve(ProfileOptions(), RTX, long_model(manifest))
    assert request.shapes == ((1, 128),)
    assert (request.requirements.shape, request.requirements.shape_note) == ((1, 128), None)
    options = ProfileOptions(batches=(4,), seqs=(256, 16))
    assert resolve(options, RTX, long_model(manifest)).shapes == ((4, 16), (1, 128), (4, 256))
    request = resolve(ProfileOptions(), PI, long_model(manifest).model_copy(update={"max_length": 64}))
    assert request.requirements.shape == (1, 64) and request.shapes == ((1, 64),)
    words = "the shape of the budget is 1×128, but the model reads at most 64 tokens"
    assert any(words in note for note in request.notes)


def test_budgets_are_by_task_and_shared_where_a_profile_has_none(manifest: BundleManifest) -> None:
    labels = RTX.budgets["classification"]
    own = RTX.model_copy(update={"budgets": {"regression": labels.model_copy(update={"seq": 16}), "typo": labels}})
    assert limits_of(ProfileOptions(), RTX, manifest)["latency"] == labels.latency_p50_ms
    assert [RTX.budget(task.name, task.budget) == labels for task in all_tasks()] == [
        task.name not in ("embedding", "language-modeling", "tensors") for task in all_tasks()
    ]
    assert own.budget("regression", get_task("regression").budget).seq == 16
    assert own.budget("classification", get_task("classification").budget) == Budget()
    notes = resolve(ProfileOptions(), own, manifest).notes
    assert "the profile rtx4050 has a budget for 'typo', which is no task" in notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (ProfileOptions(batches=(0,)), "--batch: must be 1 or more, not 0"),
        (ProfileOptions(seqs=(-1,)), "--seq: must be 1 or more"),
        (ProfileOptions(threads=(1, -2)), "--threads: must be 1 or more"),
        (ProfileOptions(threads=(0,)), "--threads: must be 1 or more"),
        (ProfileOptions(batches=()), "--batch: must be 1 or more"),
        (ProfileOptions(seqs=(8, 25)), "--seq 25: 'tiny' takes at most 24"),
        (ProfileOptions(artifacts=("nope",)), "--artifact nope: 'tiny' has no such artifact; it has: model"),
    ],
)
def test_unusable_options_are_refused(manifest: BundleManifest, options: ProfileOptions, says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve(options, CPU, manifest)


def limits_of(options: ProfileOptions, device: DeviceProfile, manifest: BundleManifest) -> dict[str, float]:
    limits = resolve(options, device, manifest).requirements.limits
    return {limit.quantity: limit.limit for limit in limits}


def test_limits_come_from_the_profile_and_flags_win(manifest: BundleManifest) -> None:
    profile = {"size": 100 * 2**20, "latency": 5.0, "memory": round(5.4 * 2**30)}
    assert limits_of(ProfileOptions(), RTX, manifest) == profile
    options = ProfileOptions(max_latency_ms=1.0, max_size_bytes=2, max_memory_bytes=0, choose=ChoiceOptions(0.9))
    assert limits_of(options, RTX, manifest) == {"size": 2, "latency": 1.0, "memory": 0, "score": 0.9}
    assert limits_of(ProfileOptions(), CPU, manifest)["memory"] == psutil.virtual_memory().total, "this host's own"
    language = manifest.model_copy(update={"task": "language-modeling"})
    assert resolve(ProfileOptions(), RTX, language).requirements.phase == "decode"
    assert limits_of(ProfileOptions(), RTX, language)["latency"] == 20.0, "per decoded token"


def test_a_leaking_model_needs_the_flag_and_is_noted(manifest: BundleManifest) -> None:
    leaking = manifest.model_copy(update={"task": "language-modeling", "leaks": True})
    with pytest.raises(InputError, match=r"'tiny' leaks future tokens.*--allow-leak"):
        resolve(ProfileOptions(), CPU, leaking)
    assert any("leaks future tokens" in note for note in resolve(ProfileOptions(allow_leak=True), CPU, leaking).notes)
    assert not any("leaks" in note for note in resolve(ProfileOptions(allow_leak=True), CPU, manifest).notes)


def test_rules_and_providers(manifest: BundleManifest) -> None:
    for options, device, provider in (
        (ProfileOptions(), CPU, "CPUExecutionProvider"),  # also beside a GPU
        (ProfileOptions(), RTX, None),
        (ProfileOptions(provider="X"), CPU, "X"),
    ):
        assert resolve(options, device, manifest).provider == provider
    assert resolve(ProfileOptions(), CPU, manifest).rules == MeasureRules()
    strict = resolve(ProfileOptions(strict=True), CPU, manifest)
    assert strict.rules == MeasureRules.strict()
    assert not any("rules" in note for note in strict.notes)
    short = resolve(ProfileOptions(rules=MeasureRules(min_s=0.1)), CPU, manifest)
    assert any("other stopping rules" in note for note in short.notes), "a report must not hide shortened rules"


def test_built_and_named_artifacts_are_selected(folder: Path) -> None:
    built = artifact_of(folder, "onnx/model.onnx")
    rejected = built.model_copy(update={"id": "int8", "status": "rejected", "reason": "accuracy fell", "file": None})
    manifest = write_manifest(folder, [built, rejected])
    request = resolve(ProfileOptions(), CPU, manifest)
    assert [artifact.id for artifact in request.artifacts] == ["model"]
    assert "int8: rejected: accuracy fell" in request.notes
    manifest = write_manifest(folder, [built.model_copy(update={"id": name}) for name in ("one", "two")])
    for chosen, expected in (((), "two"), (("one",), "one")):  # the run argument names two
        request = resolve(ProfileOptions(artifacts=chosen), CPU, manifest, "two")
        assert [artifact.id for artifact in request.artifacts] == [expected]


@pytest.mark.parametrize(
    ("changes", "question"),
    [
        ({}, ""),
        ({"strict": True, "threads": (1, 2)}, ""),  # the same question, measured in another way
        ({"artifacts": ("onnx-int8",)}, "onnx-int8"),
        ({"choose": ChoiceOptions(0.9, "size")}, "choose-score-0.9-least-size"),
        ({"max_latency_ms": 2.0, "seqs": (16, 64), "batches": None}, "latency-2ms-seq-16-64"),
        ({"max_size_bytes": 30 * 2**20, "artifacts": ("model",)}, "size-30.0MiB-model"),
        ({"artifacts": ("../../x",)}, ".._.._x"),
    ],
)
def test_a_question_names_what_is_judged(changes: dict[str, object], question: str) -> None:
    assert question_of(ProfileOptions(**changes), None) == question  # type: ignore[arg-type]


def test_a_flags_limit_is_judged_at_the_shapes_that_were_asked_for(manifest: BundleManifest) -> None:
    options = ProfileOptions(seqs=(16, 64), max_latency_ms=2.0)
    requirements = resolve(options, PI, long_model(manifest)).requirements
    assert requirements.shape == (1, 128)
    *of_profile, first, second = requirements.limits
    assert [first, second] == [Limit("latency", 2.0, (1, 16)), Limit("latency", 2.0, (1, 64))]
    assert ("memory", (1, 128), "profile") in [(entry.quantity, entry.shape, entry.origin) for entry in of_profile]
    notes = resolve(options, PI, long_model(manifest)).notes
    assert any("judged at 1×16, 1×64" in note and "those of the profile at 1×128" in note for note in notes)
    alone = resolve(ProfileOptions(max_latency_ms=2.0), PI, long_model(manifest)).requirements
    assert (limit_of(alone.limits, "latency"), alone.shapes) == (2.0, ((1, 128),)), "no shape was asked for"


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("profile", "--choose --min-accuracy 0.9", "No such option"),
        ("profile", "--choose --min-score 91", "0.91 is 91%"),
        ("profile", "--min-score 0.9", "--min-score: is an option of --choose; add --choose"),
        ("profile", "--minimize size", "--minimize: is an option of --choose; add --choose"),
        ("profile", "--choose --minimize price", "price"),
        ("profile", "--search", "give --choose instead"),
        ("profile", "--bundle another-run", "--bundle: is for a report"),
        ("profile", "--calibrate", "No such option"),
        ("profile", "--max-energy 10", "--max-energy"),
        ("profile", "--max-energy 10MiB", "uJ, mJ, J"),
        ("profile", "--threads 1,two", "--threads 1,16"),
        ("profile", "--threads 0", "at least 1"),
        ("calibrate", "--threads 1,2", "one number of threads"),
        ("calibrate", "--validate-only --threads 1", "uses the threads of the calibration"),
        ("calibrate", "--validate-only", "has no calibration; run edgeformer calibrate"),
        ("calibrate", "--also another-run --validate-only", "--also: adds runs to a calibration"),
        ("calibrate", "--also another-run", "another-run"),
        ("calibrate", "--choose", "No such option"),
    ],
)
def test_options_that_make_no_sense(folder, edgeformer, command, options, expected):
    """They are refused before anything is measured or written."""
    files = sorted(folder.rglob("*"))
    printed = edgeformer(command, str(folder), "--device", "host", "--json", *options.split(), code=2)
    document = json.loads(printed.splitlines()[0])
    assert document["exit_code"] == 2 and expected in document["error"] and sorted(folder.rglob("*")) == files
