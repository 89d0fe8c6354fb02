"""Are imported graphs converted without a crash or a silent difference? Runs the test models of the package onnx.

Every test is one graph with inputs and the outputs that the ONNX standard demands. It is imported as published
(``import onnx``); a graph with several inputs is imported a second time with all inputs but the first one stored as
weights, because conversions need stored weights. Each bundle is exported as FP16, INT8 and INT4, and its graph runs in
OpenVINO with and without edgeformer's graph pass. The outcome of a test on a path is one of:

- passed: the outputs are within the tolerance.
- refused: edgeformer says why it cannot use or convert the graph.
- rejected: the graph was converted, and export found it out of tolerance or larger and deleted it.
- runtime: ONNX Runtime without edgeformer gives the same outputs, and they are not those of the standard.
- differs: an artifact that edgeformer offers is out of tolerance, without a word about it.
- crashed: an exception that is no EdgeformerError, or the end of the process.

Tolerances: ``import``: that of the test (relative 1e-3, absolute 1e-7), or ``ROUNDING``.
Conversions: ``OUTPUT_TOLERANCES``, the RMS error over the standard deviation, on the published inputs against the
published outputs (the imported graph's where ONNX Runtime differs), and on the same numbers in reverse order against
the imported graph. Graph pass: 1e-4 of the standard deviation, with against without it.
"""

from __future__ import annotations

import multiprocessing
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from benchmarks.frame import read_record, run_script, stamp
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import as_json, write_json
from edgeformer.artifacts.golden import OUTPUT
from edgeformer.artifacts.manifest import ArtifactManifest, Precision
from edgeformer.bundle import Bundle
from edgeformer.export import export as exporting
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array
from edgeformer.tasks.tensors import OUTPUT_TOLERANCES, measure_error

RESULTS = Path(__file__).parent / "results" / "cpu-2core" / "2026-11-27-node-conformance.json"
KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
"""Folders of onnx's backend tests; the others download models."""
PATHS = ("import", "fp16", "int8", "int4", "graph pass")
PRECISIONS: tuple[Precision, ...] = ("fp16", "int8", "int4")
PASS_TOLERANCE = 1e-4
ROUNDING = {"float32": 1e-6, "float16": 1e-3}
"""Difference, relative to the largest number of an output, that counts as rounding; the absolute tolerance of the
standard's tests, 1e-7, is below the resolution of many of their outputs."""

Status = Literal["passed", "refused", "rejected", "runtime", "differs", "crashed"]
STATUSES: tuple[Status, ...] = ("passed", "refused", "rejected", "runtime", "differs", "crashed")
Form = Literal["published", "stored weights"]


@dataclass(frozen=True)
class Case:
    """A graph with one call.

    Attributes:
        inputs, outputs: name → array; values that are no arrays of numbers are left out of ``inputs``.
        rtol, atol: tolerance of the standard's test.
    """

    kind: str
    name: str
    form: Form
    model: onnx.ModelProto
    inputs: dict[str, Array]
    outputs: dict[str, Any]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Outcome:
    """What happened to a case on one path; ``reason``: message of edgeformer, or the difference."""

    path: str
    status: Status
    reason: str = ""
    names_subject: bool = True


def _as_array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _is_numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic) and np.asarray(value).dtype.kind in "iufb"


def _read_pb(path: Path) -> Any:
    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return tensor


@cache
def load_cases(kinds: Sequence[str] = KINDS) -> tuple[Case, ...]:
    """Load the published form of every test, with its first set of inputs."""
    from onnx.backend.test.loader import load_model_tests

    cases = []
    state = np.random.get_state()
    np.random.seed(0)  # the generators draw their inputs
    for kind in kinds:
        with warnings.catch_warnings(), np.errstate(all="ignore"):  # the generators divide by zero on purpose
            warnings.simplefilter("ignore")
            tests = load_model_tests(kind=kind)
        for test in sorted(tests, key=lambda test: test.name):
            model, data = test.model, test.data_sets
            if model is None and test.model_dir is not None:
                folder = Path(test.model_dir)
                model = onnx.load(str(folder / "model.onnx"))
                sets = folder / "test_data_set_0"
                counts = [len(list(sets.glob(f"{port}_*.pb"))) for port in ("input", "output")]
                files = [
                    [_read_pb(sets / f"{port}_{number}.pb") for number in range(count)]
                    for port, count in zip(("input", "output"), counts, strict=True)
                ]
                data = [files]
            if model is None or not data:
                continue
            values, expected = ([_as_array(value) for value in part] for part in data[0])
            ports = [port.name for port in model.graph.input]
            inputs = {name: np.asarray(value) for name, value in zip(ports, values, strict=False) if _is_numbers(value)}
            outputs = dict(zip([port.name for port in model.graph.output], expected, strict=False))
            cases.append(Case(kind, test.name, "published", model, inputs, outputs, test.rtol, test.atol))
    np.random.set_state(state)
    return tuple(cases)


def with_stored_weights(case: Case) -> Case | None:
    """Store every input but the first one as an initializer; None for a graph where that changes nothing."""
    ports = list(case.model.graph.input)
    if len(ports) < 2 or len(case.inputs) < len(ports):
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = max(model.ir_version, 4)  # before that, every stored tensor is an input, too
    del model.graph.input[1:]
    stored = {tensor.name for tensor in model.graph.initializer}
    tensors = [numpy_helper.from_array(case.inputs[port.name], port.name) for port in ports[1:]]
    model.graph.initializer.extend(tensor for tensor in tensors if tensor.name not in stored)
    first = {ports[0].name: case.inputs[ports[0].name]}
    return Case(case.kind, case.name, "stored weights", model, first, case.outputs, case.rtol, case.atol)


@cache
def all_cases(every: int = 1) -> list[Case]:
    """Return every n-th test in both forms."""
    published = load_cases()[::every]
    return [form for case in published for form in (case, with_stored_weights(case)) if form is not None]


def difference(outputs: dict[str, Array], case: Case) -> str | None:
    """Compare with the outputs that the standard demands; None: all are within the test's tolerance."""
    for name, expected in case.outputs.items():
        reference, output = np.asarray(expected), outputs.get(name)
        if output is None:
            return f"output {name!r} is missing"
        types = [f"{array.dtype}{list(array.shape)}" for array in (output, reference)]
        if types[0] != types[1]:
            return f"output {name!r} is {types[0]}, not {types[1]}"
        if not reference.size or np.array_equal(output, reference, equal_nan=reference.dtype.kind == "f"):
            continue
        wide, other = output.astype(np.float64), reference.astype(np.float64)
        finite = other[np.isfinite(other)]
        scaled = ROUNDING.get(str(reference.dtype), 0.0) * np.abs(finite).max(initial=0)
        if not np.allclose(wide, other, rtol=case.rtol, atol=max(case.atol, scaled), equal_nan=True):
            error = np.abs(wide - other)
            return f"output {name!r} differs by {error[~np.isnan(error)].max(initial=0):.3g}"
    return None


def relative_error(outputs: dict[str, Array], reference: dict[str, Any]) -> float:
    """Return the largest RMS error over the standard deviation of any output; infinite for another shape or type."""
    errors = [0.0]
    for name, expected in reference.items():
        array = np.asarray(expected)
        if name not in outputs or outputs[name].shape != array.shape or outputs[name].dtype != array.dtype:
            return float("inf")
        if array.size:
            errors.append(measure_error(name, outputs[name], array).relative_rms)
    return max(errors)


def run_graph(path: Path, inputs: dict[str, Array]) -> dict[str, Array]:
    """Run a graph once in ONNX Runtime."""
    with OnnxSession(path, threads=1) as session:
        return {name: np.asarray(array) for name, array in session.run(inputs).items()}


def names_subject(reason: str, model: onnx.ModelProto) -> bool:
    """Whether a refusal names an operator, an input or an output of the graph, or its precision."""
    names = {schema.name for schema in onnx.defs.get_all_schemas()} | {"INT8 already", "FP16 already"}
    names |= {value.name for value in (*model.graph.input, *model.graph.output, *model.graph.initializer)}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", reason) for name in names if name)


def run_case(case: Case, folder: Path) -> list[Outcome]:
    """Run a case on every path. ``folder`` is an empty folder for its files."""
    source, inputs_file, bundle = folder / f"{case.name}.onnx", folder / "inputs.npz", folder / "bundle"
    onnx.save(case.model, str(source))
    np.savez(inputs_file, **case.inputs)  # type: ignore[arg-type]

    def refused(path: str, reason: object, status: Status = "refused") -> Outcome:
        text = str(reason).replace(f"{source}: ", "").replace(str(folder), "")
        return Outcome(path, status, text, names_subject(text, case.model))

    def attempt(path: str, action: Callable[[], list[Outcome]]) -> list[Outcome]:
        try:
            return action()
        except EdgeformerError as error:
            return [refused(path, error)]
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            return [Outcome(path, "crashed", f"{type(error).__name__}: {error} ({place})")]

    def import_graph() -> list[Outcome]:
        import_onnx(source, bundle, OnnxImportOptions(inputs=inputs_file if case.inputs else None))
        answers = {name: array[0] for name, array in Bundle.open(bundle).golden().cases(OUTPUT).items()}
        problem = difference(answers, case)
        if problem is None:
            return [Outcome("import", "passed")]
        bare = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"]).run(None, case.inputs)
        is_same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(answers.values(), bare, strict=True))
        return [Outcome("import", "runtime" if is_same else "differs", problem)]

    outcomes = attempt("import", import_graph)
    if not (bundle / "bundle.json").is_file():
        return outcomes
    if outcomes[0].status == "runtime":
        answers = {name: array[0] for name, array in Bundle.open(bundle).golden().cases(OUTPUT).items()}
        case = replace(case, outputs=answers)
    for precision in PRECISIONS:
        outcomes += attempt(precision, lambda precision=precision: [convert(case, bundle, precision, refused)])  # type: ignore[misc]
    outcomes += attempt("graph pass", lambda: [compare_graph_pass(case, bundle)])
    return outcomes


def convert(case: Case, bundle: Path, precision: Precision, refused: Callable[..., Outcome]) -> Outcome:
    """Export one precision, and compare what was built with the standard and with the imported graph."""
    options = {"fp16": ExportOptions(fp16=True), "int8": ExportOptions(int8=True), "int4": ExportOptions(int4=True)}
    # Memory is measured in a process per artifact, which would take most of the time, and changes no result.
    with patch.object(exporting, "add_resident", lambda _, manifest: manifest):
        manifest = exporting.export(bundle, options[precision])
    entry: ArtifactManifest = next(entry for entry in manifest.artifacts if entry.id == f"onnx-{precision}")
    if entry.status != "built":
        reason = str(entry.reason)
        if any(words in reason for words in ("the conversion failed", "cannot be opened by", "does not accept")):
            return Outcome(precision, "crashed", reason)
        was_judged = entry.parity is not None or reason.startswith("stores ")
        return refused(precision, reason, "rejected" if was_judged else "refused")
    path, tolerance = bundle / str(entry.file), OUTPUT_TOLERANCES[precision][1]
    error = relative_error(run_graph(path, case.inputs), case.outputs)
    if error > tolerance:
        return Outcome(precision, "differs", f"relative RMS error {error:.3g} on the published inputs")
    reverse = {
        name: np.ascontiguousarray(array.reshape(-1)[::-1].reshape(array.shape))
        for name, array in case.inputs.items()
        if array.dtype == np.float32
    }
    try:
        reference = run_graph(bundle / "onnx/model.onnx", {**case.inputs, **reverse})
    except EdgeformerError:  # the first graph takes these numbers in one order only: sizes, lengths
        return Outcome(precision, "passed")
    if all(np.isfinite(array).all() for array in reference.values()):
        error = relative_error(run_graph(path, {**case.inputs, **reverse}), reference)
        if error > tolerance:
            return Outcome(precision, "differs", f"relative RMS error {error:.3g} on the inputs in reverse order")
    return Outcome(precision, "passed")


def compare_graph_pass(case: Case, bundle: Path) -> Outcome:
    """Run the graph in OpenVINO with and without the rewriting of rotations."""
    from edgeformer.runtimes.openvino import session

    path, fuse = bundle / "onnx/model.onnx", session.fuse_rotations
    rewritten: list[int] = []
    outputs = []
    for rewrite in (lambda model: rewritten.append(fuse(model)), lambda model: None):
        session.fuse_rotations = rewrite  # type: ignore[assignment]
        try:
            with session.OpenVINOSession(path, threads=1) as opened:
                outputs.append({name: np.array(array) for name, array in opened.run(case.inputs).items()})
            if not rewritten[0]:  # the same graph
                return Outcome("graph pass", "passed", "no rotation")
        finally:
            session.fuse_rotations = fuse
    error = relative_error(*outputs)
    if error > PASS_TOLERANCE:
        return Outcome("graph pass", "differs", f"relative RMS error {error:.3g}")
    return Outcome("graph pass", "passed", f"{rewritten[0]} rotations")


def _run(number: int) -> list[Outcome]:
    """Run a case of ``_CASES``, which worker processes share with their parent."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_case(_CASES[number], Path(folder))


_CASES: list[Case] = []


def run_all(cases: Sequence[Case], jobs: int) -> list[list[Outcome]]:
    """Run all cases in worker processes; a case that ends its process counts as crashed."""
    _CASES[:] = cases
    context = multiprocessing.get_context("fork")

    def run_each(numbers: Sequence[int]) -> dict[int, list[Outcome]]:
        results, remaining = dict[int, list[Outcome]](), [*numbers]
        while remaining:
            with ProcessPoolExecutor(1, context) as pool:
                try:
                    for number in [*remaining]:
                        results[number] = pool.submit(_run, number).result()
                        remaining.remove(number)
                except BrokenProcessPool:
                    results[remaining.pop(0)] = [Outcome("import", "crashed", "the process ended")]
        return results

    with ThreadPoolExecutor(jobs) as threads:
        parts = threads.map(run_each, [range(first, len(cases), jobs) for first in range(jobs)])
        by_number = {number: outcomes for part in parts for number, outcomes in part.items()}
    return [by_number[number] for number in range(len(cases))]


REASONS = (
    ("tensors of {}", r"is a tensor of (\w+)"),
    ("sequences, optionals and maps", r"is a (sequence|optional|map|sparse tensor)\b"),
    ("empty golden inputs", r"array '.*' is empty"),
    ("graphs without inputs", "has no inputs"),
    ("operators of other domains: {}", r"custom operators: ([\w.]+)"),
    (
        "onnxruntime lacks {}",
        r"implementation for (\w+)\(\d+\)|find kernel for (\w+)|:(\w+)\(-?\d+\) is not a registered",
    ),
    ("onnxruntime cannot open the graph", "cannot be opened by onnxruntime"),
    ("onnxruntime does not run the graph on the published inputs", "the graph does not accept"),
    ("random numbers or NaN", "gives different outputs for the same inputs"),
    ("output shapes that depend on values", "depends on the input values"),
    ("graphs that are not FP32", r"its graph is (INT8|FP16) already"),
    ("no operator that can compute in FP16", "can compute in FP16"),
    ("no stored weights to quantize", "has no MatMul, Gemm or Gather"),
    ("weights that are no matrix on the right of a product", "cannot quantize these weights"),
    ("rows that are too short for blocks", "would not shrink"),
    ("an older opset", "needs opset"),
    ("out of tolerance", "^parity"),
    ("more numbers stored", "^stores "),
    ("operators that OpenVINO cannot open", "OpenVINO"),
)
"""Groups of refusals and rejections, and the pattern of their messages."""


def reason_group(outcome: Outcome) -> str:
    """Return the group of a refusal or rejection."""
    if outcome.path == "graph pass" and "does not accept" in outcome.reason:
        return "OpenVINO does not run the graph on the published inputs"
    for label, pattern in REASONS:
        if (match := re.search(pattern, outcome.reason)) is not None:
            return label.format(next(filter(None, match.groups()), "") if "{" in label else "")
    return outcome.reason[:120]


def summarize(cases: Sequence[Case], results: Sequence[list[Outcome]]) -> dict[str, Any]:
    """Return counts by set of tests, form, path and status, groups of reasons, and the tests behind rare outcomes."""
    counts: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    reasons: dict[str, Counter[str]] = {}
    listed: dict[str, list[dict[str, str]]] = {"runtime": [], "rejected": [], "differs": [], "crashed": []}
    unnamed: list[str] = []
    for case, outcomes in zip(cases, results, strict=True):
        tests = "node" if case.kind == "node" else "converted"
        operators = Counter(node.op_type for node in case.model.graph.node if node.op_type != "Constant")
        for outcome in outcomes:
            by_path = counts.setdefault(tests, {}).setdefault(case.form, {})
            by_status = by_path.setdefault(outcome.path, dict.fromkeys(STATUSES, 0))
            by_status[outcome.status] += 1
            if outcome.status in ("refused", "rejected"):
                reasons.setdefault(outcome.path, Counter())[reason_group(outcome)] += 1
            # OpenVINO names its own operators.
            if outcome.status == "refused" and outcome.path != "graph pass" and not outcome.names_subject:
                unnamed.append(f"{case.name} ({case.form}, {outcome.path}): {outcome.reason[:200]}")
            if outcome.status in listed:
                row = {"test": case.name, "form": case.form, "path": outcome.path, "reason": outcome.reason[:200]}
                listed[outcome.status].append({**row, "operators": ", ".join(sorted(operators))})
    return {
        "counts": counts,
        "reasons": {path: dict(groups.most_common()) for path, groups in reasons.items()},
        "refused_without_a_name": unnamed,
        "rotations": sum(o.path == "graph pass" and "rotations" in o.reason for outcomes in results for o in outcomes),
        **listed,
    }


def tables(report: dict[str, Any]) -> str:
    """Return the tables of docs/explanation/reliability.md."""
    heads = ("tests", "path", "graphs", "passed", "share", "refused", "rejected", "ONNX Runtime differs")
    lines = [f"| {' | '.join(heads)} | silently different | crashed |", f"|---|---|{'--:|' * 8}"]
    names = {"node": "operators", "converted": "converted models"}
    for tests, forms in report["counts"].items():
        for form, paths in forms.items():
            for path in PATHS:
                counts = paths[path]
                total = sum(counts.values())
                numbers = [f"{counts[status]:,}" for status in STATUSES[1:]]
                share = f"{100 * counts['passed'] / total:.1f}%"
                lines.append(
                    f"| {names[tests]}, {form} | {path} | {total:,} | {counts['passed']:,} | {share} | "
                    f"{' | '.join(numbers)} |"
                )
    lines += ["", "| path | reason of a refusal or rejection | graphs |", "|---|---|--:|"]
    for path in PATHS:
        lines += [f"| {path} | {label} | {count:,} |" for label, count in report["reasons"].get(path, {}).items()]
    lines += ["", "| ONNX Runtime differs from the standard | form | difference |", "|---|---|---|"]
    lines += [f"| `{row['test']}` | {row['form']} | {row['reason']} |" for row in report["runtime"]]
    return "\n".join(lines)


def main(every: int = 1, jobs: int = 2, match: str = "", json: Path | None = None, show: bool = False) -> None:
    """Run every n-th test whose name contains ``match``, and write the record; ``show``: print the committed tables."""
    if show:
        print(tables(read_record(RESULTS)))
        return
    started = time.perf_counter()
    cases = [case for case in all_cases(every) if match in case.name]
    results = run_all(cases, jobs)
    report = {
        **stamp(), "every": every, "seconds": round(time.perf_counter() - started), "graphs": len(cases),
        **summarize(cases, results),
    }  # fmt: skip
    if json is not None:
        write_json(json, report)
    print(tables(report) if every == 1 and not match else as_json(report))


if __name__ == "__main__":
    run_script(main)
