"""What the files of an encoder's folder say is used as transformers and sentence-transformers use it, or refused."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers, of the extra hf, is not installed")
pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import sentence_transformers as library
from sentence_transformers.sentence_transformer import modules as modules_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from edgeformer import api
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.data.encoding import encode_texts
from edgeformer.data.probes import PROBE_TEXTS
from edgeformer.data.source_folder import SENTENCE_FILES
from edgeformer.data.synthetic import SENTENCES
from edgeformer.data.tokenization import load_tokenizer, special_ids
from edgeformer.data.trimming import trim_tokenizer
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.inference.predict import predict
from edgeformer.models import read_run_recipe
from edgeformer.models.pretrained.source import IGNORED_KEYS, TRANSFORMERS_KEYS, Architecture, EncoderFile, _unsupported
from edgeformer.run import Run, locate
from edgeformer.tasks.classification import softmax
from tests.cli.run_cli import edgeformer, run_json
from tests.export.hf_models import _SIZES, OWN, make_cross_encoder, make_model
from tests.imports.test_token_types import expected_inputs, expected_logits
from tests.measurement.measuring_child import Recorder
from tests.web.browser import run_module

LONG = " ".join(SENTENCES[:12])
TEXTS = ["A bridge of wood", *SENTENCES[:6], LONG, " ".join(SENTENCES[20:32]), "Nobody waits, CAFÉ [MASK] naïve."]
LABELS = ("no", "perhaps", "yes")
TOLERANCE = 1e-5


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file, which may not exist yet."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **changes}))


def vectors(run: Path, texts: Sequence[str], artifact: str = "torch") -> Any:
    return np.stack([answer.vector for answer in predict(locate(str(run), run.parent), texts, artifact)[1]])  # type: ignore[union-attr]


def probabilities(run: Path, texts: Sequence[Any], artifact: str = "torch") -> Any:
    answers = predict(locate(str(run), run.parent), texts, artifact)[1]
    return np.array([[answer.probabilities[label] for label in LABELS] for answer in answers])  # type: ignore[union-attr]


def expected_probabilities(folder: Path, texts: Sequence[Any]) -> Any:
    """What transformers answers with truncation=True."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return softmax(expected_logits(model, expected_inputs(folder, [*texts], None)))


def sentence_model(folder: Path, kind: str = "bert", pooling: str = "mean", *, normalize: bool = False) -> Any:
    """Return a random SentenceTransformer, which is not saved yet."""
    make_model(folder / "encoder", kind)
    modules = [modules_of.Transformer(str(folder / "encoder"))]
    modules.append(modules_of.Pooling(modules[0].get_embedding_dimension(), pooling))
    modules += [modules_of.Normalize()] if normalize else []
    return library.SentenceTransformer(modules=modules, device="cpu")


def saved(model: Any, folder: Path) -> Any:
    """Save a model, and return it as its library loads it."""
    model.save_pretrained(str(folder), create_model_card=False)
    return type(model)(str(folder), device="cpu")


def check_ranking(model: Any, run: Path, tolerance: float = TOLERANCE) -> None:
    """The bundle scores documents as sentence-transformers does."""
    bundle: Any = api.open(run / "bundle")
    expected = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS[1:]))[0].tolist()
    ranked = {document.row - 1: document.score for document in bundle.rank(TEXTS[0], TEXTS[1:], 20)}
    assert [ranked[row] for row in range(len(expected))] == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("file", SENTENCE_FILES)
def test_texts_are_cut_where_sentence_transformers_cuts_them(tmp_path: Path, file: str) -> None:
    saved(sentence_model(tmp_path), tmp_path / "model")
    (tmp_path / "model" / "sentence_bert_config.json").unlink()
    edit(tmp_path / "model" / file, max_seq_length=16, do_lower_case=False)
    model = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))
    assert Run.open(run).data.max_length == model.max_seq_length == 16  # type: ignore[attr-defined]
    assert np.abs(vectors(run, TEXTS) - model.encode(TEXTS)).max() < TOLERANCE


@pytest.mark.slow
def test_a_cross_encoder_is_cut_as_it_was_saved(tmp_path: Path) -> None:
    make_cross_encoder(tmp_path / "base")
    model = saved(library.CrossEncoder(str(tmp_path / "base"), max_length=24, device="cpu"), tmp_path / "model")
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))
    assert Run.open(run).data.max_length == model.max_seq_length == 24  # type: ignore[attr-defined]
    export(run, ExportOptions())
    documents = [" ".join(SENTENCES[start : start + 6]) for start in range(0, 60, 6)]
    bundle: Any = api.open(run / "bundle")
    expected = model.rank("A bridge of wood", documents)
    ranked = bundle.rank("A bridge of wood", documents, len(documents))
    assert [document.row - 1 for document in ranked] == [document["corpus_id"] for document in expected]
    scores = [document.score for document in ranked]
    assert scores == pytest.approx([document["score"] for document in expected], abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_texts_are_cut_on_the_side_that_the_tokenizer_states(tmp_path: Path, kind: str, side: str) -> None:
    folder = tmp_path / "model"
    make_model(folder, kind, LABELS)
    edit(folder / "tokenizer_config.json", truncation_side=side, model_max_length=20)
    run = import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    assert Run.open(run).data.max_length == 20  # type: ignore[attr-defined]
    texts: list[Any] = [*TEXTS, *([(LONG, "It is done."), ("Is it late?", LONG)] if kind == "bert" else [])]
    expected = expected_probabilities(folder, texts)
    assert np.abs(probabilities(run, texts) - expected).max() < TOLERANCE
    trained = load_tokenizer(read_run_recipe(run).tokenizer, cleaning="none", vocab_size=400, training_texts=None)
    assert trained.to_str() == Run.open(run).reader().tokenizer.to_str()
    if side == "right":  # bundles of other tests are cut there
        return
    export(run, ExportOptions())
    assert np.abs(probabilities(run, texts, "onnx-fp32") - expected).max() < TOLERANCE
    bundle = run / "bundle"
    assert json.loads((bundle / "tokenizer_config.json").read_text())["truncation_side"] == side
    ids = AutoTokenizer.from_pretrained(bundle, tokenizer_type=None)(LONG, truncation=True).input_ids
    assert ids == AutoTokenizer.from_pretrained(folder)(LONG, truncation=True).input_ids


def test_a_trimmed_tokenizer_keeps_the_side_and_the_padding_token(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "bert")
    padded(tmp_path / "model")
    edit(tmp_path / "model" / "tokenizer_config.json", truncation_side="left", model_max_length=20)
    reader = Run.open(import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))).reader()
    trimmed = trim_tokenizer(reader.tokenizer, reader.tokenizer.encode(LONG).ids)
    assert special_ids(trimmed.tokenizer).pad == trimmed.tokenizer.token_to_id("<PAD>")
    (cut, _), (expected, _) = (encode_texts(each, [LONG], 20) for each in (trimmed.tokenizer, reader.tokenizer))
    assert trimmed.kept[cut.ids].tolist() == expected.ids.tolist()
    library_ids = AutoTokenizer.from_pretrained(tmp_path / "model")(LONG, truncation=True).input_ids
    assert expected.ids.tolist() == library_ids


def test_a_page_cuts_on_the_side_that_the_tokenizer_states(tmp_path: Path) -> None:
    for file in ("text.js", "files.js"):
        shutil.copy(Path(api.__file__).parent / "web" / "site" / file, tmp_path / file)
    script = """
      import { encode } from "./text.js";
      const tokenizer = {
        encode: (text) => ({ ids: [101, ...text.split(" ").filter(Boolean).map(Number), 102] }),
        decode: (ids) => ids.join(" "),
      };
      const cut = (left) => encode({ tokenizer, most: 5, suffix: 1, left }, "1 2 3 4 5 6");
      console.log(JSON.stringify([cut(false), cut(true)]));
    """
    right, left = run_module(tmp_path, script)
    assert (right["ids"], right["lastRead"]) == ([101, 1, 2, 3, 102], "101 1 2 3")
    assert (left["ids"], left["lastRead"]) == ([101, 4, 5, 6, 102], "4 5 6 102")


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_prompts_are_put_in_front_and_not_pooled(tmp_path: Path, pooling: str) -> None:
    model = sentence_model(tmp_path, pooling=pooling)
    model[1].include_prompt = False
    model.prompts = {"query": "question of somebody: ", "document": "a text: ", "news": "news of the day: "}
    model.default_prompt_name = "news"
    model = saved(model, tmp_path / "model")
    assert not model[1].include_prompt and model.default_prompt_name == "news"
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))
    export(run, ExportOptions())
    for artifact in ("torch", "onnx-fp32"):
        assert np.abs(vectors(run, TEXTS, artifact) - model.encode(TEXTS)).max() < TOLERANCE
    check_ranking(model, run)
    golden = np.load(run / "model" / "golden_inputs.npz")
    prompt = len(AutoTokenizer.from_pretrained(tmp_path / "model")("news of the day: ").input_ids) - 1
    mask = golden["attention_mask"]
    assert {2} == {*mask[:, :prompt].ravel().tolist()} and 2 not in mask[:, prompt:]


@pytest.mark.slow
def test_a_prompt_that_is_pooled_stays_in_the_mean(tmp_path: Path) -> None:
    model = sentence_model(tmp_path, normalize=True)
    model.prompts = prompts = {"query": "question: ", "passage": "a text: "}
    model = saved(model, tmp_path / "model")
    edit(tmp_path / "model" / "config_sentence_transformers.json", prompts=prompts)
    progress = Recorder()
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"), progress)
    assert any("the prompt 'passage' is not used" in note for note in progress.messages)
    export(run, ExportOptions())
    check_ranking(model, run)
    assert np.abs(vectors(run, TEXTS, "onnx-fp32") - model.encode(TEXTS)).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["cosine", "euclidean", "dot", "manhattan"])
def test_vectors_are_cut_and_compared_as_the_folder_says(tmp_path: Path, measure: str) -> None:
    model = sentence_model(tmp_path, normalize=measure == "euclidean")
    model.truncate_dim, model.similarity_fn_name = 16, measure
    model = saved(model, tmp_path / "model")
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))
    export(run, ExportOptions())
    expected = model.encode(TEXTS)
    assert expected.shape == (len(TEXTS), 16)
    assert np.abs(vectors(run, TEXTS, "onnx-fp32") - expected).max() < TOLERANCE
    similar = model.similarity(model.encode_query(TEXTS[:1]), model.encode_document(TEXTS[1:]))[0].numpy()
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[1:]))
    options = ("--query", TEXTS[0], "--file", str(tmp_path / "texts.txt"))
    ranked = run_json("predict", str(run), *options, cwd=tmp_path)["rankings"][0]["documents"]
    order = np.argsort(-similar, kind="stable")
    assert [document["text"] for document in ranked] == [TEXTS[1:][row] for row in order]
    assert [document["score"] for document in ranked] == pytest.approx(similar[order].tolist(), abs=1e-4)
    check_ranking(model, run, 1e-4)
    compared = run_json("predict", str(run), *TEXTS[:2], cwd=tmp_path)
    assert compared["measure"] == measure
    assert compared["similarities"][0][1] == pytest.approx(float(model.similarity(*expected[:2])[0, 0]), abs=1e-4)
    quantised = edgeformer("predict", str(run), *options, "--vectors", "int8", cwd=tmp_path)
    assert quantised.code == (0 if measure == "cosine" else 2), quantised.err
    assert measure == "cosine" or f"compares vectors by {measure}, which needs their lengths" in quantised.err


def lower(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", do_lower_case=False, tokenizer_class="BertTokenizer")


def accents(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", do_lower_case=True, strip_accents=False, tokenizer_class="BertTokenizer")


def chinese(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", tokenize_chinese_chars=False, tokenizer_class="BertTokenizer")


def sentence_lower(folder: Path) -> None:
    """The settings of sentence-transformers lower a text before a tokenizer that does not."""
    lower(folder)
    edit(folder / "sentence_bert_config.json", do_lower_case=True, max_seq_length=40)


def padded(folder: Path) -> None:
    """The padding token is <PAD>, and the tokenizer pads on the left."""
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("[PAD]", "<PAD>"))
    edit(config, tokenizer_class="PreTrainedTokenizerFast", pad_token="<PAD>", padding_side="left")


def added(folder: Path) -> None:
    """Files of older tokenizers name a word that is one token."""
    (folder / "added_tokens.json").write_text(json.dumps({"bridge of": 400}))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    token = {"content": "bridge of", **flags}
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"400": token}, tokenizer_class="BertTokenizer")


def vocabulary(folder: Path) -> None:
    """Only vocab.txt, as the first models had it."""
    document = json.loads((folder / "tokenizer.json").read_text())
    words = sorted(document["model"]["vocab"], key=document["model"]["vocab"].__getitem__)
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("change", [lower, accents, chinese, sentence_lower, padded, added, vocabulary])
def test_tokens_are_those_of_transformers(tmp_path: Path, change: Callable[[Path], None]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 401} if change is added else {}
    make_model(tmp_path / "encoder", "bert", **sizes)
    model = saved(library.SentenceTransformer(str(tmp_path / "encoder"), device="cpu"), tmp_path / "model")
    before = Run.open(import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts", name="before"))).reader()
    for file in ("tokenizer_config.json", "sentence_bert_config.json"):
        (tmp_path / "model" / file).unlink()
    change(tmp_path / "model")
    model = library.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    run = import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts", name="run"))
    texts = [text for text in [*TEXTS, *PROBE_TEXTS, "東京タワー bridge of WOOD Äpfel"] if text.strip()]
    reader = Run.open(run).reader()
    assert reader.pad == model.tokenizer.pad_token_id
    expected = [model.tokenizer(text).input_ids for text in texts]
    tokens = [reader.tokenizer.encode(text).ids for text in texts]
    assert tokens == expected
    if change not in (padded, vocabulary):  # these say the same in another way
        assert tokens != [before.tokenizer.encode(text).ids for text in texts]
    answers = predict(locate(str(run), run.parent), texts, "torch")[1]
    for text, answer in zip(texts, answers, strict=True):
        if hasattr(answer, "vector"):
            difference = np.abs(answer.vector - model.encode([text])[0]).max()
            assert difference < TOLERANCE, text


def test_types_that_transformers_does_not_pass_are_zero(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(folder, "bert", LABELS)
    edit(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"], model_max_length=64)
    run = import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    assert {*Run.open(run).reader().tokenizer.encode("a", "b").type_ids} == {0}
    assert np.abs(probabilities(run, TEXTS) - expected_probabilities(folder, TEXTS)).max() < TOLERANCE


def test_a_folder_of_the_first_sentence_transformers_is_read(tmp_path: Path) -> None:
    saved(sentence_model(tmp_path), tmp_path / "old")
    folder, part = tmp_path / "old", tmp_path / "old" / "0_Transformer"
    part.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(part / name)
    (folder / "sentence_bert_config.json").unlink()
    edit(part / "sentence_bert_config.json", max_seq_length=18, do_lower_case=False)
    flags = {f"pooling_mode_{name}": name == "max_tokens" for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    modules = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
    entries = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    model = library.SentenceTransformer(str(folder), device="cpu")
    run = import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    assert Run.open(run).data.max_length == model.max_seq_length == 18  # type: ignore[attr-defined]
    assert np.abs(vectors(run, TEXTS) - model.encode(TEXTS)).max() < TOLERANCE


def test_a_token_without_a_vector_is_named(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "roberta", LABELS)
    edit(tmp_path / "model" / "tokenizer_config.json", pad_token="[PAD]", tokenizer_class="RobertaTokenizer")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 401
    outcome = edgeformer("import", "hf", str(tmp_path / "model"), cwd=tmp_path)
    assert outcome.code == 2 and "'[PAD]' has none; load the model with transformers, call" in outcome.err
    assert "resize_token_embeddings(len(tokenizer))" in outcome.err


POOLING = "1_Pooling/config.json"
REFUSED: list[tuple[str, Any, str]] = [
    ("modules.json", {"0": "x"}, "not a JSON list"),
    ("modules.json", ["a"], r"modules\.json: 0: input should be a valid dictionary"),
    ("modules.json", [{"type": "x.Pooling", "path": ".."}], r"path '\.\.' must be a folder"),
    ("config.json", [1], "not a JSON object"),
    ("tokenizer_config.json", [1], r"tokenizer_config\.json: damaged: not a JSON object"),
    ("added_tokens.json", [1], r"added_tokens\.json: damaged: not a JSON object"),
    (POOLING, [1], "not a JSON object"),
    (POOLING, {"pooling_mode": ["mean", "max"]}, "pooling must be one of cls, mean, max, not mean, max"),
    (POOLING, {"pooling_mode": "lasttoken"}, "pooling must be one of"),
    (POOLING, {"pooling_mode_cls_token": True, "pooling_mode_mean_sqrt_len_tokens": True}, "not cls, mean_sqrt_len_to"),
    (POOLING, {"pooling_mode_weightedmean_tokens": True}, "not weightedmean_tokens"),
    (POOLING, {"pooling_mode": "cls", "include_prompt": False}, "include_prompt: false is not supported"),
    (POOLING, {"pooling_mode": "mean", "weights": "idf"}, "does not read the key 'weights'"),
    ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length: input should be a valid integer"),
    ("sentence_bert_config.json", {"max_seq_length": 2}, "max_seq_length: input should be greater than"),
    ("sentence_bert_config.json", {"query_length": 32}, "does not read the key 'query_length'"),
    ("sentence_bert_config.json", {"tokenizer_args": {"x": 1}}, "does not read the key 'tokenizer_args'"),
    ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "transformer_task: input should be"),
    ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, "similarity_fn_name: input should be"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type: input should be"),
    ("config_sentence_transformers.json", {"query_prefix": "x"}, "does not read the key 'query_prefix'"),
    ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens is not supported"),
    ("tokenizer_config.json", {"added_tokens_decoder": 3}, "transformers cannot build its tokenizer"),
    ("tokenizer_config.json", {"model_max_length": 2}, "model_max_length is 2; it must be at least 4 tokens"),
    ("tokenizer_config.json", {"model_max_length": "long"}, "transformers cannot build its tokenizer"),
    ("adapter_config.json", {"peft_type": "LORA"}, "has an adapter, which is not supported"),
]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    saved(sentence_model(folder), folder / "model")
    return folder / "model"


@pytest.mark.parametrize(("file", "content", "message"), REFUSED)
def test_what_is_not_used_is_refused(embedding: Path, tmp_path: Path, file: str, content: Any, message: str) -> None:
    folder = shutil.copytree(embedding, tmp_path / "model")
    keeps = isinstance(content, dict) and file in ("tokenizer_config.json",)
    (edit(folder / file, **content) if keeps else (folder / file).write_text(json.dumps(content)))
    with pytest.raises((InputError, ArtifactError), match=message) as raised:
        import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    assert str(folder) in str(raised.value) and not (tmp_path / "artifacts").exists()


@pytest.mark.parametrize(
    "module", ["Dense", "LayerNorm", "WeightedLayerPooling", "Router", "Transformer", "StaticEmbedding"]
)
def test_other_modules_are_refused(embedding: Path, tmp_path: Path, module: str) -> None:
    folder = shutil.copytree(embedding, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Module", "type": f"sentence_transformers.models.{module}"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=f"the module '{module}' is not supported"):
        import_hf(str(folder), HfOptions(tmp_path / "artifacts"))


def test_a_reranker_with_a_default_prompt_is_refused(tmp_path: Path) -> None:
    make_cross_encoder(tmp_path / "base")
    prompts: dict[str, Any] = {"prompts": {"query": "question: "}, "default_prompt_name": "query"}
    saved(library.CrossEncoder(str(tmp_path / "base"), **prompts, device="cpu"), tmp_path / "model")
    with pytest.raises(InputError, match="default_prompt_name of config_sentence_transformers"):
        import_hf(str(tmp_path / "model"), HfOptions(tmp_path / "artifacts"))


@pytest.mark.parametrize("kind", get_args(Architecture))
def test_every_key_of_a_configuration_is_used_without_effect_or_refused(kind: str) -> None:
    config = CONFIG_MAPPING[kind](**{**_SIZES, **OWN[kind]})
    used = {"model_type"}
    for name, field in EncoderFile.model_fields.items():
        alias: Any = field.validation_alias
        used |= {name} if alias is None else {*alias.choices}
    file = EncoderFile.model_validate({**config.to_dict(), "id2label": None, "quantization_config": None})
    refused = _unsupported(file)
    keys = config.to_dict().keys() | {key for key in vars(config) if not key.startswith("_")}
    assert not (IGNORED_KEYS & TRANSFORMERS_KEYS) and not (IGNORED_KEYS & used)
    assert sorted(keys - used - TRANSFORMERS_KEYS - IGNORED_KEYS - refused.keys()) == []


def test_keys_without_effect_change_nothing_and_others_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(folder, "bert", LABELS)
    edit(folder / "tokenizer_config.json", model_max_length=64)
    edit(folder / "config.json", output_attentions=True, output_hidden_states=True, return_dict=False, use_cache=True)
    run = import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
    answers = probabilities(run, TEXTS)
    edit(folder / "config.json", output_attentions=False, output_hidden_states=False, return_dict=True)
    assert np.abs(answers - expected_probabilities(folder, TEXTS)).max() < TOLERANCE
    config = (folder / "config.json").read_bytes()
    for key, value in (("is_encoder_decoder", True), ("chunk_size_feed_forward", 8),
                       ("rope_scaling", {"type": "linear"}), ("add_cross_attention", True)):  # fmt: skip
        edit(folder / "config.json", **{key: value})
        with pytest.raises(InputError, match=f"{key} is .*which is not supported"):
            import_hf(str(folder), HfOptions(tmp_path / "artifacts"))
        (folder / "config.json").write_bytes(config)
