"""Figures in the sentences of docs/results.md, from the committed JSON."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.results_page.tables import result


def standard_error(score: dict[str, float]) -> float:
    """Of the difference of two accuracies of about this one, on sets of this size."""
    return math.sqrt(2 * score["accuracy"] * (1 - score["accuracy"]) / score["n"])


def facts() -> dict[str, str]:
    """Name in the template → its text."""
    return {**classifiers(), **language_models(), **bundles(), **leaving(), **estimates(), **serving()}


def classifiers() -> dict[str, str]:
    """Of SST-2 runs."""
    runs = {(run["recipe"], run["split"]): run for run in result("2026-11-21-sst2")}
    light, baseline = runs["recurrent_sst2_fast", "random-split"], runs["baseline_sst2_fast", "random-split"]
    honest = runs["recurrent_sst2_fast", "glue-dev"]["tests"]
    pretrained = {run["run"]: run["parameters"] for run in result("2026-11-22-pretrained")}
    return {
        "fold_share": f"{pretrained['folded-further-text-seed42'] / pretrained['minilm_sst2']:.0%}".replace("%", " %"),
        "random_split_error": f"{standard_error(light['tests']['random-split']):.4f}",
        "glue_dev_error": f"{standard_error(honest['glue-dev']):.3f}",
        "sst_test_error": f"{standard_error(honest['sst-test']):.3f}",
        "times_the_parameters": f"{baseline['parameters'] / light['parameters']:.1f}",
    }


def language_models() -> dict[str, str]:
    """Of the run under the published protocol."""
    padded = next(run for run in result("2026-11-21-language") if run["score_padding"])
    padding = 1 - padded["data"]["tokens"]["validation"] / padded["validation"]["n"]
    return {"scored_padding": f"{100 * padding:.1f} %"}


def leaving() -> dict[str, str]:
    """Of the model whose exits were promised something of."""
    accuracy = result("2026-11-22-exit-guarantee")["accuracy"]
    return {"exit_accuracy": ", ".join(f"{value:.4f} after loop {loop}" for loop, value in accuracy.items())}


def bundles() -> dict[str, str]:
    """Of exported artifacts."""
    artifacts = {artifact["id"]: artifact for artifact in result("2026-11-21-bundle-recurrent-sst2-fast")["artifacts"]}
    vocabulary = artifacts["onnx-int8-trim"]["vocabulary"]
    deep = {
        artifact["id"]: artifact["size_bytes"] / 1e6 for artifact in result("2026-11-21-bundle-crt-deep")["artifacts"]
    }
    return {
        "validation_rows": f"{artifacts['onnx-fp32']['validation']['n']:,}",
        "kept_tokens": f"{vocabulary['kept']:,}",
        "all_tokens": f"{vocabulary['original']:,}",
        "kept_coverage": f"{100 * vocabulary['coverage']:.2f} %",
        "scored_tokens": f"{result('2026-11-21-bundle-crt-mini')['artifacts'][0]['validation']['n']:,}",
        "deep_scored_tokens": f"{result('2026-11-21-bundle-crt-deep')['artifacts'][0]['validation']['n']:,}",
        "step_bundle_mb": f"{deep['onnx-fp16-step']:.1f} MB",
        "full_model_mb": f"{deep['onnx-fp16']:.1f} MB",
    }


def estimates() -> dict[str, str]:
    """Of times that were estimated."""
    uncalibrated = result("2026-11-21-estimator")["uncalibrated"]
    record = result("2026-11-25-estimator")
    results, unchecked = record["summary"], record["doubted"]
    return {
        "kindless_close": f"{record['without_kind']['within_15_percent']:.0%}",
        "doubted_cases": f"{unchecked['cases']}",
        "doubted_close": f"{unchecked['within_15_percent']:.0%}",
        "doubted_median": f"{100 * unchecked['median_error']:.1f} %",
        "estimated_cases": f"{results['cases']}",
        "estimated_close": f"{results['within_15_percent']:.0%}",
        "estimated_median": f"{100 * results['median_error']:.1f} %",
        "estimated_worst": f"{results['worst_error']:.0%}",
        "estimated_held": f"{results['ranges_held']:.1%}",
        "estimated_widest": f"{results['widest']:.2f}",
        "estimated_tau": f"{results['tau']:.2f}",
        "held": f"{uncalibrated['hold_the_measurement']} of {uncalibrated['cases']}",
        "range_width": f"{uncalibrated['median_width']:.1f}",
    }


def serving() -> dict[str, str]:
    """Of serve under load. Raises ValueError where an answer was lost or mixed up: that is no result to write down."""
    document = result("2026-11-22-serve-load")
    blocks, overload, stopped = document["blocks"], document["overload"], document["stopped"]
    mixed_up = [results["mixed_up"] for results in (*blocks, overload, stopped)]
    if any(mixed_up) or stopped["half"] or any(set(block["statuses"]) != {"200"} for block in blocks):
        raise ValueError("serve-load: answers were lost or mixed up")
    maximum = max(block["clients"] for block in blocks)
    return {
        "most_clients": f"{maximum}",
        "served_to_most": f"{sum(block['statuses']['200'] for block in blocks if block['clients'] == maximum):,}",
        "refused": f"{overload['statuses']['503']:,}",
        "came_at_once": f"{sum(overload['statuses'].values()):,}",
        "answered_at_stop": f"{stopped['arrived_whole']:,}",
    }


def minutes() -> dict[str, Any]:
    """Run → minutes of its training; README quotes two."""
    runs = (*result("2026-11-21-sst2"), *result("2026-11-21-language"))
    return {run["run"]: run["seconds"] / 60 for run in runs}
