"""The page in headless Chromium: same answers as `predict`, a measured report, no network, escaped text."""

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.golden import read_golden
from edgeformer.artifacts.report import MeasureRules, Report
from edgeformer.bundle import Bundle, seal
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.predict import predict
from edgeformer.inference.sampling import Sampling
from edgeformer.measurement.trackers import drifted, summarise, windows_agree
from edgeformer.models import load_recipe
from edgeformer.run import locate
from edgeformer.tasks import get_task
from edgeformer.tasks.scoring import TextPredictor
from edgeformer.training.train import TrainOptions, train
from edgeformer.web import PageOptions, publish
from tests.docs.test_deploy import SENTENCES, TOO_LONG
from tests.web.browser import CLASSIFIER, ELSEWHERE, LANGUAGE, Tab, served

pytestmark = pytest.mark.node
ISOLATED = {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Embedder-Policy": "require-corp"}
SMALL_LINEAR = [
    "data={parts: {train: [{kind: synthetic-reviews, rows: 600, seed: 3}]}, split: random-split, "
    "labels: [negative, positive], max_length: 32}"
]
SHORT = "?min_s=0.05&min_calls=30&warmup_max_s=0.5"


def submit(tab: Tab, ready: str, **values: object) -> None:
    """Fill in the form for a text, press the button, and wait for the answer."""
    tab.run(
        f"""(() => {{
          const [form, answer] = [document.querySelector("#try form"), document.getElementById("answer")];
          for (const [name, value] of Object.entries({json.dumps(values)})) form.elements[name].value = value;
          answer.replaceChildren();
          delete answer.dataset.state;
          form.requestSubmit();
        }})()"""
    )
    tab.wait(f"({ready}) && !document.querySelector('#try button').disabled")


def answer(tab: Tab, artifact: str, text: str, pair: str = "") -> dict[str, Any]:
    submit(tab, "document.querySelector('#answer dl, #answer .caution')", artifact=artifact, text=text, pair=pair)
    displayed: dict[str, Any] = tab.run(
        """(() => {
          const place = document.getElementById("answer");
          const [labels, shares] = ["dt", "dd"].map((name) => [...place.querySelectorAll(name)]);
          return {
            probabilities: Object.fromEntries(
              labels.map((one, index) => [one.textContent, Number(shares[index].dataset.probability)])),
            label: place.dataset.label,
            message: place.querySelector("p").textContent,
          };
        })()"""
    )
    return displayed


def measure(tab: Tab, artifacts: Sequence[str], seqs: str = "8, 16", **values: str) -> Report:
    """Fill in the form, press the button, and return the report that is offered."""
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


@pytest.mark.slow
def test_page_answers_as_predict_does_and_requests_nothing_else(site: Path, tab: Tab) -> None:
    texts = [*SENTENCES, TOO_LONG]
    full_length = len(Bundle.open(CLASSIFIER).reader().tokenizer.encode(TOO_LONG).ids)
    with served(tab, site) as address:
        for artifact in ("onnx-fp32", "onnx-int8"):
            # One text per call for INT8: the rows of a call share the scale of their activations.
            calls = [texts] if artifact == "onnx-fp32" else [[text] for text in texts]
            location = locate(str(CLASSIFIER), CLASSIFIER)
            expected: list[Any] = [prediction for call in calls for prediction in predict(location, call, artifact)[1]]
            for text, prediction in zip(texts, expected, strict=True):
                displayed = answer(tab, artifact, text)
                assert displayed["label"] == prediction.label, (artifact, text)
                expected_shares = pytest.approx(prediction.probabilities, abs=1e-5)
                assert displayed["probabilities"] == expected_shares, (artifact, text)
                assert prediction.truncated == displayed["message"].startswith("Cut: "), text
            message = displayed["message"]
            assert f"read 48 of {full_length} tokens" in message and "did not count" in message
        assert tab.complaints == []
        text = SENTENCES[0]
        for artifact in ("onnx-int8-exit1", "onnx-int8-trim", "onnx-fp16"):
            prediction: Any = predict(locate(str(CLASSIFIER), CLASSIFIER), [text], artifact)[1][0]
            assert answer(tab, artifact, text)["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-4)
        assert "no label" in answer(tab, "onnx-fp32", "  ")["message"]
        assert all(request.startswith((address, "blob:", "data:")) for request in tab.requests)
        assert tab.run("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
        assert any("Content Security Policy" in complaint for complaint in tab.complaints)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["words", "characters"])
def test_linear_model_answers_as_predict_does(algorithm: str, libraries: Path, tab: Tab, tmp_path: Path) -> None:
    """Words by Unicode classes, and integer arithmetic, in another library each."""
    changes = [*SMALL_LINEAR, f"tokenizer.algorithm={algorithm}"]
    folder = train(load_recipe("linear_sst2", changes), TrainOptions(tmp_path, name="linear"))
    export(folder, ExportOptions(int8=True))
    publish(Bundle.open(folder / "bundle"), tmp_path / "site", PageOptions(libraries))
    texts = [*SENTENCES, "It broke… “Schöne” Grüße!!! 😡👍🏽 漢字 don't-buy <b>x</b>", "a\u00a0b\u2028c\u200bd e\u0301"]
    with served(tab, tmp_path / "site"):
        for artifact in ("onnx-fp32", "onnx-int8"):
            expected: list[Any] = [*predict(locate("linear", tmp_path), texts, artifact)[1]]
            for text, prediction in zip(texts, expected, strict=True):
                displayed = answer(tab, artifact, text)
                assert displayed["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5), text
    assert tab.complaints == []


@pytest.mark.slow
def test_spans_are_marked_as_predict_finds_them(libraries: Path, tab: Tab, tmp_path: Path) -> None:
    """In a text of emoji and accents, and in one that is longer than the model reads at once."""
    pytest.importorskip("transformers")
    from tests.export.hf_models import token_classifier

    run = token_classifier(tmp_path)
    bundle = Bundle.open(run / "bundle")
    publish(bundle, tmp_path / "site", PageOptions(libraries))
    texts = ["Zoë 👩‍💻\nmet Jose\u0301 in Köln.", "The bridge of the town was made of wood. " * 5]
    expected: list[Any] = predict(locate(str(run), run.parent), texts, "onnx-fp32")[1]
    with served(tab, tmp_path / "site"):
        for text, prediction in zip(texts, expected, strict=True):
            submit(tab, "document.querySelector('#answer .spans')", artifact="onnx-fp32", text=text)
            marks = tab.run(
                """[...document.querySelectorAll("#answer mark")].map(({ dataset, firstChild }) =>
                  [Number(dataset.start), Number(dataset.end), dataset.label, firstChild.textContent])"""
            )
            spans = [[span.start, span.end, span.label, span.text] for span in prediction.spans]
            assert marks == spans and len(spans) > 1, text
            whole = tab.run("document.querySelector('#answer .spans').innerText")
            assert whole.startswith(text[: spans[0][0]])
    assert tab.complaints == []


def test_pairs_and_several_labels(site: Path, tab: Tab, tmp_path: Path) -> None:
    """The page's manifest, changed by hand: two texts at a time, and a threshold for each label."""
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    manifest = json.loads((folder / "site.json").read_text(encoding="utf-8"))
    manifest |= {"pairs": True, "thresholds": {"negative": 0.9, "positive": 0.1}}
    (folder / "site.json").write_text(json.dumps(manifest), encoding="utf-8")
    bundle = Bundle.open(CLASSIFIER)
    entry = bundle.manifest.artifacts[0]
    pair = ("the staff was friendly", "the food was bad")
    answering = TextPredictor(bundle.task, bundle.reader(entry), bundle.data)  # `predict` gives this model no pairs
    window = answering.read([pair])
    with bundle.session(entry) as session:
        prediction: Any = answering.answers(window, answering.run(session.run, window))[0]
    with served(tab, folder):
        displayed = answer(tab, "onnx-fp32", *pair)
        assert displayed["label"] == "positive" and "tokens read" in displayed["message"]
        # The softmax of two logits depends on their difference only.
        logits = {name: np.log(p / (1 - p)) for name, p in displayed["probabilities"].items()}
        share = 1 / (1 + np.exp(logits["positive"] - logits["negative"]))
        assert share == pytest.approx(prediction.probabilities["negative"], abs=1e-5)
        assert "Shorten them" in answer(tab, "onnx-fp32", TOO_LONG, "short")["message"]
        assert "Write something" in answer(tab, "onnx-fp32", "one", " ")["message"]


@pytest.mark.slow
def test_measured_report_is_accepted_by_profile_and_compare(site, tab, tmp_path, edgeformer):
    with served(tab, site, SHORT):
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
    opened, called = (row.conditions.model_dump() for row in (cold, steady))
    assert cold.latency_ms.n == 1 and cold.load_ms is not None and opened["download_ms"] > 0
    assert opened["runtime_bytes"] > 10e6 and opened["download_bytes"] == 56904
    assert called["clock_step_ms"] > 0 and called["buffers"] == 8
    assert steady.latency_ms.n >= 30 and (steady.latency_ms.p99 is None) == (steady.latency_ms.n < 662)
    assert report.host["cross_origin_isolated"] is False and report.host["user_agent"]
    assert report.host["versions"]["onnxruntime-web"] and report.device_title == "a <b>phone</b>"
    assert tab.run("document.querySelectorAll('#table tbody tr').length") == 4
    assert tab.run("document.querySelectorAll('#pictures svg path').length") == 4
    # A report says when its rules were shorter than the defaults.
    assert any("min_calls 30 instead of 100" in note for note in report.notes)
    assert all(not row.latency_ms.stable for row in report.rows if row.phase == "steady")
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(report.model_dump_json(), encoding="utf-8")
    judged = ("profile", str(tmp_path / "a.json"), "--device", "raspberry-pi-5", "--json")
    checks = json.loads(edgeformer(*judged))["verdict"]["checks"]
    statuses = {(check["name"], check["status"]) for check in checks}
    assert statuses == {("size", "pass"), ("latency", "unknown"), ("memory", "unknown")}
    edgeformer(*judged, "--max-size", "10KiB", code=3)
    compared = json.loads(edgeformer("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"))
    assert len(compared["rows"]) == len(report.rows)
    assert compared["a"]["measured_on"] == f"a <b>phone</b>, in {report.host['browser']}"


@pytest.mark.slow
def test_isolated_page_has_threads_and_an_insecure_page_works(site: Path, tab: Tab) -> None:
    with served(tab, site, SHORT, ISOLATED):
        cores = tab.run("navigator.hardwareConcurrency")
        report = measure(tab, ["onnx-fp32"], "8", threads=str(min(2, cores)))
    assert report.host["cross_origin_isolated"] is True
    assert report.rows[-1].threads == min(2, cores) and report.rows[-1].latency_ms.status == "measured"
    assert report.rows[-1].conditions.model_dump()["clock_step_ms"] < 0.05
    with served(tab, site, SHORT, host=ELSEWHERE):
        assert tab.run("isSecureContext") is False
        assert "https:// and localhost only" in tab.run("document.getElementById('providers').textContent")
        assert answer(tab, "onnx-int8", "fine")["label"] in ("negative", "positive")
    assert tab.complaints == []


@pytest.fixture(scope="module")
def language_site(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a language model. Read it only."""
    folder = tmp_path_factory.mktemp("language") / "site"
    publish(Bundle.open(LANGUAGE), folder, PageOptions(libraries, providers=("wasm",)))
    return folder


@pytest.mark.slow
def test_language_model_is_measured(language_site: Path, tab: Tab) -> None:
    """It has external weights and takes no mask."""
    with served(tab, language_site, SHORT):
        report = measure(tab, ["onnx-int8-exit2"], "16")
    assert {row.latency_ms.status for row in report.rows} == {"measured"}
    assert report.subject is not None and report.subject.task == "language-modeling"


def written(tab: Tab, artifact: str, text: str, tokens: int, temperature: float = 0) -> dict[str, str]:
    """Return what was written, and the line below it."""
    done = "document.getElementById('answer').dataset.state === 'done' || document.querySelector('#answer .caution')"
    submit(tab, done, artifact=artifact, text=text, tokens=tokens, temperature=temperature)
    answer: dict[str, str] = tab.run(
        """(() => {
          const [line, note] = document.getElementById("answer").children;
          return { text: line.textContent, prompt: line.firstChild.textContent, note: note.textContent };
        })()"""
    )
    return answer


@pytest.mark.slow
def test_language_model_writes_as_generate_does(language_site: Path, tab: Tab) -> None:
    """Caches of attention and convolutions, in every precision; greedily the same text, and it can be stopped."""
    writers = ["onnx-fp32-decode", "onnx-int8-decode", "onnx-fp16-decode"]
    location, greedy = locate(str(LANGUAGE), LANGUAGE), Sampling(temperature=0)
    with served(tab, language_site) as address:
        options = tab.run("[...document.querySelector('#try form').artifact.options].map(({ value }) => value)")
        assert options == writers and "decode" not in tab.run("document.getElementById('artifacts').textContent")
        for artifact, prompt in itertools.product(writers, ("a warm film", "", "Käse 👩‍🚀 don't")):
            expected = generate(location, prompt, GenerateOptions(max_tokens=12, sampling=greedy, artifact=artifact))
            displayed = written(tab, artifact, prompt, 12)
            assert displayed["prompt"] == prompt and displayed["text"] == prompt + expected.text, (artifact, prompt)
            counts = [f"{n} token{'s' * (n > 1)}" for n in (len(expected.tokens), expected.prompt_tokens)]
            assert displayed["note"].startswith("; ".join(counts) + " read in"), (artifact, prompt)
        assert "Shorten it" in written(tab, "onnx-fp32-decode", "a b " * 60, 5)["note"]
        assert written(tab, "onnx-fp32-decode", "a", 5, temperature=1.5)["text"].startswith("a")
        assert all(request.startswith((address, "blob:", "data:")) for request in tab.requests)
    assert tab.complaints == []


def test_writing_can_be_stopped(language_site: Path, tab: Tab) -> None:
    """The second press of the button arrives while the model is opened, so the text ends after its first token."""
    with served(tab, language_site):
        for _ in range(2):
            tab.run("document.querySelector('#try form').requestSubmit()")
        tab.wait("document.getElementById('answer').dataset.state === 'done'")
        assert tab.run("document.querySelector('#answer').lastElementChild.textContent").startswith("1 token; 1 token ")
        assert tab.run("document.querySelector('#try button').textContent") == "Write"
        assert "tokens; 2 tokens read" in written(tab, "onnx-fp32-decode", "a", 9)["note"]
    assert tab.complaints == []


def test_damaged_file_is_refused(site: Path, tab: Tab, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(site, folder)
    graph = folder / "model" / "onnx" / "model.onnx"
    content = bytearray(graph.read_bytes())
    content[-10] ^= 1
    graph.write_bytes(content)
    with served(tab, folder, SHORT):
        assert "checksum" in answer(tab, "onnx-fp32", "fine")["message"]
        report = measure(tab, ["onnx-fp32"], "8")
    (row,) = report.rows
    assert row.latency_ms.status == "unavailable" and "checksum" in str(row.latency_ms.reason)


def test_names_are_escaped(libraries: Path, tab: Tab, tmp_path: Path) -> None:
    hostile = "<img src=x onerror='window.hurt=1'>\u202e\x1b[31m"
    shutil.copytree(CLASSIFIER, tmp_path / "bundle")
    manifest = Bundle.open(tmp_path / "bundle").manifest
    seal(tmp_path / "bundle", manifest.model_copy(update={"run": hostile, "labels": (hostile, "b</script>")}))
    publish(Bundle.open(tmp_path / "bundle"), tmp_path / "site", PageOptions(libraries, ("onnx-fp32",), ("wasm",)))
    with served(tab, tmp_path / "site", SHORT):
        assert "<img" in tab.run("document.querySelector('h1').textContent") and "<img" in tab.run("document.title")
        answer(tab, "onnx-fp32", "fine")
        text = tab.run("document.getElementById('answer').textContent")
        assert "<img src=x" in text and "\u202e" not in text and "\x1b" not in text
        assert measure(tab, ["onnx-fp32"], "8").run == hostile
        assert tab.run("document.querySelectorAll('img').length") == 0 and tab.run("window.hurt") is None


def modules(tab: Tab, expression: str) -> Any:
    """Return the value of an expression; ``measure`` and ``inputs`` are modules of the page."""
    loaded = "Promise.all(['./measure.js', './inputs.js'].map((name) => import(new URL(name, location.href).href)))"
    return tab.run(f"{loaded}.then(([measure, inputs]) => {expression})")


def test_page_summarises_samples_as_profile_does(site: Path, tab: Tab) -> None:
    random = np.random.default_rng(0)
    rules = json.loads((site / "site.json").read_text(encoding="utf-8"))["rules"]
    # Number of calls, and the factor by which they slow down.
    cases = ((1, 1), (2, 1), (19, 3), (63, 1), (64, 1.3), (129, 1), (131, 2), (700, 1.01), (1000, 0.5))
    samples = [(random.gamma(9, 0.3, n) * np.linspace(1, slope, n)).round(3).tolist() for n, slope in cases]
    with served(tab, site):
        calls = ("measure.summarise(sample, true, [], null, rules)", "measure.drifted(sample, rules)",
                 "measure.windowsAgree(sample, rules)")  # fmt: skip
        arguments = f"({json.dumps(samples)}, {json.dumps(rules)})"
        expression = f"((samples, rules) => samples.map((sample) => [{', '.join(calls)}])){arguments}"
        summaries = modules(tab, expression)
        golden = read_golden(CLASSIFIER / "golden.npz")
        rows = [row.tolist() for row in golden.texts()]
        for batch, seq in ((1, 4), (3, 60), (70, 16)):
            expected = [
                buffer["input_ids"].tolist() for buffer in get_task("classification").calls(golden, {}, (batch, seq), 8)
            ]
            assert modules(tab, f"inputs.makeBuffers({json.dumps(rows)}, {batch}, {seq})") == expected
    for sample, (latency, drift, agree) in zip(samples, summaries, strict=True):
        expected = summarise(sample, True).model_dump(mode="json")
        for name, value in expected.items():
            if name in ("low", "high", "check"):  # of estimates
                continue
            is_number = isinstance(value, float) or name == "quantiles_ms"
            assert latency[name] == (pytest.approx(value, rel=1e-9) if is_number else value), name
        assert drift == drifted(sample, MeasureRules().window_tolerance)
        assert agree == windows_agree(sample, MeasureRules())
