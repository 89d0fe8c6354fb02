"""Choice: candidates, Pareto front, pick and reason, ties, and agreement with a brute force."""

from typing import Any, Literal

import pytest

from edgeformer.artifacts.bundle_files import TargetRecord
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Drift, LoopDrift, Parity
from edgeformer.artifacts.report import Conditions, Latency, Row
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.profile import rows_of_kind
from tests.benchmark import choice_cases
from tests.benchmark.choice_cases import accuracy, artifact, bundle, estimate, perplexity, picked, row, run


def test_the_fastest_accurate_candidate_within_limits_is_picked() -> None:
    scores = {"exact": 0.93, "good": 0.91, "fast": 0.80, "big": 0.95}
    manifest = bundle(*(artifact(name, validation=accuracy(score)) for name, score in scores.items()))
    rows = [row("exact", 9.0), row("good", 5.0), row("fast", 1.0), row("big", 2.0, size=900)]
    limits = choice_cases.requirements(size=600, latency=20.0)
    result = run(manifest, rows, limits, ChoiceOptions(0.9))
    assert picked(result) == ("good", 2)
    assert result.reason == (
        "good: smallest latency (5.00 ms) of 2 that have accuracy ≥ 0.9 and break no limit; next: exact, 9.00 ms. "
        "Accuracy 0.9100 on 1,000 rows, 95% interval 0.8905 to 0.9270: the limit 0.9 lies inside it, so these rows do "
        "not decide whether it is met"
    )
    assert {c.artifact: c.reason for c in result.candidates if not c.feasible} == {
        "fast": "accuracy 0.8000 is below 0.9",
        "big": "size 900 B is over 600 B",
    }
    assert result.basis == "measured"


def test_a_bound_inside_the_score_interval_is_noted_and_one_outside_is_decided() -> None:
    small_sample = accuracy(393 / 422).model_copy(update={"n": 422})
    below = accuracy(390 / 422).model_copy(update={"n": 422})
    manifest = bundle(artifact("near", validation=small_sample), artifact("below", validation=below))
    result = run(manifest, [row("near"), row("below", 1.0)], options=ChoiceOptions(0.93))
    near, under = result.candidates
    assert (near.score_rows, near.bound_inside, near.feasible) == (422, True, True)
    assert (near.score_low, near.score_high) == (pytest.approx(0.90279, abs=1e-4), pytest.approx(0.95350, abs=1e-4))
    assert result.reason.endswith(
        ". Accuracy 0.9313 on 422 rows, 95% interval 0.9028 to 0.9535: the limit 0.93 lies inside it, so these rows "
        "do not decide whether it is met"
    )
    assert under.reason == "accuracy 0.9242 is below 0.93, inside its 95% interval 0.8946 to 0.9476"
    clear = run(bundle(artifact("model")), [row("model")], options=ChoiceOptions(0.8))
    assert clear.candidates[0].bound_inside is False and "does not decide" not in clear.reason
    assert clear.reason.endswith(". Accuracy 0.9000 on 1,000 rows, 95% interval 0.8797 to 0.9179")
    free = run(bundle(artifact("model")), [row("model")])
    assert free.candidates[0].bound_inside is None and "interval" not in free.reason
    language = bundle(artifact("model", validation=perplexity(20.0)), task="language-modeling")
    (other,) = run(language, [row("model")], options=ChoiceOptions(25.0)).candidates
    assert (other.score_rows, other.score_low, other.bound_inside) == (None, None, None), "perplexity is no share"


def twice(name: str, first: float, second: float, size: int) -> Row:
    return row(name, first, size, conditions=Conditions(repeated_p50_ms=second))


TIE = "a tie: measured times that differ by less than 15%"


@pytest.mark.parametrize(
    ("large", "small", "why"),
    [
        (row("large", 4.0, 900), row("small", 4.59, 100), TIE),
        (row("large", 4.0, 900), row("small", 4.61, 100), None),
        (row("large", 0.12, 900), row("small", 0.21, 100), f"{TIE} or 0.1 ms"),
        (row("large", 0.12, 900), row("small", 0.23, 100), None),
        (twice("large", 4.0, 4.1, 900), twice("small", 4.7, 4.05, 100), None),
        (estimate("large", 1.0, 4.0, 900), estimate("small", 3.9, 9.0, 100), "their ranges overlap"),
        (estimate("large", 1.0, 4.0, 900), estimate("small", 4.2, 9.0, 100), None),
    ],
)
def test_of_times_that_are_no_different_the_smaller_file_wins(large: Row, small: Row, why: str | None) -> None:
    is_estimate = large.where == "device"
    kind: Literal["cuda", "cpu"] = "cuda" if is_estimate else "cpu"
    result = run(bundle(artifact("large"), artifact("small")), [large, small], kind=kind, on_target=not is_estimate)
    assert picked(result) == ("large" if why is None else "small", large.threads)
    assert why is None or (why in result.reason and "and it has the smaller file (100 B)" in result.reason)
    assert result.basis == ("estimated" if is_estimate else "measured")
    assert ("Its time is an estimate" in result.reason and "≈ 2.00 ms" in result.reason) == is_estimate
    ranges = [(candidate.low_ms, candidate.high_ms) for candidate in result.candidates]
    if is_estimate:
        assert ranges == [(1.0, 4.0), (small.latency_ms.low, 9.0)]
    elif large.conditions.repeated_p50_ms is not None:
        assert ranges == [(4.0, 4.1), (4.05, 4.7)]


def test_equal_times_go_to_fewer_threads_and_equal_sizes_to_the_shorter_time() -> None:
    rows = [row("model", p50, threads=threads) for threads, p50 in ((4, 4.0), (2, 4.05), (1, 8.0))]
    manifest = bundle(artifact("model"))
    assert picked(run(manifest, rows)) == ("model", 2)
    assert picked(run(manifest, rows, options=ChoiceOptions(minimize="size"))) == ("model", 4)
    assert picked(run(manifest, rows, options=ChoiceOptions(minimize="memory"))) == ("model", 4)


def test_known_limits_go_before_unknown_ones_and_host_rows_rank_only_without_estimates() -> None:
    limits = choice_cases.requirements(latency=5.0)
    manifest = bundle(artifact("maybe"), artifact("surely"), artifact("never"))
    rows = [estimate("maybe", 0.1, 6.0), estimate("surely", 4.0, 5.0), estimate("never", 5.1, 9.0)]
    result = run(manifest, rows, limits, kind="cuda", on_target=False)
    assert picked(result) == ("surely", None)
    assert [(c.feasible, c.unknown) for c in result.candidates] == [(True, ("latency",)), (True, ()), (False, ())]
    alone = run(bundle(artifact("maybe")), rows[:1], limits, kind="cuda", on_target=False)
    assert picked(alone) == ("maybe", None)
    assert "Unknown: whether it keeps the limit of latency" in alone.reason
    manifest = bundle(artifact("slow"), artifact("slower"))
    host = [row("slower", 90.0), row("slow", 80.0)]
    result = run(manifest, host, limits, kind="cuda", on_target=False)
    assert (picked(result), result.basis) == (("slow", 2), "host")
    assert "Ranked by the times of this host" in result.reason
    assert {c.unknown for c in result.candidates} == {("latency",)}
    device = [estimate("slow", 3.0, 4.0), estimate("slower", 1.0, 2.0)]
    on_host = run(manifest, [*host, *device], limits, kind="cuda", on_target=False)
    assert (picked(on_host), on_host.basis) == (("slower", None), "estimated")


def test_failures_of_the_usual_provider_are_device_rows() -> None:
    unknown = Latency(status="unavailable", reason="ended by signal 11")
    for kind, usual, other in (
        ("cpu", choice_cases.CPU, "openvino"),
        ("cuda", "CUDAExecutionProvider", "tensorrt-rtx"),
    ):
        failed, elsewhere = (row("model", latency_ms=unknown, provider=name) for name in (usual, other))
        assert rows_of_kind([failed, elsewhere], kind) == [failed]  # type: ignore[arg-type]


def test_crashed_or_unscored_artifacts_are_never_picked() -> None:
    engine = artifact("engine", validation=None, format="tensorrt-rtx")
    crashed = row("crashed", latency_ms=Latency(status="unavailable", reason="ended by signal 11"))
    manifest = bundle(artifact("model"), artifact("crashed", size=1), engine)
    result = run(manifest, [row("model"), crashed, row("engine", 0.1)], options=ChoiceOptions(minimize="size"))
    assert picked(result) == ("model", 2)
    reasons = {c.artifact: c.reason for c in result.candidates}
    assert reasons["crashed"] == "its latency is unknown: ended by signal 11"
    assert reasons["engine"] is not None and "it has no score" in reasons["engine"]
    nothing = run(manifest, [crashed])
    assert nothing.pick is None and nothing.reason.startswith("none of 1 candidates is known")


def test_an_engine_scored_on_its_target_can_be_picked() -> None:
    open_ = Parity(status="unavailable", tolerance_kind="relative", reason="not here")
    facts: dict[str, Any] = {"format": "tensorrt-rtx", "precision": "fp16", "validation": None, "parity": open_}
    manifest = bundle(artifact("model"), artifact("engine", **facts), artifact("decode", role="decode", **facts))
    rows = [row("model"), row("engine", 0.1)]
    options = ChoiceOptions(0.9)
    assert picked(run(manifest, rows, options=options)) == ("model", 2), "its answers are not known"
    in_bundle = TargetRecord(
        artifact="engine", artifact_sha256="0" * 64, device="RTX 4050", runtime={}, recorded="2026-11-22",
        code_version="1", status="verified",
        parity=Parity(status="measured", max_abs_error=1e-3, tolerance_kind="relative"), validation=accuracy(0.91),
    )  # fmt: skip
    result = run(manifest, rows, options=options, records={"engine": in_bundle})
    assert picked(result) == ("engine", 2) and result.candidates[1].scored_on == "RTX 4050"
    worse = in_bundle.model_copy(update={"validation": accuracy(0.89)})
    assert picked(run(manifest, rows, options=options, records={"engine": worse})) == ("model", 2)
    wrong = in_bundle.model_copy(update={"status": "failed", "reason": "parity"})
    assert picked(run(manifest, rows, options=options, records={"engine": wrong})) == ("model", 2)
    # A decode graph has the full engine's score, once it is known to compute the same.
    rows.append(row("decode", 0.01))
    assert picked(run(manifest, rows, options=options, records={"engine": in_bundle})) == ("engine", 2)
    both = {"engine": in_bundle, "decode": in_bundle.model_copy(update={"artifact": "decode", "validation": None})}
    assert picked(run(manifest, rows, options=options, records=both)) == ("decode", 2)


def language(*artifacts: ArtifactManifest, **changes: Any) -> BundleManifest:
    return bundle(*artifacts, task="language-modeling", exits=(2, 4, 8), **changes)


def test_a_decode_graph_has_the_score_of_the_full_graph_and_competes_per_token() -> None:
    manifest = language(
        artifact("full", validation=perplexity(20.0)),
        artifact("exit2", role="exit", exit=2, validation=perplexity(30.0)),
        artifact("decode", role="decode", validation=perplexity(12.0), size=600),  # of fewer tokens
        artifact("half-decode", role="decode", precision="fp16", validation=None),
    )
    limits = choice_cases.requirements("decode")
    rows = [row("full", 50.0), row("exit2", 15.0), row("decode", 50.0)]
    rows += [row("decode", 3.0, phase="decode"), row("half-decode", 2.0, phase="decode")]
    result = run(manifest, rows, limits, ChoiceOptions(25.0))
    assert picked(result) == ("decode", 2)
    assert [(c.artifact, c.score, c.scored_as, c.latency_ms) for c in result.candidates] == [
        ("full", 20.0, None, 50.0),
        ("exit2", 30.0, None, 15.0),
        ("decode", 20.0, "full", 3.0),
        ("half-decode", None, None, 2.0),
    ]
    assert result.candidates[1].reason == "perplexity 30.0000 is above 25"
    assert [c.on_front for c in result.candidates] == [False, False, True, False]


@pytest.mark.parametrize(
    ("score", "task", "expected"),
    [
        (91.0, "classification", "lowest accepted accuracy of a classifier; .* 0 to 1 .0.91 is 91%"),
        (0.5, "language-modeling", "highest accepted perplexity of .* must be at least 1"),
        (float("nan"), "language-modeling", "must be at least 1"),
        (None, "language-modeling", "leaks future tokens"),
    ],
)
def test_unusable_scores_and_leaking_models_are_refused(score: float | None, task: str, expected: str) -> None:
    manifest = bundle(artifact("model"), task=task, leaks=score is None)
    with pytest.raises(InputError, match=expected):
        run(manifest, [row("model")], options=ChoiceOptions(score))


def test_absent_variants_name_the_option_that_adds_them() -> None:
    loops = tuple(LoopDrift(loop=loop, rms_error=0.0, max_error=0.0) for loop in (1, 2))
    drift = Drift(tolerance=1e-4, loops=loops, first_beyond=None)
    rejected = artifact("onnx-int8", precision="int8", status="rejected", reason="accuracy lost")
    result = run(bundle(artifact("onnx-fp32", drift=drift), rejected), [row("onnx-fp32")])
    assert result.not_in_bundle == (
        "FP16 graphs: add them with edgeformer export --fp16",
        "INT4 graphs: add them with edgeformer export --int4",
        "exit after loop 1: add them with edgeformer export --exit all",
        "trimmed vocabulary: add them with edgeformer export --vocab-trim",
        "onnx-int8: rejected: accuracy lost",
    )
    score = perplexity(20.0)
    with_exits = language(artifact("full", validation=score), artifact("exit2", role="exit", exit=2, validation=score))
    assert run(with_exits, [row("full")]).not_in_bundle[3:] == (
        "exit after loop 4: add them with edgeformer export --exit all",
        "decoding with caches: add them with edgeformer export --exit all",
    )


def test_an_unstable_measurement_is_a_reservation() -> None:
    shaky = Latency(status="measured", p50=4.0, n=100, stable=False)
    result = run(bundle(artifact("a"), artifact("b")), [row("a", 9.0), row("b", latency_ms=shaky)])
    assert "1 of the 2 measurements are unstable" in result.reason
