"""A sample of onnx's test models through import, every conversion and the graph pass; models that once failed."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.node_conformance import RESULTS, all_cases, run_case, tables
from tests.docs.document import ROOT

SAMPLE = 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the generators in onnx
def test_a_sample_has_no_crash_and_no_silent_difference(tmp_path: Path) -> None:
    problems, passed = [], 0
    for case in all_cases(SAMPLE)[::2]:  # both forms
        folder = tmp_path / f"{case.name}-{case.form}"
        folder.mkdir()
        for outcome in run_case(case, folder):
            passed += outcome.status == "passed"
            if outcome.status in ("differs", "crashed") or (
                outcome.status == "refused" and outcome.path != "graph pass" and not outcome.names_subject
            ):
                problems.append(f"{case.name} ({case.form}): {outcome}")
    assert problems == [] and passed > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "form", "path", "status", "reason"),
    [
        ("slice_start_out_of_bounds", "published", "import", "passed", ""),  # its output is empty
        ("constant", "published", "import", "refused", "has no inputs, so 'values' is always the same"),
        ("cast_INT2_to_FLOAT", "published", "import", "refused", "is a tensor of int2"),
        ("gru_batchwise", "published", "import", "refused", "it has the operators GRU"),
        ("swiglu", "published", "import", "refused", r"onnxruntime .*implementation for Swish"),
        ("Conv1d", "published", "fp16", "passed", ""),  # before IR version 4, stored tensors are inputs
        ("sequence_model1", "published", "fp16", "refused", "SequenceAt"),  # a value that is a list
        ("range_float16_type_positive_delta_expanded", "published", "fp16", "passed", ""),  # a cast of FP16 numbers
        ("acos", "published", "fp16", "refused", r"can compute in FP16 \(Acos\)"),
        ("ai_onnx_ml_binarizer", "published", "int8", "refused", r"stored weights.*\(Binarizer\)"),  # no opset
        ("matmul_3d", "stored weights", "int8", "refused", "stay FP32.*: b of MatMul"),
        ("Linear_no_bias", "published", "int8", "refused", "stay FP32.*: 2 of MatMul node_1"),
        ("rotary_embedding_expanded", "stored weights", "int8", "passed", ""),  # nodes without names
        ("gemm_default_single_elem_vector_bias", "stored weights", "int4", "passed", ""),  # a bias for all columns
    ],
)
def test_models_that_once_failed(name: str, form: str, path: str, status: str, reason: str, tmp_path: Path) -> None:
    (case,) = [case for case in all_cases() if case.name == f"test_{name}" and case.form == form]
    (outcome,) = [outcome for outcome in run_case(case, tmp_path) if outcome.path == path]
    assert outcome.status == status and re.search(reason, outcome.reason), outcome


def test_the_page_has_the_measured_tables() -> None:
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert report["every"] == 1 and report["differs"] == report["crashed"] == report["refused_without_a_name"] == []
    page = (ROOT / "docs/explanation/reliability.md").read_text(encoding="utf-8")
    assert tables(report) in page, "print the tables with: python -m benchmarks.node_conformance --show"
