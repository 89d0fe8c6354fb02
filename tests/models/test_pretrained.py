"""Pretrained encoders compute what transformers does, mapped, folded and exported; unusable sources are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError, InputError, RecipeError
from edgeformer.export.audit import audit_sharing
from edgeformer.export.graphs import write_graph
from edgeformer.models import load_recipe, recipe_type
from edgeformer.models.blocks.tracing import Exits, extract_outputs
from edgeformer.models.pretrained import MODEL, PretrainedConfig
from edgeformer.models.pretrained.adapter import ADAPTER
from edgeformer.models.pretrained.model import load_components
from edgeformer.models.pretrained.source import open_source
from edgeformer.runtimes.executorch import ExecuTorchBuilder
from edgeformer.runtimes.executorch.session import EXECUTORCH
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.early_exit import exit_logits
from tests.export.hf_models import OWN, make_model
from tests.models.test_model_conformance import LABELLED, TRAINING

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

SEPARATOR, PAD, VOCABULARY, CLASSES, POSITIONS = 3, 1, 60, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS, "pad_token_id": PAD,
    "initializer_range": 0.1,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "distilbert": {"n_layers": 4},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "modernbert": {"sep_token_id": SEPARATOR, "bos_token_id": 2, "eos_token_id": SEPARATOR},
}
TOKENIZER = {
    "version": "1.0", "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[PAD]": 1}, "unk_token": "[UNK]"},
}  # fmt: skip
BERT_CONFIG = {
    "model_type": "bert", "num_hidden_layers": 4, "max_position_embeddings": 9, "vocab_size": 9, "hidden_size": 8,
    "num_attention_heads": 2,
}  # fmt: skip
ALBERT = {**BERT_CONFIG, "model_type": "albert"}
ORDERS = {"cycle": [0, 1, 0, 1], "immediate": [0, 0, 1, 1]}


def save_model(folder: Path, kind: str, **changes: Any) -> tuple[Any, Path]:
    """Save a small random classifier of transformers; return it and its folder."""
    names = tuple(f"LABEL_{number}" for number in range(CLASSES))
    model = make_model(folder, kind, names, **{**SIZES, **CHANGES.get(kind, {}), **changes})
    write_tokenizer(folder)
    return model, folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that transformers takes as it is."""
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.fixture(scope="module", params=OWN)
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return save_model(tmp_path_factory.mktemp("bert"), "bert")


def recipe_of(folder: Path, **model: Any) -> Any:
    """Return a recipe that starts from the model in ``folder``."""
    document = {
        "name": "pretrained",
        "task": "classification",
        "data": {**LABELLED, "labels": ["a", "b", "c"], "max_length": 16},
        "model": {
            "kind": "pretrained", "source": str(folder), "vocab_size": VOCABULARY, "max_positions": 30,
            "separator": SEPARATOR, **model,
        },
        "training": TRAINING,
    }  # fmt: skip
    MODEL.complete(document)
    return recipe_type("classification", "pretrained").model_validate(document, strict=False)


def load(folder: Path, **model: Any) -> Any:
    """Return the model of :func:`recipe_of` with the weights of its source."""
    recipe = recipe_of(folder, **model)
    built = ADAPTER.build(recipe)
    assert ADAPTER.start(built, recipe) == ()
    return built.eval()


def pairs_of_texts() -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, attention mask and token types [3, 20] of pairs; the last one is short."""
    ids = torch.randint(4, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 9] = ids[:2, 19] = ids[2, 14] = SEPARATOR
    ids[2, 15:] = PAD
    types = torch.zeros_like(ids)
    types[:, 10:] = 1
    return ids, (ids != PAD).long(), types


def run_layers(model: Any, layers: list[Any], ids: Tensor, mask: Tensor) -> Tensor:
    """Apply layers of a transformers BERT to its embeddings; return logits."""
    hidden = (1 - mask[:, None, None].float()) * -1e4
    state = model.bert.embeddings(ids)
    for layer in layers:
        state = layer(state, hidden)
    return model.classifier(model.bert.pooler(state))


@torch.inference_mode()
def test_states_equal_transformers(classifier: tuple[Any, Path]) -> None:
    """After every layer, also for texts that reach the largest distances."""
    model, folder = classifier
    ids = torch.randint(4, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = PAD, 0
    outputs = model.base_model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    loaded = load(folder)
    _, states = loaded(ids, mask, states=True)
    for state, expected in zip(states, outputs.hidden_states[1:], strict=True):
        last = state is states[-1]  # ModernBERT's last norm belongs to its states
        assert ((loaded.final_norm(state) if last else state) - expected)[mask.bool()].abs().max() < 1e-5


VARIANTS: dict[str, dict[str, Any]] = {
    "distances without buckets": {"kind": "deberta-v2", "position_buckets": -1, "max_relative_positions": 6},
    "many buckets": {"kind": "deberta-v2", "position_buckets": 30},
    "absolute positions, types": {"kind": "deberta-v2", "position_biased_input": True, "type_vocab_size": 2},
    "types without positions": {"kind": "deberta-v2", "type_vocab_size": 2, "norm_rel_ebd": "none"},
    "mean pooling": {
        "kind": "modernbert", "classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "relu",
    },
    "biases": {
        "kind": "modernbert", "attention_bias": True, "mlp_bias": True, "norm_bias": True, "num_hidden_layers": 3,
    },
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_variants_equal_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model, folder = save_model(tmp_path, **changes)
    ids, mask, _ = pairs_of_texts()
    assert (load(folder)(ids, mask) - model(input_ids=ids, attention_mask=mask).logits).abs().max() < 1e-5


@torch.inference_mode()
def test_older_modernbert_configurations(tmp_path: Path) -> None:
    """As ModernBERT's and Ettin's own files have it: two bases of rotary angles, every third layer global."""
    model, folder = save_model(tmp_path, "modernbert", global_attn_every_n_layers=3)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ids, mask, _ = pairs_of_texts()
    answers = []
    for local_theta in (10_000.0, 20.0):
        older = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
        older |= {"global_rope_theta": 160_000.0, "local_rope_theta": local_theta, "global_attn_every_n_layers": 3}
        older |= {"position_embedding_type": "sans_pos"}
        path.write_text(json.dumps(older), encoding="utf-8")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        answers.append(model(input_ids=ids, attention_mask=mask).logits)
        assert (load(folder)(ids, mask) - answers[-1]).abs().max() < 1e-5
    assert (answers[0] - answers[1]).abs().max() > 1e-3


@torch.inference_mode()
def test_exits_apply_the_head_to_fewer_layers(bert: tuple[Any, Path]) -> None:
    model, folder = bert
    ids, mask, _ = pairs_of_texts()
    states = model.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    exits = Exits(load(folder))
    outputs = exits(ids, mask)
    assert exits.exits == (1, 2, 3, 4)
    for exit_ in exits.exits:
        assert (outputs[exit_ - 1] - model.classifier(model.bert.pooler(states[exit_]))).abs().max() < 1e-5
        assert (outputs[3 + exit_] - states[exit_])[mask.bool()].abs().max() < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_pooling_skips_padding(bert: tuple[Any, Path], pooling: str) -> None:
    loaded, (ids, mask, _) = load(bert[1], pooling=pooling), pairs_of_texts()
    assert (loaded(ids[2:, :15], None) - loaded(ids, mask)[2:]).abs().max() < 1e-5, "it needs no mask either"


@torch.inference_mode()
@pytest.mark.parametrize("order", ORDERS)
def test_fold_applies_layers_in_order(bert: tuple[Any, Path], order: str) -> None:
    model, folder = bert
    fold = {"layers": 2, "iterations": 2, "order": order}
    ids, mask, _ = pairs_of_texts()
    layers = model.bert.encoder.layer
    expected = run_layers(model, [layers[2 * number] for number in ORDERS[order]], ids, mask)  # stepwise
    assert (load(folder, fold=fold)(ids, mask) - expected).abs().max() < 1e-5
    averaged = load(folder, fold={**fold, "init": "average"})
    source = [layer.attention.self.query.weight for layer in layers]
    for number in range(2):
        mean = sum(source[index] for index, used in enumerate(ORDERS[order]) if used == number) / 2
        assert torch.allclose(averaged.layers[number].attention.self.query.weight, mean, atol=1e-6)


def test_own_parts_start_from_the_replaced_layers(bert: tuple[Any, Path]) -> None:
    model, folder = bert
    ids, mask, _ = pairs_of_texts()
    loaded = load(folder, fold={"layers": 2, "iterations": 2, "own": "adapters", "rank": 32})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    layers = model.bert.encoder.layer
    with torch.inference_mode():
        for index, number in enumerate((0, 2, 0, 2)):  # biases and norms are shared: make them equal in the source
            for name, parameter in layers[index].named_parameters():
                if parameter.ndim < 2:
                    parameter.copy_(state[f"bert.encoder.layer.{number}.{name}"])
        expected = run_layers(model, list(layers), ids, mask)
        model.load_state_dict(state)
        assert (loaded(ids, mask) - expected).abs().max() < 1e-4
    norms = load(folder, fold={"layers": 2, "iterations": 2, "own": "norms"})
    replaced = [layers[index].output.LayerNorm.weight for index in (1, 3)]
    assert torch.equal(norms.layers[1].output.LayerNorm.weight, torch.stack(replaced))


@pytest.mark.slow
def test_graphs_of_folds_store_weights_once(bert: tuple[Any, Path], tmp_path: Path) -> None:
    """With adapters, in the order that a host cannot loop; conformance checks the other order."""
    loaded = load(bert[1], fold={"layers": 2, "iterations": 2, "own": "adapters", "order": "immediate", "rank": 2})
    with torch.no_grad():  # equal zeros of equal shape would be stored once
        for parameter in loaded.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    graphs = ADAPTER.trace(loaded, ("input_ids", "attention_mask"), steps=True)
    assert not graphs.steps
    ids, mask, _ = pairs_of_texts()
    with torch.inference_mode():
        expected = Exits(loaded)(ids, mask)
    for exit_, parameters in ADAPTER.needed(loaded).items():
        path = tmp_path / f"{exit_}.onnx"
        write_graph(extract_outputs(graphs.exits, {exit_logits(exit_): "logits"}), path)
        assert audit_sharing(onnx.load(str(path)), parameters).stored_parameters == parameters
        with OnnxSession(path) as session:
            logits = session.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["logits"]
        assert np.abs(logits - expected[exit_ - 1].numpy()).max() < 1e-4


@pytest.mark.slow
def test_products_of_folds_are_computed_by_xnnpack(bert: tuple[Any, Path], tmp_path: Path) -> None:
    """XNNPACK's product takes no bias that is chosen from several: the reference kernel would be 40 times slower."""
    if EXECUTORCH.missing() is not None:
        pytest.skip("the extra executorch is not installed")
    module = ADAPTER.exported(load(bert[1], fold={"layers": 2, "iterations": 2, "own": "norms", "order": "immediate"}))
    names = ("input_ids", "attention_mask"), ("logits",)
    facts = ExecuTorchBuilder().write(Exits(module), *names, 16, tmp_path / "model.pte", "fp32").engine
    assert facts["delegated"] and not [name for name in facts["not_delegated"] if "mm" in name or "linear" in name]


@pytest.mark.parametrize("encoder_rate", [1.0, 0.1])
def test_layers_decay_and_the_encoder_has_its_own_rate(bert: tuple[Any, Path], encoder_rate: float) -> None:
    model = load(bert[1], fold={"layers": 2, "iterations": 2, "own": "norms"})
    training = recipe_of(bert[1]).training.model_copy(update={"layer_decay": 0.5, "encoder_rate": encoder_rate})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = {names[id(setting.parameter)]: setting for setting in ADAPTER.learning(model, training)}
    assert set(settings) == set(names.values()) and settings["head.out.weight"].rate == 1
    assert settings["embeddings.words.weight"].rate == encoder_rate * 0.5**5
    # Order 1 2 1 2: layer 2 is applied last as the fourth, layer 1 as the third.
    assert settings["layers.1.attention.self.query.weight"].rate == encoder_rate * 0.5
    assert settings["layers.0.attention.self.query.weight"].rate == encoder_rate * 0.25
    biases = settings["layers.0.attention.self.query.bias"]
    assert biases.parameter.ndim == 2 and not biases.decays and settings["head.out.weight"].decays


def test_recipe_takes_sizes_and_tokenizer_from_its_source(bert: tuple[Any, Path], tmp_path: Path) -> None:
    data = "split: random-split, labels: [a, b], parts: {train: [{kind: synthetic-reviews, rows: 100}]}, max_length: 8"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"name: example\ntask: classification\ndata: {{{data}}}\n"
        f"model: {{kind: pretrained, source: '{bert[1]}'}}\n"
        "training: {epochs: 1, batch_size: 2, optimizer: {lr: 1.0e-3}, schedule: {kind: linear}}\n",
        encoding="utf-8",
    )
    recipe: Any = load_recipe(str(path))
    assert (recipe.model.vocab_size, recipe.model.max_positions) == (2, POSITIONS)
    assert (recipe.tokenizer.kind, recipe.tokenizer.name) == ("source", str(bert[1]))
    assert len(recipe.model.weights_sha256) == 64
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(path)) == recipe
    changed = recipe_of(bert[1], weights_sha256="0" * 64)
    with pytest.raises(ArtifactError, match="weights_sha256"):
        ADAPTER.start(ADAPTER.build(changed), changed)


def test_incomplete_source_is_refused(tmp_path: Path) -> None:
    weights = save({"embeddings.word_embeddings.weight": torch.zeros(9, 90)})
    steps = [
        ("tokenizer_config.json", b"{}", r"config\.json: missing"),
        ("config.json", b'{"model_type": "gpt2"}', "model_type 'gpt2' is not supported; supported are albert, bert"),
        ("config.json", b'{"model_type": "bert"}', r"config\.json: vocab_size: field required"),
        ("config.json", json.dumps(BERT_CONFIG).encode(), r"has no model\.safetensors.*safe_serialization"),
        ("model.safetensors", b"no weights", "describes a larger model than the 10 bytes of its weights"),
        ("model.safetensors", weights, r"has no tokenizer\.json"),
    ]
    for name, content, message in steps:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=message):
            open_source(str(tmp_path)).tokenizer  # noqa: B018 — a property that reads files


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"position_padding": 0}, "position_padding: is None in the source; remove the key"),
        ({"fold": {"layers": 5, "iterations": 2}}, "must be at most 4"),
        ({"architecture": ALBERT, "fold": {"layers": 1, "iterations": 4}}, "shares its layers already"),
        ({"architecture": {"model_type": "t5"}}, "model_type: input should be 'albert', 'bert'"),
        ({"architecture": {**ALBERT, "num_hidden_layers": "x"}}, "num_hidden_layers: input should be a valid integer"),
        ({"max_positions": 10}, "max_positions: must be at most 9"),
    ],
)
def test_impossible_models_are_refused(model: dict[str, Any], message: str) -> None:
    document = {"kind": "pretrained", "source": "x", "vocab_size": 9, "max_positions": 9, "architecture": BERT_CONFIG}
    with pytest.raises(ValueError, match=message):
        PretrainedConfig.model_validate({**document, **model})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: input should be greater than or equal to 1"),
        ({"type_vocab_size": "x"}, "type_vocab_size: input should be a valid integer"),
        ({"id2label": {"a": "x"}}, "id2label must name the classes 0, 1, 2"),
        ({"is_decoder": True}, "is_decoder is True, which is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization_config exists"),
        ({"max_position_embeddings": 400_000_000}, "describes a larger model than the"),
        ({"num_hidden_layers": 400_000_000}, "describes a larger model than the"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_config_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {**BERT_CONFIG, "position_embedding_type": "absolute", "chunk_size_feed_forward": 0, "is_decoder": False}
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({"embeddings.word_embeddings.weight": torch.zeros(9, 90)}))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert open_source(str(tmp_path)).max_positions == 9
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(InputError, match=message) as raised:
        open_source(str(tmp_path))
    assert str(tmp_path / "config.json") in str(raised.value)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"layer_norm_eps": "x"}, {"hidden_act": "zzz"}])
def test_errors_of_transformers_are_reported(changes: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="transformers cannot build the model: "):
        load_components(None, {**BERT_CONFIG, **changes}, 2)


def test_unused_encoder_weights_are_refused(bert: tuple[Any, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(bert[1], tmp_path / "bert")
    weights, config = load_file(folder / "model.safetensors"), open_source(str(folder)).config
    harmless = {"cls.predictions.bias": torch.zeros(3), "bert.embeddings.position_ids": torch.arange(POSITIONS)}
    save_file({**weights, **harmless}, folder / "model.safetensors", {"format": "pt"})
    assert load_components(folder, config, CLASSES)[1] == frozenset()
    distances = {"bert.encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(9, 8)}
    save_file({**weights, **distances}, folder / "model.safetensors", {"format": "pt"})
    for changes, name in (({}, r"distance_embedding\.weight"), ({"vocab_size": 10}, "word_embeddings")):
        with pytest.raises(ArtifactError, match=rf"an encoder of its config\.json does not use: .*{name}"):
            load_components(folder, {**config, **changes}, CLASSES)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ArtifactError, match=f"{folder}: transformers cannot build the model"):
        load_components(folder, config, CLASSES)


def test_paths_are_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(InputError, match="is a file; give its folder"):
        open_source(str(file))
    monkeypatch.chdir(tmp_path)
    for name in ("./models", "../x/y", "some/where/else", "models/x.safetensors", "~/m", "a\\b"):
        with pytest.raises(InputError, match=r"not a folder, and not a name on the hub \(OWNER"):
            open_source(name)
    with pytest.raises(InputError, match="not a folder"):
        open_source("x" * 5000)
    with pytest.raises((InputError, RecipeError), match=r"nowhere/at/all: not a folder"):
        load_recipe("quickstart", ["model={kind: pretrained, source: nowhere/at/all}"])
