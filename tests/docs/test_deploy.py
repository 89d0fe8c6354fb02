"""The programs of docs/guides/deploy.md run as they stand, and answer as `edgeformer predict` does."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.predict import predict
from edgeformer.run import locate, read_run
from edgeformer.tasks.task import Answer
from tests.docs.document import programs
from tests.tasks.tiny import train_tiny
from tests.web.browser import npm_install

PROGRAMS = programs(Path(__file__).resolve().parents[2] / "docs" / "guides" / "deploy.md")
# As tried; another version is no reason for a test to fail on a day when nothing of ours changed.
PACKAGES = ("onnxruntime-node@1.30.0", "@huggingface/tokenizers@0.2.0", "@huggingface/transformers@4.3.1")
PROBABILITY = 1e-4

PIECES = (
    "the food was good", "The staff was RUDE!!!", "not bad at all...", "<br /><br />", "<b>great</b>", "i <3 it",
    "a < b > c", "see http://x.org/a?b=1, (www.y.de) now", "HTTPS://X.ORG.", "awww.so cute", "café naïve Ångström",
    "e\u0301", "ﬁne ½ ①", "日本の料理", "とても美味しい", "한국어", "Привет", "ΟΔΟΣ", "İstanbul", "ẞ", "🙂🙂", "👩‍👩‍👧",
    "‘quoted’ “text” – dash…", "don't can't", "[SEP] [MASK]", "[CLS", "\ufeff", "\u00a0\u2003", "tab\tand\r\nline",
    "-- `` ''", "?!?!", "9/10", "$5.00", "x" * 120, "\u200d", "\x00",
)  # fmt: skip
SENTENCES = (
    "the food was good and the staff was friendly",
    "not my kind of place, the service was slow",
    *(f"{piece} but overall the food was not good" for piece in PIECES[1:10]),
    *(f"great place {piece} i will come back" for piece in PIECES[10:19]),
)
TOO_LONG = "the food was good and " * 60 + "the staff was rude"


@pytest.fixture(scope="module")
def bundle(finished_run: Path) -> Path:
    return finished_run / "bundle"


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose texts can have several labels, one of which is given at a low threshold."""
    folder, labels = tmp_path_factory.mktemp("several"), ("food", "staff", '"food,staff"', "")
    rows = (f'"{row.text}",{labels[number % 4]}\n' for number, row in enumerate(synthetic_reviews(200, 0)))
    (folder / "topics.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    data = {"split": "given", "labels": ["food", "staff"], "label_separator": ",", "max_length": 16}
    source = {"kind": "file", "path": str(folder / "topics.csv")}
    data["parts"] = {part: [dict(source)] for part in ("train", "validation", "test")}
    data["thresholds"] = {"food": 0.2, "staff": 0.5}
    run = train_tiny(folder, "multi-label-classification", data, epochs=1)
    export(run, ExportOptions())
    return run / "bundle"


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the document's JavaScript programs and the npm packages that they name."""
    folder = tmp_path_factory.mktemp("node")
    npm_install(folder, *PACKAGES, ONNXRUNTIME_NODE_INSTALL_CUDA="skip")
    for name, program in PROGRAMS.items():
        if name.endswith(".mjs"):
            (folder / name).write_text(program, encoding="utf-8")
    return folder


def run(*command: str | Path, cwd: Path) -> list[dict[str, object]]:
    """What a program prints: a JSON document per line."""
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120}
    done = subprocess.run([*map(str, command)], cwd=cwd, check=False, **options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def expected(bundle: Path, texts: Sequence[str], artifact: str = "onnx-fp32") -> list[Answer]:
    return predict(locate(str(bundle), bundle), texts, artifact)[1]


def same(answers: list[dict[str, object]], expected: list[Answer]) -> None:
    assert [row["text"] for row in answers] == [prediction.text for prediction in expected]
    assert [row["label"] for row in answers] == [prediction.label for prediction in expected]
    assert [row["probability"] for row in answers] == pytest.approx([p.probability for p in expected], abs=PROBABILITY)


def same_labels(answers: list[dict[str, object]], bundle: Path) -> None:
    target = [answer.as_dict() for answer in expected(bundle, SENTENCES[:4])]
    assert [row["label"] for row in answers] == [answer["label"] for answer in target]
    assert all("food" in str(answer["label"]) for answer in target)  # the low threshold is reached, 0.5 may not be
    assert [row["probability"] for row in answers] == pytest.approx([p["probability"] for p in target], abs=PROBABILITY)


def test_the_programs_and_the_sentences(bundle: Path) -> None:
    """Every program of the document is run here, on sentences of both labels."""
    assert set(PROGRAMS) == {"client.py", "client.mjs", "pipeline.mjs", "weights.py"}
    assert len(SENTENCES) == 20 == len(set(SENTENCES))
    assert {prediction.label for prediction in expected(bundle, SENTENCES)} == {"negative", "positive"}


def test_python(bundle: Path, tmp_path: Path) -> None:
    assert "import edgeformer" not in PROGRAMS["client.py"] and "from edgeformer" not in PROGRAMS["client.py"]
    (tmp_path / "client.py").write_text(PROGRAMS["client.py"], encoding="utf-8")
    texts = [*SENTENCES, TOO_LONG]
    same(run(sys.executable, "client.py", bundle, *texts, cwd=tmp_path), expected(bundle, texts))


@pytest.mark.slow
def test_python_of_several_labels(several: Path, tmp_path: Path) -> None:
    config = json.loads((several / "config.json").read_text(encoding="utf-8"))
    manifest = json.loads((several / "bundle.json").read_text(encoding="utf-8"))
    assert config["thresholds"] == manifest["data"]["thresholds"] == {"food": 0.2, "staff": 0.5}
    (tmp_path / "client.py").write_text(PROGRAMS["client.py"], encoding="utf-8")
    same_labels(run(sys.executable, "client.py", several, *SENTENCES[:4], cwd=tmp_path), several)


@pytest.mark.slow
@pytest.mark.node
def test_onnxruntime_node_of_several_labels(several: Path, node: Path) -> None:
    same_labels(run("node", "client.mjs", several, *SENTENCES[:4], cwd=node), several)


@pytest.mark.slow
def test_torch(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text(PROGRAMS["weights.py"], encoding="utf-8")
    (parameters,) = run(sys.executable, "weights.py", finished_run, cwd=tmp_path)
    assert parameters == read_run(finished_run).parameters


@pytest.mark.slow
@pytest.mark.node
def test_onnxruntime_node(bundle: Path, node: Path) -> None:
    texts = [*SENTENCES, TOO_LONG]
    same(run("node", "client.mjs", bundle, *texts, cwd=node), expected(bundle, texts))


@pytest.mark.node
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_transformers_js(bundle: Path, node: Path, precision: str) -> None:
    program = PROGRAMS["pipeline.mjs"]
    assert '"fp32"' in program
    (node / "chosen.mjs").write_text(program.replace('"fp32"', f'"{precision}"'), encoding="utf-8")
    same(run("node", "chosen.mjs", bundle, *SENTENCES, cwd=node), expected(bundle, SENTENCES, f"onnx-{precision}"))


@pytest.mark.node
@pytest.mark.slow
def test_transformers_js_opens_int8_and_the_trimmed_repository(finished_run: Path, node: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("bundle"))
    export(tmp_path / "run", ExportOptions(int8=True, vocab_trim=True))
    bundle = tmp_path / "run" / "bundle"
    (node / "int8.mjs").write_text(PROGRAMS["pipeline.mjs"].replace('"fp32"', '"int8"'), encoding="utf-8")
    # One by one: rows of an INT8 call share the scale of their activations.
    for folder, artifact in ((bundle, "onnx-int8"), (bundle / "trimmed", "onnx-int8-trim")):
        for text in SENTENCES[:3]:
            same(run("node", "int8.mjs", folder, text, cwd=node), expected(bundle, [text], artifact))


@pytest.mark.node
def test_javascript_makes_the_same_tokens(bundle: Path, node: Path) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices((*PIECES, " ", " a "), k=chance.randrange(1, 9))) for _ in range(500)]
    (node / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    (node / "tokens.mjs").write_text(
        """
        import { readFileSync } from "node:fs";
        import { Tokenizer } from "@huggingface/tokenizers";
        const [tokens, limits, texts] = process.argv.slice(2).map((name) => JSON.parse(readFileSync(name)));
        const tokenizer = new Tokenizer(tokens, limits);
        for (const text of texts) console.log(JSON.stringify(tokenizer.encode(text).ids));
        """,
        encoding="utf-8",
    )
    files = [bundle / "tokenizer.json", bundle / "tokenizer_config.json", node / "texts.json"]
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    target = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    assert run("node", "tokens.mjs", *files, cwd=node) == target


def test_the_image_is_slim_and_has_no_rights() -> None:
    lines = (Path(__file__).resolve().parents[2] / "docs" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    last = steps[max(number for number, (name, _) in enumerate(steps) if name == "FROM") :]
    names = [name for name, _ in last]
    assert all("-slim" in rest for name, rest in steps if name == "FROM")
    assert int(dict(last)["USER"].split(":")[0]) > 0 and names.index("USER") > names.index("RUN")
    assert "/healthz" in dict(last)["HEALTHCHECK"] and "[serve]" in " ".join(rest for _, rest in steps)
    command = json.loads(dict(last)["ENTRYPOINT"])
    assert command[:2] == ["edgeformer", "serve"] and command[-2:] == ["--host", "0.0.0.0"]
