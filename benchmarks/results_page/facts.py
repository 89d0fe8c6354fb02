"""Figures in the sentences of docs/results/, from the committed JSON."""

from __future__ import annotations

import statistics

from benchmarks.claims.history import read_history
from benchmarks.claims.page import is_decided
from benchmarks.claims.schema import read_claims
from benchmarks.own_data import figures
from benchmarks.results_page.bench import machines, met
from benchmarks.results_page.studies import questions
from benchmarks.results_page.tables import FOLDER, result
from edgeformer.artifacts.units import format_duration


def facts() -> dict[str, str]:
    """Name in the templates → its text."""
    return {
        **ladder(), **bundles(), **memory(), **speeds(), **claims(), **last_epoch(), **own_data(), **wnut(),
        **three_commands(),
    }  # fmt: skip


def percent(share: float) -> str:
    """Return a share as whole percent."""
    return f"{100 * share:.0f}%"


def last_epoch() -> dict[str, str]:
    """How often the last epoch scores higher than the one with the lowest validation loss; mean accuracy of both."""
    documents = result("2026-11-27-last-epoch")["runs"]
    runs = [*documents.values()]

    def higher(split: str) -> str:
        records = [run[split] for run in runs]
        wins = sum(record["last"]["accuracy"] > record["kept"]["accuracy"] for record in records)
        return f"{wins} of {len(records)}"

    said = {"last_epoch_higher": higher("random-split"), "last_epoch_higher_sst_test": higher("sst-test")}
    for model in ("baseline", "light"):
        for which in ("kept", "last"):
            scores = [run["random-split"] for name, run in documents.items() if name.startswith(f"{model}, all rows")]
            said[f"{which}_epoch_{model}"] = f"{statistics.mean(score[which]['accuracy'] for score in scores):.4f}"
    return said


def own_data() -> dict[str, str]:
    """Size of the largest recommended model without a source, and on how many sets searches keep their targets."""
    record = result("2026-11-29-own-data")
    rows = [*figures(record)]
    kept: dict[str, list[bool]] = {"search": [], "search --source minilm": []}
    for name in record["sets"]:
        of_set = {row["system"]: row for row in rows if row["set"] == name}
        baselines = [row for system, row in of_set.items() if system not in (*kept, "init")]
        for system in kept.keys() & of_set.keys():
            rivals = [row for row in baselines if "MiniLM" not in row["system"] or "minilm" in system]
            best = max(rivals, key=lambda row: row["accuracy"])
            kept[system].append(of_set[system]["accuracy"] >= best["accuracy"] - best["error"])
    largest = max(row["bytes"] for row in rows if row["system"] == "search")
    counts = {key: f"{sum(each)} of {len(each)}" for key, each in kept.items()}
    return {
        "own_data_mb": f"{largest / 1e6:.1f}", "own_data_kept": counts["search"],
        "own_data_kept_source": counts["search --source minilm"],
    }  # fmt: skip


def wnut() -> dict[str, str]:
    """Span F1 of the search on WNUT's names."""
    record = result("2026-11-30-wnut")
    pretrained, small = record["models"][:2]
    (test,) = record["tests"]
    return {
        "wnut_train": f"{record['train_rows']:,}", "wnut_test": f"{record['test_rows']:,}",
        "wnut_spans": f"{test['rows']:,}", "wnut_validation_f1": f"{pretrained['score']:.3f}",
        "wnut_test_f1": f"{test['score']:.3f}", "wnut_train_time": format_duration(pretrained["train_s"]),
        "wnut_small_time": format_duration(small["train_s"]),
    }  # fmt: skip


def three_commands() -> dict[str, str]:
    """Durations, sizes of engines and verdict of training, exporting and judging the largest recipe."""
    record = result("2026-11-29-three-commands")
    train, export, profile = map(format_duration, record["commands"].values())
    engines = [record["artifacts"][name] / 2**20 for name in record["engine_build_s"]]
    low, typical, high = record["estimated_ms_per_token"]["tensorrt-rtx-fp16-decode"]
    scored, rows = record["scored_rows"]["validation"]
    built_s = [f"{seconds:.0f}" for seconds in record["engine_build_s"].values()]
    return {
        "three_train": train, "three_export": export, "three_profile": profile, "three_engine_mib": f"{engines[0]:.0f}",
        "three_decode_mib": f"{engines[1]:.0f}", "three_engine_s": built_s[0], "three_decode_s": built_s[1],
        "three_verdict": record["verdict"]["status"], "three_ms": f"{typical:.1f}", "three_low": f"{low:.1f}",
        "three_high": f"{high:.1f}", "three_limit": f"{record['limit_ms']}", "three_rows": f"{scored} of {rows}",
    }  # fmt: skip


def ladder() -> dict[str, str]:
    """Figures of the linear model with and without a teacher."""
    runs = {run["run"]: run for run in result("2026-11-26-ladder")["runs"]}
    scores = [runs[name]["tests"]["sst-test"] for name in ("linear_sst2", "linear_distilled_sst2")]
    plain, taught = (score["accuracy"] for score in scores)
    error = sum(score["accuracy"] * (1 - score["accuracy"]) / score["n"] for score in scores) ** 0.5
    sizes = {artifact["id"]: artifact["size_bytes"] for artifact in runs["linear_distilled_sst2"]["artifacts"]}
    return {
        "linear_taught_mb": f"{sizes['onnx-int8'] / 1e6:.2f}",
        "linear_taught_sst_test": f"{taught:.4f}",
        "linear_taught_gain": f"{100 * (taught - plain):.1f}",
        "ladder_error": f"{100 * error:.1f}",
        "ladder_teacher_dev": f"{runs['minilm_sst2']['tests']['glue-dev']['accuracy']:.4f}",
        "ladder_teacher_sst_test": f"{runs['minilm_sst2']['tests']['sst-test']['accuracy']:.4f}",
        "ladder_light_teacher": f"{runs['minilm_sst2-of-light']['tests']['sst-test']['accuracy']:.4f}",
        "ladder_light_twice": questions("distilled").said("distilled", "sst-test", "accuracy"),
        "ladder_minilm_sst_test": questions("distilled").said("teacher", "sst-test", "accuracy"),
    }


def memory() -> dict[str, str]:
    """Ratios of predicted and measured peak memory in training."""
    ratios = [row["ratio"] for row in result("2026-11-23-plan-accuracy")["rows"]]
    return {"plan_low": f"{min(ratios):.2f}", "plan_high": f"{max(ratios):.2f}"}


def speeds() -> dict[str, str]:
    """Targets that each machine meets, and the ratios to Hugging Face's Trainer."""
    results = machines()
    ratios = [machine.results["hugging_face_trainer"]["ratios"] for machine in results]
    return {
        "targets_met": "; ".join(f"{met(machine)} on {machine.session['host']}" for machine in results),
        "trainer_padded": " and ".join(f"{ratio['padded']['median']:.1f}×" for ratio in ratios),
        "trainer_grouped": " and ".join(f"{ratio['grouped']['median']:.2f}×" for ratio in ratios),
    }


def claims() -> dict[str, str]:
    """Verdicts on the papers' claims."""
    content = read_claims(FOLDER.parents[2] / "docs" / "claims.yaml")
    origins = read_history().origins(content)
    counted_claims = {name: claim for name, claim in content.claims.items() if claim.is_counted}
    verdicts = [claim.result.verdict for claim in counted_claims.values() if claim.result is not None]
    counted = sum(
        claim.study == "counts" and claim.result is not None and claim.result.verdict == "reproduced"
        for claim in counted_claims.values()
    )
    decided = [name for name, claim in counted_claims.items() if is_decided(claim)]
    return {
        "claims_made": f"{len(verdicts)}",
        "claims_reproduced": f"{verdicts.count('reproduced')}",
        "claims_counted": f"{counted}",
        "claims_measured": f"{verdicts.count('reproduced') - counted}",
        "claims_not_reproduced": f"{verdicts.count('not reproduced')}",
        "claims_untestable": f"{sum(verdict.startswith('not test') for verdict in verdicts)}",
        "claims_decided": f"{len(decided)}",
        "claims_younger": f"{sum(origins[name].age == 'younger' for name in decided)}",
    }


def bundles() -> dict[str, str]:
    """Figures of exported artifacts."""
    artifacts = {artifact["id"]: artifact for artifact in result("2026-11-21-bundle-recurrent-sst2-fast")["artifacts"]}
    vocabulary = artifacts["onnx-int8-trim"]["vocabulary"]
    whole, trimmed = artifacts["onnx-fp32"], artifacts["onnx-int8-trim"]
    deep = {
        artifact["id"]: artifact["size_bytes"] / 1e6 for artifact in result("2026-11-21-bundle-crt-deep")["artifacts"]
    }
    loss = 100 * (whole["validation"]["accuracy"] - trimmed["validation"]["accuracy"])
    sizes = [artifact["size_bytes"] for artifact in (artifacts["onnx-fp16"], artifacts["onnx-int8"], trimmed)]
    shares = [percent(size / whole["size_bytes"]) for size in sizes]
    return {
        **dict(zip(("fp16_share", "int8_share", "trim_share"), shares, strict=True)), "trim_loss": f"{loss:.2f}",
        "validation_rows": f"{whole['validation']['n']:,}", "kept_tokens": f"{vocabulary['kept']:,}",
        "all_tokens": f"{vocabulary['original']:,}", "kept_coverage": f"{100 * vocabulary['coverage']:.2f}%",
        "scored_tokens": f"{result('2026-11-21-bundle-crt-mini')['artifacts'][0]['validation']['n']:,}",
        "deep_scored_tokens": f"{result('2026-11-21-bundle-crt-deep')['artifacts'][0]['validation']['n']:,}",
        "step_artifact_mb": f"{deep['onnx-fp16-step']:.1f} MB",
        "full_model_mb": f"{deep['onnx-fp16']:.1f} MB",
    }  # fmt: skip
