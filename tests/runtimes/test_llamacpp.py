"""GGUF files: their bytes whatever the loops, and that llama.cpp answers, writes and tokenises as torch does."""

import io
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle
from edgeformer.data.encoding import PlainText
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.inference.generate import GenerateOptions, Writer, generate
from edgeformer.inference.sampling import Sampling
from edgeformer.inference.verify import verify
from edgeformer.models.weights import load_model
from edgeformer.report.tables import artifact_table
from edgeformer.run import locate
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.llamacpp import library as llama_library
from edgeformer.runtimes.llamacpp.builder import GGUFBuilder, write_gguf
from edgeformer.runtimes.onnxruntime.providers import CPU
from edgeformer.runtimes.runtime import BuildJob, Target
from tests.export.language_models import HAS_LLAMA_CPP
from tests.export.language_run import POSITIONS, language_recipe, write_language_run
from tests.measurement.measuring_child import RULES

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_LLAMA_CPP, reason="the extra llamacpp is not installed")]

SIZES: dict[str, Any] = {
    "kind": "decoder", "hidden_size": 64, "layers": 2, "iterations": 3, "heads": 4, "kv_heads": 2, "ffn_size": 96,
}  # fmt: skip
TEXTS = [
    "The staff was friendly, but it's 12.50 €!", "  two  spaces\n\nand lines\t", "naïve – 日本語 🙂🏽 e\u0301",
    "don't we'll",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_language_run(tmp_path_factory.mktemp("gguf") / "looped", language_recipe(**SIZES))
    export(run, ExportOptions(fp16=True, int8=True, int4=True, build=("gguf",), keep_going=True))
    return run


@pytest.fixture(scope="module")
def bundle(run: Path) -> Bundle:
    return Bundle.open(run / "bundle")


def test_every_precision_is_a_file_for_whole_texts_and_for_writing(bundle: Bundle) -> None:
    console = Console(file=io.StringIO(), width=400)
    console.print(artifact_table(bundle.manifest))
    table = console.file.getvalue()
    entries = {artifact.id: artifact for artifact in bundle.artifacts if artifact.format == "gguf"}
    verified = {check.artifact for check in verify(bundle).artifacts if check.status == "verified"}
    assert entries.keys() <= verified
    assert {*entries} == {f"gguf-{p}{role}" for p in ("fp16", "int8", "int4") for role in ("", "-decode")}
    for entry in entries.values():
        assert entry.status == "built" and entry.parity is not None and entry.parity.status == "measured"
        assert entry.sharing is not None and entry.sharing.stored_parameters == bundle.manifest.parameters
        assert entry.sharing.resident_bytes
        assert format_bytes(entry.sharing.resident_bytes) in table
    sizes = [entries[f"gguf-{precision}"].size_bytes or 0 for precision in ("fp16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


def written(folder: Path, **changes: Any) -> tuple[torch.nn.Module, Path]:
    """A model with random weights, and its GGUF file in FP16, without an export."""
    run, path = write_language_run(folder, language_recipe(**{**SIZES, **changes})), folder / "model.gguf"
    model: Any = load_model(run)
    write_gguf(path, run / "model", model.gguf_contents(), "fp16")
    return model, path


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"tied": False, "head_size": 32}, {"iterations": 1, "exits": []},
        {"iterations": 1, "exits": [], "qkv_bias": True}, {"iterations": 1, "exits": [], "qk_norm": True},
    ],
    ids=["looped", "looped, head of its own", "llama", "qwen2", "qwen3"],
)  # fmt: skip
def test_llama_cpp_answers_as_torch_does(changes: dict[str, Any], tmp_path: Path) -> None:
    model, path = written(tmp_path / "run", **changes)
    if not changes:
        assert written(tmp_path / "4", iterations=4)[1].stat().st_size == path.stat().st_size, "whatever the loops"
    llama, logits = llama_library.Llama(path, 1, None), []
    ids = np.random.default_rng(0).integers(0, llama.vocab_size, (15, POSITIONS - 10))
    for row in ids.tolist():
        llama.truncate(0)
        logits.append(llama.read(row, every=True))
    llama.close()
    with torch.inference_mode():
        expected = model.logits(torch.from_numpy(ids)).numpy()  # type: ignore[operator]
    assert np.abs(np.stack(logits) - expected).max() < 0.02 * expected.std()
    top = np.sort(expected, axis=-1)[..., -2:]
    decided = top[..., 1] - top[..., 0] > 0.02  # the others are ties within rounding
    same = np.stack(logits).argmax(-1) == expected.argmax(-1)
    assert decided.sum() > 900 and same[decided].mean() >= 0.99


@pytest.mark.parametrize("changes", [{}, {"iterations": 1, "exits": [], "qkv_bias": True}], ids=["looped", "qwen2"])
def test_an_f32_file_is_judged_without_the_rounding_of_the_cache(changes: dict[str, Any], tmp_path: Path) -> None:
    run = write_language_run(tmp_path / "run", language_recipe(**{**SIZES, **changes}))
    model: Any = load_model(run)
    with torch.no_grad():  # larger logits than those of random weights, as after training
        model.norm.weight *= 4
    write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "fp32")
    ids = np.random.default_rng(0).integers(0, 300, POSITIONS - 10).tolist()
    with torch.inference_mode():
        expected = model.logits(torch.tensor([ids]))[0].numpy()
    differences = {}
    for exact in (False, True):
        with closing(llama_library.Llama(tmp_path / "model.gguf", 1, None, exact=exact)) as llama:
            differences[exact] = np.abs(llama.read(ids, every=True) - expected).max()
    assert differences[True] < 2e-5 < 1e-3 < differences[False]


def test_it_writes_torchs_greedy_text_one_after_the_other(run: Path) -> None:
    options = GenerateOptions(max_tokens=40, sampling=Sampling(temperature=0.0))
    location, names = locate(str(run), run.parent), ("gguf-fp16-decode", "onnx-fp32-decode", "torch")
    texts = [generate(location, "the staff", replace(options, artifact=name)).tokens for name in names]
    assert texts[0] == texts[1] == texts[2]
    options, greedy = GenerateOptions(artifact="gguf-int8-decode"), options.sampling
    expected = generate(location, "The town", replace(options, max_tokens=20, sampling=greedy)).tokens
    with closing(Writer(location, options)) as writer:
        next(writer.write(writer.encode("Another, longer text"), 9, greedy))  # given up after a token
        pieces = [*writer.write(writer.encode("The town"), 20, greedy)]
    assert tuple(piece.token for piece in pieces) == expected


def test_the_file_splits_text_as_the_tokenizer_does_and_refuses_a_wrong_token(bundle: Bundle, tmp_path: Path) -> None:
    plain = PlainText(bundle.reader().tokenizer)
    session: Any = bundle.session(bundle.artifact("gguf-fp16"), OpenOptions(threads=1))
    with session:
        for text in TEXTS:
            assert session.tokenize(text) == plain.encode(text).ids
        with pytest.raises(EdgeformerError, match="outside the model's vocabulary"):
            session.run({"input_ids": np.array([[10**6]])})
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes((bundle.folder / str(bundle.artifact("gguf-fp16").file)).read_bytes()[:5000])
    with pytest.raises(ArtifactError, match=r"llama\.cpp cannot open it"):
        llama_library.Llama(damaged, 1, None)


def test_profile_measures_prompt_and_tokens_with_every_runtime(run: Path) -> None:
    artifacts = ("onnx-fp32-decode", "onnx-int8-decode", "gguf-int8-decode")
    options = ProfileOptions(seqs=(16,), batches=(1,), artifacts=artifacts, runtime="all", rules=RULES, threads=(1,))
    report = profile_bundle(locate(str(run), run.parent), load_profile("host"), options)
    rows = [row for row in report.rows if row.where == "host" and row.seq == 16 and row.phase != "cold"]
    bfloat16 = "openvino-cpu-bf16"
    reasons = {row.latency_ms.reason for row in rows if row.provider == bfloat16 and row.latency_ms.reason}
    if any("no bfloat16 instructions" in str(reason) for reason in reasons):  # this processor has none, and rows say so
        rows = [row for row in rows if row.provider != bfloat16]
    assert {row.latency_ms.status for row in rows} == {"measured"}
    measured = {(row.artifact, row.provider): set[str]() for row in rows}
    for row in rows:
        measured[row.artifact, row.provider].add(row.phase)
        tokens = 16 if row.phase == "prefill" else 1
        assert row.throughput_per_s == pytest.approx(1000 * tokens / (row.latency_ms.mean or 0))
    assert set(map(frozenset, measured.values())) == {frozenset({"prefill", "decode"})}
    fp32 = {provider for artifact, provider in measured if artifact == "onnx-fp32-decode"}
    assert fp32 >= {"torch-cpu", CPU} and ("gguf-int8-decode", "llama.cpp") in measured
    assert ("onnx-int8-decode", "torch-cpu") not in measured  # the run's weights are FP32


def test_torch_needs_the_folder_of_the_run(run: Path, tmp_path: Path) -> None:
    copy = Bundle.open(Path(shutil.copytree(run / "bundle", tmp_path / "bundle")))
    with pytest.raises(ArtifactError, match="is no run; torch needs its weights"):
        copy.decoder(copy.artifact("onnx-fp32-decode"), [3], OpenOptions("torch-cpu", threads=1))


def test_tokens_that_are_not_kept_are_forgotten(bundle: Bundle) -> None:
    decoder = bundle.decoder(bundle.artifact("gguf-fp16-decode"), [3], OpenOptions(threads=1))
    decoder.read([1, 2, 3])
    decoder.advance(3)
    first = decoder.peek(np.array([[4]]), 3)
    decoder.peek(np.array([[5]]), 3)
    assert np.array_equal(decoder.peek(np.array([[4]]), 3), first)
    with pytest.raises(InputError, match="one text at a time"):
        decoder.peek(np.array([[4], [5]]), 3)
    decoder.close()


def test_what_a_gguf_cannot_hold_is_rejected_with_a_reason(tmp_path: Path, bundle: Bundle) -> None:
    run = write_language_run(tmp_path / "run", language_recipe(**{**SIZES, "hidden_size": 48}))
    model: Any = load_model(run)
    with pytest.raises(EdgeformerError, match=r"Q8_0 needs rows of whole blocks of 32, and those of .* have 48"):
        write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "int8")
    job = BuildJob(
        bundle=tmp_path, graphs=bundle.artifacts, precision="fp32", max_length=8, max_positions=8, progress=SILENT,
        note=lambda text: None, module=lambda graph: torch.nn.Linear(2, 2),
    )  # fmt: skip
    reasons = {entry.reason for entry in GGUFBuilder().build(Target("gguf"), job)}
    assert reasons == {"GGUF holds language models of model.kind: decoder only; leave out --gguf"}
