"""generate from a bundle: the text that torch writes, without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.bundle import Bundle, seal
from edgeformer.inference.generate import GenerateOptions, Generation, generate
from edgeformer.inference.predict import EarlyExit
from edgeformer.run import Location, locate
from edgeformer.tasks.sampling import Sampling
from tests.cli.run_cli import edgeformer
from tests.export.language_run import EXIT, LOOPS, exported_language_run
from tests.runtimes.tiny_bundle import write_bundle

PROMPT = "a warm film"
DRAWN = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=1.0, seed=3))
GREEDY = GenerateOptions(max_tokens=64, sampling=Sampling(temperature=0))
UNSURE = EarlyExit(start=0.018, floor=0.0, decay=1.0)  # of 300 words that are all about as likely


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_language_run(tmp_path_factory)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "artifacts" / "tiny"))


def at(folder: Path) -> Location:
    return locate(str(folder), folder.parent)


def keep_artifacts(run: Path, *ids: str) -> Path:
    manifest = Bundle.open(run / "bundle").manifest
    kept = tuple(artifact for artifact in manifest.artifacts if artifact.id in ids)
    seal(run / "bundle", manifest.model_copy(update={"artifacts": kept}))
    return run


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
@pytest.mark.parametrize(
    ("how", "artifact"),
    [({}, "onnx-fp32-decode"), ({"exit": LOOPS}, "onnx-fp32-decode"), ({"exit": EXIT}, "onnx-fp32-step"),
     ({"early": UNSURE}, "onnx-fp32-step"), ({"artifact": "onnx-fp32-step"}, "onnx-fp32-step")],
)  # fmt: skip
def test_writes_what_torch_writes(run: Path, options: GenerateOptions, how: dict[str, object], artifact: str) -> None:
    def written(**changes: object) -> Generation:
        return generate(at(run), PROMPT, dataclasses.replace(options, **{**how, **changes}))  # type: ignore[arg-type]

    found, expected = written(), written(artifact="torch")
    assert len(expected.tokens) == 64 or expected.stopped == "boundary"
    assert (found.tokens, found.loops, found.text) == (expected.tokens, expected.loops, expected.text)
    assert (found.artifact, found.provider) == (artifact, "CPUExecutionProvider")
    assert (expected.artifact, expected.provider) == ("torch", "torch-cpu")
    if how == {"early": UNSURE} and options is DRAWN:
        assert set(found.loops) == {EXIT, LOOPS}  # else it would show little


@pytest.mark.parametrize("id_", ["onnx-fp16-decode", "onnx-fp16-step", "onnx-int8-decode", "onnx-int8-step"])
def test_any_artifact_that_keeps_what_it_computed_can_be_asked_for(run: Path, id_: str) -> None:
    found = generate(at(run), PROMPT, dataclasses.replace(DRAWN, artifact=id_, max_tokens=8))
    assert found.artifact == id_ and len(found.tokens) == 8


def test_a_named_runtime_writes_the_same_or_is_refused(run: Path) -> None:
    options = dataclasses.replace(GREEDY, max_tokens=4)
    found = generate(at(run), PROMPT, dataclasses.replace(options, runtime="onnxruntime"))
    assert found.provider == "CPUExecutionProvider" and found.tokens == generate(at(run), PROMPT, options).tokens
    for runtime, said in (("torch-cpu", "does not open onnx-fp32-decode"), ("all", "name it"), ("fast", "no such")):
        with pytest.raises(InputError, match=f"--runtime {runtime}: .*{said}"):
            generate(at(run), PROMPT, dataclasses.replace(options, runtime=runtime))


def test_a_file_of_the_bundle_stands_for_its_artifact(run: Path) -> None:
    for file in ("step_loop_fp16.onnx", "step_embed_fp16.onnx"):
        location = locate(str(run / "bundle" / "onnx" / file), run.parent)
        assert generate(location, PROMPT, dataclasses.replace(DRAWN, max_tokens=2)).artifact == "onnx-fp16-step"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["onnx"] = sys.modules["safetensors"] = None
from edgeformer.cli import main
main()
"""


@pytest.mark.parametrize("flags", [(), ("--exit", str(EXIT)), ("--confidence", "--threshold", "0.018", "--floor", "0")])
def test_a_bundle_by_itself_needs_no_torch(run: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    shutil.copytree(run / "bundle", tmp_path / "device")
    arguments = ["generate", "device", PROMPT, "--seed", "3", "--json", *flags]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    early = UNSURE if "--confidence" in flags else None
    options = dataclasses.replace(DRAWN, exit=EXIT if "--exit" in flags else None, early=early, artifact="torch")
    expected = generate(at(run), PROMPT, options)
    assert document["tokens"] == list(expected.tokens) and document["loops"] == list(expected.loops)
    assert document["provider"] == "CPUExecutionProvider" and document["artifact"].startswith("onnx-fp32-")


class TestWhatIsMissing:
    def test_step_graphs(self, copied: Path) -> None:
        keep_artifacts(copied, "onnx-fp32", "onnx-fp32-decode")
        assert generate(at(copied), PROMPT, GREEDY).artifact == "onnx-fp32-decode"
        for how in ({"exit": EXIT}, {"early": UNSURE}):
            options = dataclasses.replace(GREEDY, **how)  # type: ignore[arg-type]
            with pytest.raises(ArtifactError, match=r"need the step graphs.* edgeformer export tiny --exit all"):
                generate(at(copied), PROMPT, options)
            assert generate(at(copied), PROMPT, dataclasses.replace(options, artifact="torch")).artifact == "torch"

    def test_decode_graph(self, copied: Path) -> None:
        keep_artifacts(copied, "onnx-fp32-step", "onnx-fp16-decode")
        assert generate(at(copied), PROMPT, GREEDY).artifact == "onnx-fp32-step"

    def test_fp32(self, copied: Path) -> None:
        keep_artifacts(copied, "onnx-fp32", "onnx-fp16-step", "onnx-fp16-decode")
        assert generate(at(copied), PROMPT, GREEDY).artifact == "onnx-fp16-decode"

    def test_both(self, copied: Path, tmp_path: Path) -> None:
        keep_artifacts(copied, "onnx-fp32", "onnx-fp16")
        assert generate(at(copied), PROMPT, GREEDY).artifact == "torch"
        alone = Path(shutil.copytree(copied / "bundle", tmp_path / "device"))
        with pytest.raises(ArtifactError, match=r"no graphs that write text; .* edgeformer export RUN --exit all"):
            generate(at(alone), PROMPT, GREEDY)

    def test_the_bundle(self, copied: Path) -> None:
        shutil.rmtree(copied / "bundle")
        assert generate(at(copied), PROMPT, GREEDY).artifact == "torch"
        with pytest.raises(
            InputError, match="--artifact onnx-fp32-step: tiny has no bundle; make one with: edgeformer"
        ):
            generate(at(copied), PROMPT, dataclasses.replace(GREEDY, artifact="onnx-fp32-step"))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"artifact": "onnx-fp32"}, "reads whole texts and keeps nothing of earlier tokens"),
            ({"artifact": "nothing"}, "tiny writes with onnx-fp32-decode, onnx-fp32-step, .*, torch"),
            (
                {"artifact": "onnx-fp32-decode", "exit": EXIT},
                "takes all loops for every token; .* need a step artifact",
            ),
            ({"exit": 9}, "--exit 9: tiny has exits after the loops 1, 2"),
            ({"max_tokens": 90}, "the model takes at most 80"),
        ],
    )
    def test_what_does_not_go_together(self, run: Path, changes: dict[str, object], message: str) -> None:
        with pytest.raises(InputError, match=message):
            generate(at(run), PROMPT, dataclasses.replace(GREEDY, **changes))  # type: ignore[arg-type]

    def test_a_bundle_that_leaks(self, copied: Path) -> None:
        manifest = Bundle.open(copied / "bundle").manifest
        seal(copied / "bundle", manifest.model_copy(update={"leaks": True}))
        with pytest.raises(InputError, match="tiny: leaks future tokens, so it cannot write"):
            generate(at(copied), PROMPT, GREEDY)

    def test_a_classifiers_bundle(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is a classifier and writes no text; use: edgeformer predict"):
            generate(at(write_bundle(tmp_path / "bundle")), PROMPT, GREEDY)

    @pytest.mark.parametrize("file", ["onnx/decode.onnx", "onnx/model.onnx_data", "tokenizer.json", "config.json"])
    def test_a_damaged_file(self, copied: Path, file: str) -> None:
        path = copied / "bundle" / file
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ArtifactError, match=f"{path.name}: changed since it was exported"):
            generate(at(copied), PROMPT, GREEDY)


def test_the_command(run: Path) -> None:
    folder = run.parent
    arguments = ("generate", str(run), PROMPT, "--temperature", "0", "--max-tokens", "4", "--artifact")
    outcome = edgeformer(*arguments, "onnx-fp16-step", cwd=folder)
    assert outcome.code == 0 and outcome.out.startswith(PROMPT)
    assert "2.00 loops per token" in outcome.err and "on CPUExecutionProvider, onnx-fp16-step]" in outcome.err
    outcome = edgeformer(*arguments, "onnx-fp32", cwd=folder)
    assert outcome.code == 2 and outcome.out == "" and "Traceback" not in outcome.err
    assert "edgeformer export tiny --exit all" in " ".join(outcome.err.split())
