"""The page in headless Chromium: the answers of `predict`, a measured report, no network, no trust in what is shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.golden import read_golden
from edgeformer.artifacts.report import MeasureRules, Report
from edgeformer.benchmark.measure import drifted, summarise, windows_agree
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.predict import predict
from edgeformer.run import locate
from edgeformer.tasks.task import make_buffers
from edgeformer.tasks.text_answers import NO_NUMBER, Answering
from edgeformer.web.publish import PageOptions, publish
from tests.cli.in_process import Edgeformer
from tests.docs.test_deploy import SENTENCES, TOO_LONG
from tests.web.browser import ELSEWHERE, Tab, served
from tests.web.old_bundles import CLASSIFIER, LANGUAGE

pytestmark = pytest.mark.node
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
SHORT = "?min_s=0.05&min_calls=30&warmup_max_s=0.5"
TOLERANCE = {"onnx-fp32": 1e-4, "onnx-int8": 1e-3}
"""Of probabilities, of a model whose logits are stretched 300 times."""
MIDDLE = 0.0255
"""Half the difference of the small classifier's logits, in the middle of what the sentences get."""


def answer(tab: Tab, artifact: str, text: str, pair: str = "") -> dict[str, Any]:
    """Type a text and press the button, as a reader does."""
    tab.run(
        f"""(() => {{
          const form = document.querySelector("#try form");
          [form.artifact.value, form.text.value] = [{json.dumps(artifact)}, {json.dumps(text)}];
          form.pair.value = {json.dumps(pair)};
          document.getElementById("answer").replaceChildren();
          form.requestSubmit();
        }})()"""
    )
    tab.wait(
        "document.querySelector('#answer dl, #answer .caution') && !document.querySelector('#try button').disabled"
    )
    found: dict[str, Any] = tab.run(
        """(() => {
          const place = document.getElementById("answer");
          const [labels, shares] = ["dt", "dd"].map((name) => [...place.querySelectorAll(name)]);
          return {
            probabilities: Object.fromEntries(
              labels.map((one, index) => [one.textContent, Number(shares[index].dataset.probability)])),
            label: place.dataset.label,
            said: place.querySelector("p").textContent,
          };
        })()"""
    )
    return found


def measure(tab: Tab, artifacts: Sequence[str], seqs: str = "8, 16", **values: str) -> Report:
    """Fill in the form, press the button, and read the file that is offered."""
    fields = {"seq": seqs, **values}
    tab.run(
        f"""(() => {{
          const form = document.querySelector("#measure form");
          const chosen = {json.dumps(artifacts)};
          for (const box of form.querySelectorAll("[name=artifact]")) box.checked = chosen.includes(box.value);
          for (const [name, value] of Object.entries({json.dumps(fields)})) form.elements[name].value = value;
          delete document.getElementById("progress").dataset.state;
          form.requestSubmit();
        }})()"""
    )
    tab.wait("document.getElementById('progress').dataset.state === 'done'")
    content = tab.run("fetch(document.getElementById('download').href).then((response) => response.text())")
    return Report.model_validate_json(content, strict=False)


@pytest.fixture(scope="module")
def decided(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The small classifier, which is hardly sure of anything, with logits that are moved and stretched until it is; and
    its page."""
    folder = tmp_path_factory.mktemp("decided")
    bundle = folder / "bundle"
    shutil.copytree(CLASSIFIER, bundle)
    manifest = Bundle.open(bundle).manifest
    entries = []
    for entry in manifest.artifacts:
        if entry.id in TOLERANCE and entry.file is not None:
            stretch(bundle / entry.file)
            entries.append(entry.model_copy(update={"sha256": sha256_of(bundle / entry.file)}))
    seal(bundle, manifest.model_copy(update={"artifacts": tuple(entries)}))
    publish(Bundle.open(bundle), folder / "site", PageOptions(libraries, providers=("wasm",)))
    return bundle, folder / "site"


def stretch(file: Path, factor: float = 300, prefix: str = "stretch") -> None:
    """``logits`` become ``factor`` × (``logits`` - middle); ``prefix``: of the names of what computes it."""
    model = onnx.load(file)
    middle = np.array([MIDDLE, -MIDDLE], dtype=np.float32)
    constants = {f"{prefix}_middle": middle, f"{prefix}_factor": np.array(factor, dtype=np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    for node in model.graph.node:
        node.output[:] = [f"{prefix}_before" if name == "logits" else name for name in node.output]
    model.graph.node.append(helper.make_node("Sub", [f"{prefix}_before", f"{prefix}_middle"], [f"{prefix}_moved"]))
    model.graph.node.append(helper.make_node("Mul", [f"{prefix}_moved", f"{prefix}_factor"], ["logits"]))
    onnx.save(model, file)


def test_it_answers_as_predict_does(decided: tuple[Path, Path], tab: Tab) -> None:
    bundle, site = decided
    texts = [*SENTENCES, TOO_LONG]
    whole = len(Bundle.open(bundle).reader().tokenizer.encode(TOO_LONG).ids)
    with served(site) as address:
        tab.open(address)
        for artifact, tolerance in TOLERANCE.items():
            # One by one: rows of an INT8 call share the scale of their activations.
            calls = [texts] if artifact == "onnx-fp32" else [[text] for text in texts]
            location = locate(str(bundle), bundle)
            wanted: list[Any] = [right for some in calls for right in predict(location, some, artifact)[1]]
            assert {one.label for one in wanted} == {"negative", "positive"}
            for text, right in zip(texts, wanted, strict=True):
                found = answer(tab, artifact, text)
                assert found["label"] == right.label, (artifact, text)
                assert found["probabilities"] == pytest.approx(right.probabilities, abs=tolerance), (artifact, text)
                assert right.truncated == found["said"].startswith("Cut: "), text
            assert f"read 48 of {whole} tokens" in found["said"] and "did not count" in found["said"]
    assert tab.complaints == []


def test_every_other_artifact_answers_alike(site: Path, tab: Tab) -> None:
    """Exits, a trimmed vocabulary with a tokenizer of its own, FP16."""
    text = SENTENCES[0]
    with served(site) as address:
        tab.open(address)
        for artifact in ("onnx-int8-exit1", "onnx-int8-trim", "onnx-fp16"):
            right: Any = predict(locate(str(CLASSIFIER), CLASSIFIER), [text], artifact)[1][0]
            assert answer(tab, artifact, text)["probabilities"] == pytest.approx(right.probabilities, abs=1e-4)
        assert "no label" in answer(tab, "onnx-fp32", "  ")["said"]


def test_an_answer_that_overflows_is_said_to_be_no_number(
    decided: tuple[Path, Path], libraries: Path, tab: Tab, tmp_path: Path
) -> None:
    """300 times the difference of two logits, another 10³⁸ times."""
    bundle = Path(shutil.copytree(decided[0], tmp_path / "bundle"))
    manifest = Bundle.open(bundle).manifest
    entry = manifest.artifacts[0]
    graph = bundle / str(entry.file)
    stretch(graph, factor=3e38, prefix="again")
    made = entry.model_copy(update={"sha256": sha256_of(graph)})
    seal(bundle, manifest.model_copy(update={"artifacts": (made, *manifest.artifacts[1:])}))
    assert vars(predict(locate(str(bundle), bundle), ["good"], entry.id)[1][0])["error"] == NO_NUMBER
    publish(Bundle.open(bundle), tmp_path / "site", PageOptions(libraries, (entry.id,), ("wasm",)))
    with served(tmp_path / "site") as address:
        tab.open(address)
        found = answer(tab, entry.id, "good")
    assert found["said"] == NO_NUMBER and found["probabilities"] == {}


def test_pairs_and_several_labels(site: Path, tab: Tab, tmp_path: Path) -> None:
    """Of what a page says of its model, here by hand: two texts at a time, and a threshold for each label."""
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    told = json.loads((folder / "site.json").read_text(encoding="utf-8"))
    told |= {"pairs": True, "thresholds": {"negative": 0.9, "positive": 0.1}}
    (folder / "site.json").write_text(json.dumps(told), encoding="utf-8")
    bundle = Bundle.open(CLASSIFIER)
    entry = bundle.manifest.artifacts[0]
    pair = ("the staff was friendly", "the food was bad")
    answering = Answering(bundle.task, bundle.reader(entry), bundle.data)  # `predict` gives this model no pairs
    window = answering.read([pair])
    with bundle.session(entry) as session:
        right: Any = answering.answers(window, answering.run(session.run, window))[0]
    with served(folder) as address:
        tab.open(address)
        found = answer(tab, "onnx-fp32", *pair)
        assert found["label"] == "positive" and "tokens read" in found["said"]
        # Two logits: the difference of their logs is what the softmax of both keeps.
        logits = {name: np.log(p / (1 - p)) for name, p in found["probabilities"].items()}
        share = 1 / (1 + np.exp(logits["positive"] - logits["negative"]))
        assert share == pytest.approx(right.probabilities["negative"], abs=1e-5)
        assert "Shorten them" in answer(tab, "onnx-fp32", TOO_LONG, "short")["said"]
        assert "Write something" in answer(tab, "onnx-fp32", "one", " ")["said"]


def test_it_measures_what_the_commands_take(site: Path, tab: Tab, tmp_path: Path, edgeformer: Edgeformer) -> None:
    with served(site) as address:
        tab.open(address + SHORT)
        report = measure(tab, ["onnx-fp32", "onnx-int8-exit1"], "8, 16", title="a <b>phone</b>")
    assert {(row.artifact, row.phase, row.seq) for row in report.rows} == {
        (artifact, phase, seq)
        for artifact in ("onnx-fp32", "onnx-int8-exit1")
        for phase, seq in (("cold", 8), ("steady", 8), ("steady", 16))
    }
    assert {row.provider for row in report.rows} == {"wasm"} and {row.threads for row in report.rows} == {1}
    for row in report.rows:
        assert row.latency_ms.status == "measured" and row.latency_ms.p50 is not None
        assert (row.memory_bytes.status, row.energy_mj.status) == ("unavailable", "unavailable")
        assert row.memory_bytes.reason and row.energy_mj.reason
    cold, steady = report.rows[0], report.rows[1]
    assert cold.latency_ms.n == 1 and cold.load_ms is not None and cold.conditions["download_ms"] > 0
    assert cold.conditions["runtime_bytes"] > 10e6 and cold.conditions["download_bytes"] == 56904
    assert steady.conditions["clock_step_ms"] > 0 and steady.conditions["buffers"] == 8
    assert steady.latency_ms.n >= 30 and (steady.latency_ms.p99 is None) == (steady.latency_ms.n < 662)
    assert report.host["cross_origin_isolated"] is False and report.host["user_agent"]
    assert report.host["versions"]["onnxruntime-web"] and report.device_title == "a <b>phone</b>"
    assert tab.run("document.querySelectorAll('#table tbody tr').length") == 4
    assert tab.run("document.querySelectorAll('#pictures svg path').length") == 4
    # Shorter rules than the usual ones never pass for these.
    assert any("min_calls 30 instead of 100" in note for note in report.notes)
    assert all(not row.latency_ms.stable for row in report.rows if row.phase == "steady")
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(report.model_dump_json(), encoding="utf-8")
    judged = ("profile", str(tmp_path / "a.json"), "--device", "raspberry-pi-5", "--json")
    checks = json.loads(edgeformer(*judged))["verdict"]["checks"]
    statuses = {(one["name"], one["status"]) for one in checks}
    assert statuses == {("size", "pass"), ("latency", "unknown"), ("memory", "unknown")}
    edgeformer(*judged, "--max-size", "10KiB", code=3)
    compared = json.loads(edgeformer("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"))
    assert len(compared["rows"]) == len(report.rows)
    assert compared["a"]["measured_on"] == f"a <b>phone</b>, in {report.host['browser']}"


def test_an_isolated_page_has_threads_and_a_finer_clock(site: Path, tab: Tab) -> None:
    with served(site, ISOLATED) as address:
        tab.open(address + SHORT)
        cores = tab.run("navigator.hardwareConcurrency")
        report = measure(tab, ["onnx-fp32"], "8", threads=str(min(2, cores)))
    assert report.host["cross_origin_isolated"] is True
    assert report.rows[-1].threads == min(2, cores) and report.rows[-1].latency_ms.status == "measured"
    assert report.rows[-1].conditions["clock_step_ms"] < 0.05


def test_a_page_from_another_machine_without_https_works_and_says_what_it_lacks(site: Path, tab: Tab) -> None:
    with served(site) as address:
        tab.open(address.replace("127.0.0.1", ELSEWHERE) + SHORT)
        assert tab.run("isSecureContext") is False
        assert "https:// and localhost only" in tab.run("document.getElementById('providers').textContent")
        assert answer(tab, "onnx-int8", "fine")["label"] in ("negative", "positive")
    assert tab.complaints == []


def test_a_language_model_is_measured(libraries: Path, tab: Tab, tmp_path: Path) -> None:
    """Its weights lie beside the graph, and it takes no mask."""
    publish(Bundle.open(LANGUAGE), tmp_path / "site", PageOptions(libraries, providers=("wasm",)))
    with served(tmp_path / "site") as address:
        tab.open(address + SHORT)
        assert "answers no texts" in tab.run("document.getElementById('try').textContent")
        report = measure(tab, ["onnx-int8-exit2"], "16")
    assert {row.latency_ms.status for row in report.rows} == {"measured"}
    assert report.subject is not None and report.subject.task == "language-modeling"


def test_nothing_is_asked_for_but_its_own_files(site: Path, tab: Tab) -> None:
    with served(site) as address:
        tab.open(address)
        answer(tab, "onnx-fp32", "fine")
        assert all(request.startswith((address, "blob:", "data:")) for request in tab.requests)
        blocked = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
        assert tab.run(blocked) == "refused"
        assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_a_damaged_file_is_refused(site: Path, tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    graph = folder / "model" / "onnx" / "model.onnx"
    content = bytearray(graph.read_bytes())
    content[-10] ^= 1
    graph.write_bytes(content)
    with served(folder) as address:
        tab.open(address + SHORT)
        assert "checksum" in answer(tab, "onnx-fp32", "fine")["said"]
        report = measure(tab, ["onnx-fp32"], "8")
    (row,) = report.rows
    assert row.latency_ms.status == "unavailable" and "checksum" in str(row.latency_ms.reason)


def test_what_a_bundle_is_called_is_shown_and_not_obeyed(libraries: Path, tab: Tab, tmp_path: Path) -> None:
    hostile = "<img src=x onerror='window.hurt=1'>\u202e\x1b[31m"
    shutil.copytree(CLASSIFIER, tmp_path / "bundle")
    manifest = Bundle.open(tmp_path / "bundle").manifest
    seal(tmp_path / "bundle", manifest.model_copy(update={"run": hostile, "labels": (hostile, "b</script>")}))
    publish(Bundle.open(tmp_path / "bundle"), tmp_path / "site", PageOptions(libraries, ("onnx-fp32",), ("wasm",)))
    with served(tmp_path / "site") as address:
        tab.open(address + SHORT)
        assert "<img" in tab.run("document.querySelector('h1').textContent") and "<img" in tab.run("document.title")
        answer(tab, "onnx-fp32", "fine")
        shown = tab.run("document.getElementById('answer').textContent")
        assert "<img src=x" in shown and "\u202e" not in shown and "\x1b" not in shown
        assert measure(tab, ["onnx-fp32"], "8").run == hostile
        assert tab.run("document.querySelectorAll('img').length") == 0 and tab.run("window.hurt") is None


def modules(tab: Tab, expression: str) -> Any:
    """The value of an expression in which ``measure`` and ``inputs`` are the page's modules."""
    loaded = "Promise.all(['./measure.js', './inputs.js'].map((name) => import(new URL(name, location.href).href)))"
    return tab.run(f"{loaded}.then(([measure, inputs]) => {expression})")


def test_it_measures_and_summarises_as_profile_does(site: Path, tab: Tab) -> None:
    chance = np.random.default_rng(0)
    rules = json.loads((site / "site.json").read_text(encoding="utf-8"))["rules"]
    samples = [(chance.gamma(9, 0.3, n) * np.linspace(1, slope, n)).round(3).tolist() for n, slope in CASES]
    with served(site) as address:
        tab.open(address)
        told = f"(({json.dumps(samples)}).map((one) => [measure.summarise(one, true, [], null, {json.dumps(rules)}), "
        told += f"measure.drifted(one, {json.dumps(rules)}), measure.windowsAgree(one, {json.dumps(rules)})]))"
        found = modules(tab, told)
        golden = read_golden(CLASSIFIER / "golden.npz")
        rows = [row.tolist() for row in golden.texts()]
        for batch, seq in ((1, 4), (3, 60), (70, 16)):
            wanted = [buffer["input_ids"].tolist() for buffer in make_buffers(golden, batch, seq)]
            assert modules(tab, f"inputs.makeBuffers({json.dumps(rows)}, {batch}, {seq})") == wanted
    for sample, (latency, drift, agree) in zip(samples, found, strict=True):
        wanted = summarise(sample, True).model_dump(mode="json")
        for name, value in wanted.items():
            if name in ("low", "high"):  # of estimates
                continue
            numbers = isinstance(value, float) or name == "quantiles_ms"
            assert latency[name] == (pytest.approx(value, rel=1e-9) if numbers else value), name
        assert drift == drifted(sample, MeasureRules().window_tolerance)
        assert agree == windows_agree(sample, MeasureRules())


CASES = ((1, 1), (2, 1), (19, 3), (63, 1), (64, 1.3), (129, 1), (131, 2), (700, 1.01), (1000, 0.5))
"""Calls, and how much slower they become."""
