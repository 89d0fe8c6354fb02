"""Imported language models answer as transformers and llama.cpp do, GGUF files lead back, others are refused."""

import json
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.data.byte_pairs import IGNORES_MERGES, SPLITS, split_name
from edgeformer.data.probes import PROBE_TEXTS, token_probes
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports import language, language_keys
from edgeformer.imports.language import import_causal_lm, import_gguf, is_language_model
from edgeformer.imports.run import ImportOptions
from edgeformer.inference.generate import GenerateOptions, Generation, Writer, generate
from edgeformer.inference.sampling import Sampling
from edgeformer.models.weights import load_model
from edgeformer.run import Run, locate
from edgeformer.runtimes.llamacpp.builder import compare_tokenizer, write_gguf
from edgeformer.runtimes.llamacpp.library import Llama
from tests.export.language_models import CLASSES, HAS_LLAMA_CPP, SIZES, make_language_model

transformers = pytest.importorskip("transformers", reason="transformers makes the models that are imported")
needs_llama = pytest.mark.skipif(not HAS_LLAMA_CPP, reason="the extra llamacpp is not installed")
TORCH = GenerateOptions(artifact="torch", max_tokens=32, sampling=Sampling(temperature=0))
IDS = torch.arange(40).reshape(2, 20) * 7 % 400
BYTE_LEVEL = [kind for kind in CLASSES if kind != "llama2"]
UNAPPLIED = (
    "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "sequence_bias guidance_scale watermarking_config min_length min_new_tokens num_beams num_beam_groups "
    "diversity_penalty penalty_alpha dola_layers constraints force_words_ids stop_strings token_healing length_penalty "
    "early_stopping remove_invalid_values decoder_start_token_id"
)
"""Keys that change greedy text, which are noted and not applied."""
TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"


def imported(folder: Path, kind: str, generation: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Path]:
    """A random model of transformers and the run that was imported from it."""
    model, source = make_language_model(folder / kind, kind, generation, **changes)
    return model, import_causal_lm(str(source), ImportOptions(folder / "artifacts"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported run. Read it only."""
    return imported(tmp_path_factory.mktemp("smollm2"), "smollm2")[1]


def check_text(model: Any, run: Path, source: Path, ends: Iterable[int]) -> Generation:
    """The run writes what transformers writes greedily; return it."""
    prompt = transformers.AutoTokenizer.from_pretrained(source)("The town", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=32, do_sample=False, eos_token_id=[*ends])
    written = generate(locate(str(run), run.parent), "The town", TORCH)
    assert [*written.tokens] == expected[0, prompt.input_ids.shape[1] :].tolist()
    return written


def as_gguf(folder: Path, run: Path, **tensors: Any) -> Path:
    """The F32 GGUF file of a run, with further ``tensors``."""
    architecture, keys, arrays = load_model(run).gguf_contents()  # type: ignore[operator]
    path = folder / "model.gguf"
    write_gguf(path, run / "model", (architecture, keys, {**arrays, **tensors}), "fp32")
    return path


@pytest.mark.parametrize("kind", [*CLASSES])
def test_a_text_begins_as_transformers_begins_it(kind: str, tmp_path: Path) -> None:
    model, run = imported(tmp_path, kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
    opened = Run.open(run)
    boundary = opened.reader().pad
    with closing(Writer(locate(str(run), run.parent), TORCH)) as writer:
        for text in map(str, (*PROBE_TEXTS, *token_probes(opened.reader().tokenizer))):
            assert writer.encode(text) == (tokenizer(text).input_ids or [boundary])
        begin = tokenizer("a").input_ids[:-1] if kind.startswith("llama") else []
        assert writer.encode("a")[:-1] == begin
        check_text(model, run, tmp_path / kind, writer.ends)
    # Perplexity: every row begins so, and predicts all tokens behind it and the end.
    task, data = opened.task, opened.recipe.data
    rows = task.rows.encode_rows(data, opened.reader(), LabelledTexts.unlabelled([*PARAGRAPHS[:3]]))
    expected_rows = [[*tokenizer(text).input_ids, boundary][: data.sequence_length + 1] for text in PARAGRAPHS[:3]]
    assert [rows.ids[a:b].tolist() for a, b in zip(rows.offsets, rows.offsets[1:], strict=False)] == expected_rows
    golden = np.load(run / "model" / "golden_inputs.npz")["input_ids"]
    assert golden[0].tolist() == ([*tokenizer(PARAGRAPHS[0]).input_ids] if begin else [
        boundary, *tokenizer(PARAGRAPHS[0]).input_ids])[:golden.shape[1]]  # fmt: skip
    proof = json.loads((run / "run.json").read_text())["proof"]
    assert proof["library"] == f"transformers {transformers.__version__}" and proof["reason"] is None
    assert proof["texts"] > len(PROBE_TEXTS) and proof["largest_difference"] < 1e-4


def test_a_table_with_rows_of_padding_writes_as_transformers(tmp_path: Path) -> None:
    """Qwen2 has 151,936 rows and 151,665 tokens."""
    model, run = imported(tmp_path, "qwen2", vocab_size=SIZES["vocab_size"] + 20)
    check_text(model, run, tmp_path / "qwen2", Run.open(run).reader().bounds.ends)


@pytest.mark.parametrize("kind", ["llama3", "smollm2"])
def test_end_tokens_come_from_generation_config(kind: str, tmp_path: Path) -> None:
    model, _ = make_language_model(tmp_path / "probe", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "probe")
    prompt = tokenizer("The town", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=9, do_sample=False, eos_token_id=None)
    end = int(written[0, prompt.input_ids.shape[1] + 4])  # what this model writes, as its end
    model, run = imported(tmp_path, kind, {"eos_token_id": [end, 3], "repetition_penalty": 1.3})
    text = check_text(model, run, tmp_path / kind, [end, 3])
    assert text.stopped == "boundary" and text.tokens[-1] == end


def test_the_default_end_token_of_a_class_is_an_end(tmp_path: Path) -> None:
    _, source = make_language_model(tmp_path / "llama3", "llama3")
    document = json.loads((source / "config.json").read_text())
    del document["eos_token_id"]
    (source / "config.json").write_text(json.dumps(document))
    run = import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts"))
    bounds = Run.open(run).reader().bounds
    assert transformers.LlamaConfig().eos_token_id == 2 and bounds is not None and 2 in bounds.ends


@torch.inference_mode()
@pytest.mark.parametrize("form", ["different", "equal", "only the head"])
def test_heads_are_tied_as_in_transformers(form: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, source = make_language_model(tmp_path / "llama3", "llama3", tie_word_embeddings=True)
    weights = load_file(source / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = table + torch.randn_like(table) if form == "different" else table.clone()
    if form == "only the head":
        del weights["model.embed_tokens.weight"]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    original = transformers.AutoModelForCausalLM.from_pretrained(source)
    run = import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts"))
    model: Any = load_model(run)
    assert (model.logits(IDS) - original(IDS).logits).abs().max() < 1e-4
    assert model.config.tied == (form != "different")


def test_a_difference_refuses_the_import_or_marks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = make_language_model(tmp_path / "llama3", "llama3")
    build = language._config
    monkeypatch.setattr(language, "_config", lambda path, **sizes: build(path, **{**sizes, "norm_eps": 0.1}))
    with pytest.raises(InputError, match=r"the answer to '.*' differs .* of transformers .*--unproven"):
        import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts"))
    assert not (tmp_path / "artifacts").exists() or not [*(tmp_path / "artifacts").iterdir()]
    run = import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts", unproven=True))
    assert "differs" in json.loads((run / "run.json").read_text())["proof"]["reason"]


def test_without_the_library_an_import_is_unproven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = make_language_model(tmp_path / "llama2", "llama2")
    expected = transformers.AutoTokenizer.from_pretrained(source)("a b").input_ids
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name, *_: None)
        run = import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts"))
    proof = json.loads((run / "run.json").read_text())["proof"]
    assert proof["library"] is None and proof["reason"].startswith("transformers is not installed")
    with closing(Writer(locate(str(run), run.parent), TORCH)) as writer:
        assert writer.encode("a b") == expected


def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path: Path) -> None:
    _, source = make_language_model(tmp_path / "llama2", "llama2")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.save(str(source / "tokenizer.json"))
    with pytest.raises(InputError, match=r"ends every text with a token, .* remove the token from post_processor"):
        import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts"))


@needs_llama
def test_a_sentencepiece_tokenizer_is_not_written_as_gguf(tmp_path: Path) -> None:
    _, run = imported(tmp_path, "llama2")
    with pytest.raises(EdgeformerError, match=r"neither for SentencePiece's nor for others"):
        as_gguf(tmp_path, run)


@needs_llama
@torch.inference_mode()
@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_a_gguf_file_is_written_and_read_as_llama_cpp_reads_it(kind: str, tmp_path: Path) -> None:
    _, run = imported(tmp_path, kind, {"eos_token_id": [2, 3]})
    path = as_gguf(tmp_path, run)
    compared = compare_tokenizer(path, run / "model", PARAGRAPHS, "built-in texts")
    assert compared.startswith("llama.cpp's tokens are the bundle's on")
    assert compared.endswith("give it texts in NFC") == (kind.startswith("qwen"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / kind)
    texts = (*PARAGRAPHS, "<think>one</think> two<think>", "a <|eot_id|><|im_end|> b", "  spaces  ", "1234 567")
    again = import_gguf(path, ImportOptions(tmp_path / "artifacts", "again"))
    proof = json.loads((again / "run.json").read_text())["proof"]
    assert proof["library"].startswith("llama.cpp of xllamacpp") and proof["reason"] is None
    assert proof["largest_difference"] < 1e-4 and proof["texts"] > len(PROBE_TEXTS)
    with (
        closing(Llama(path, 1, 64, exact=True)) as llama,
        closing(Writer(locate(str(again), again.parent), TORCH)) as writer,
    ):
        for text in texts:
            assert llama.tokenize(text, add_special=True, parse_special=True) == tokenizer(text).input_ids
            # A user-defined token is one token in any text, a control token only where it is asked for.
            assert (tokenizer.convert_tokens_to_ids("<think>") in llama.tokenize(text)) == ("<think>" in text)
        assert {2, 3} <= {*llama.end_tokens()}
        for text in map(str, PROBE_TEXTS):
            expected = llama.tokenize(text, add_special=True, parse_special=True)
            assert writer.encode(text) == (expected or [writer.tokenizer.token_to_id("<|endoftext|>")])
        assert sorted(writer.ends) == llama.end_tokens()
        ids = writer.encode("The town")
        model: Any = load_model(again)
        assert np.abs(llama.read(ids, every=True) - model.logits(torch.tensor([ids]))[0].numpy()).max() < 1e-4
    rounded, config = {"norm_eps", "head_size"}, load_model(run).config  # in FP32; and stated instead of derived
    assert model.config.model_dump(exclude=rounded) == config.model_dump(exclude=rounded)  # type: ignore[union-attr]


@needs_llama
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.factor", 8.0), ("attention.sliding_window", 64), ("logit_scale", 0.5), ("expert_count", 4),
        ("residual_scale", 0.5), ("rope.dimension_count", 8),
    ],
)  # fmt: skip
def test_gguf_keys_that_ask_for_more_are_refused_by_name(key: str, value: Any, smollm2: Path, tmp_path: Path) -> None:
    architecture, keys, arrays = load_model(smollm2).gguf_contents()  # type: ignore[operator]
    write_gguf(tmp_path / "model.gguf", smollm2 / "model", (architecture, {**keys, key: value}, arrays), "fp32")
    with pytest.raises(InputError, match=f"{key}"):
        import_gguf(tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again"))


@needs_llama
@pytest.mark.parametrize("name", ["blk.0.ffn_up.bias", "blk.1.attn_output.bias", "rope_freqs.weight", "output.bias"])
def test_gguf_tensors_that_are_not_used_are_refused_by_name(name: str, smollm2: Path, tmp_path: Path) -> None:
    path = as_gguf(tmp_path, smollm2, **{name: np.full(8, 0.5, dtype=np.float32)})
    with pytest.raises(InputError, match=rf"has weights that edgeformer does not use: {name}"):
        import_gguf(path, ImportOptions(tmp_path / "artifacts", "again"))


@needs_llama
def test_damaged_gguf_files_are_refused(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf import GGUFWriter

    path, options = tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again")
    for content in (b"", b"GGUF", b"GGUF" + bytes(100), b"x" * 1000):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"damaged or no GGUF file|lacks|has the architecture"):
            import_gguf(path, options)
    add_merges, add_model = GGUFWriter.add_token_merges, GGUFWriter.add_tokenizer_model
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "add_token_merges", lambda self, _: add_merges(self, ["a nosuchtoken"]))
        with pytest.raises(ArtifactError, match="its tokenizer is damaged"):
            import_gguf(as_gguf(tmp_path, smollm2), options)
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tokenizer_model", lambda self, _: add_model(self, "llama"))
        own = ImportOptions(tmp_path / "artifacts", "again", smollm2 / "model" / "tokenizer.json")
        with pytest.raises(InputError, match=r"SentencePiece tokenizer has no tokens of bytes"):
            import_gguf(as_gguf(tmp_path, smollm2), own)
    monkeypatch.setattr(GGUFWriter, "add_quantization_version", lambda self, _: self.add_uint16("split.count", 3))
    with pytest.raises(InputError, match=r"is one of 3 parts; join them"):
        import_gguf(as_gguf(tmp_path, smollm2), options)


@needs_llama
def test_another_tokenizer_than_the_files_own_is_refused(smollm2: Path, tmp_path: Path) -> None:
    path, other = as_gguf(tmp_path, smollm2), tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(smollm2 / "model" / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(other))
    with pytest.raises(InputError, match=r"differs in its tokens from that of llama\.cpp .*--unproven"):
        import_gguf(path, ImportOptions(tmp_path / "artifacts", "again", other))
    again = import_gguf(path, ImportOptions(tmp_path / "artifacts", "again", other, unproven=True))
    assert "differs in its tokens" in json.loads((again / "run.json").read_text())["proof"]["reason"]


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("kind", ["llama3", "qwen2"])
def test_an_exact_gguf_file_is_accepted(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "valid"):
        (data / f"{name}.txt").write_text("\n".join(PARAGRAPHS))
    _, source = make_language_model(tmp_path / kind, kind)
    run = import_causal_lm(str(source), ImportOptions(tmp_path / "artifacts", data=data))
    export(run, ExportOptions(build=("gguf",), keep_going=True))
    bundle = locate(str(run), run.parent).open_bundle()
    entry = bundle.artifact("gguf-fp32")
    assert entry.status == "built" and entry.parity is not None and entry.parity.max_abs_error is not None
    assert entry.parity.max_abs_error < 1e-5 and bundle.manifest.proof is not None
    assert entry.tokenization is not None and f"{len(PARAGRAPHS)} validation texts" in entry.tokenization


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_every_key_of_a_configuration_has_its_handling(name: str) -> None:
    config = getattr(transformers, name)()
    keys = {key for key in (*config.to_dict(), *vars(config)) if key[0] != "_" or key == "_name_or_path"}
    used = {*language_keys.LanguageFile.model_fields}
    assert keys - used - language_keys.NEUTRAL_KEYS == set()
    assert not used & language_keys.NEUTRAL_KEYS and {*language_keys.REFUSED_KEYS} <= used


def test_every_key_of_generation_has_its_handling() -> None:
    keys = {*transformers.GenerationConfig().to_dict()} - {"eos_token_id"}
    assert keys - language_keys.NEUTRAL_GENERATION_KEYS == {*UNAPPLIED.split()}


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("smollm2", {"tie_word_embeddings": True, "head_dim": 32}),
        ("smollm2", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_logits_are_those_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    original, folder = make_language_model(tmp_path / "model", kind, **changes)
    assert is_language_model(str(folder))
    model: Any = load_model(import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts")))
    assert (model.logits(IDS) - original(IDS).logits).abs().max() < 1e-4
    assert model.exits == (1,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act is set in a way"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_scaling is set in a way"),
        ("quantization_config", {"bits": 4}, "quantization_config is set in a way"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("num_hidden_layers", 3, "lacks the weights blk.2"),
        ("intermediate_size", 100, "is .*, not "),
        ("vocab_size", 10**9, "larger model than its weights"),
        ("intermediate_size", 10**12, "is .*, not "),
        ("max_position_embeddings", 10**12, "at most 1,048,576 are supported"),
        ("num_key_value_heads", 3, "kv_heads must be a divisor"),
    ],
)
def test_other_computations_and_damage_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    _, folder = make_language_model(tmp_path / "model", "smollm2")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises((InputError, ArtifactError), match=message):
        import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    assert not (tmp_path / "artifacts").exists() or not [*(tmp_path / "artifacts").iterdir()]


@needs_llama
@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_chat_template_and_end_token_of_the_source_are_kept(form: str, tmp_path: Path) -> None:
    _, folder = make_language_model(tmp_path / "model", "smollm2")
    described: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    described["eos_token"] = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    described["model_max_length"] = 9
    if form == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        others = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        described["chat_template"] = TEMPLATE if form == "text" else others
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    run = import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    expected = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    config = Run.open(run).tokenizer_config()
    assert {key: config[key] for key in expected} == expected and config["model_max_length"] > 9
    model: Any = load_model(run)
    write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "fp16")
    again = import_gguf(tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again"))
    config = Run.open(again).tokenizer_config()
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("name", [*SPLITS])
def test_splits_are_recognised_in_a_tokenizer_json(name: str) -> None:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in IGNORES_MERGES))
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[name](), decoders.ByteLevel()
    assert split_name(json.loads(tokenizer.to_str())) == name
    for other in (models.WordPiece(), models.BPE()):
        assert split_name(json.loads(Tokenizer(other).to_str())) is None
