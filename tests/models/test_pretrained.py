"""Pretrained encoders: they answer as transformers' own models do, taken apart or not, and fold as the recipe says."""

from __future__ import annotations

import json
import shutil
from collections import Counter
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
from edgeformer.models.adapter import Place
from edgeformer.models.pretrained import FoldConfig, PretrainedConfig
from edgeformer.models.pretrained.source import open_source
from edgeformer.models.tracing import cut_out
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.tasks.early_exit import exit_logits
from tests.models.test_model_conformance import LABELLED, TRAINING

transformers = pytest.importorskip("transformers", reason="the extra [hf] is not installed")

SEPARATOR, PAD, VOCABULARY, CLASSES, POSITIONS = 3, 1, 60, 3, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": POSITIONS, "pad_token_id": PAD, "num_labels": CLASSES,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "roberta": ("RobertaConfig", {**SIZES, "type_vocab_size": 1}),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 16}),
    "albert": ("AlbertConfig", {**SIZES, "embedding_size": 16, "num_hidden_groups": 1}),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY, "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48,
            "max_position_embeddings": POSITIONS, "pad_token_id": PAD, "num_labels": CLASSES,
        },
    ),
    "modernbert": (
        "ModernBertConfig",
        {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": SEPARATOR,
         "bos_token_id": 2, "eos_token_id": SEPARATOR},
    ),
}  # fmt: skip
TYPED = ("bert", "electra", "albert")
"""Those that tell the two texts of a pair apart."""
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "[PAD]": 1}, "unk_token": "[UNK]"}}


@pytest.fixture(scope="module", params=KINDS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A small random classifier of transformers, and its folder."""
    name, sizes = KINDS[request.param]
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return _published(name, sizes, tmp_path_factory.mktemp(request.param))


def _published(name: str, sizes: dict[str, Any], folder: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**sizes)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    return model, folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return _published(*KINDS["bert"], tmp_path_factory.mktemp("bert"))


def recipe_of(folder: Path, **model: Any) -> Any:
    """A recipe that starts from the model in ``folder``."""
    document = {
        "name": "from-there",
        "task": "classification",
        "data": {**LABELLED, "labels": ["a", "b", "c"], "max_length": 16},
        "model": {
            "kind": "pretrained", "source": str(folder), "vocab_size": VOCABULARY, "max_positions": 30,
            "separator": SEPARATOR, **model,
        },
        "training": TRAINING,
    }  # fmt: skip
    of = recipe_type("classification", "pretrained")
    model_spec = __import__("edgeformer.models.pretrained", fromlist=["MODEL"]).MODEL
    model_spec.complete(document)
    return of.model_validate(document, strict=False)


def started(folder: Path, **model: Any) -> Any:
    """The model of such a recipe, with the weights of its source."""
    recipe = recipe_of(folder, **model)
    from edgeformer.models.pretrained.adapter import ADAPTER

    built, _ = ADAPTER.build(recipe, Place(for_export=True))
    assert ADAPTER.start(built, recipe) == ()
    return built.eval()


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers of pairs, one of them short; which are real; and which text each belongs to."""
    ids = torch.randint(4, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 9] = ids[:2, 19] = ids[2, 14] = SEPARATOR
    ids[2, 15:] = PAD
    types = torch.zeros_like(ids)
    types[:, 10:] = 1
    return ids, (ids != PAD).long(), types


@torch.inference_mode()
@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
def test_it_answers_as_transformers_does(published: tuple[Any, Path], pairs: bool) -> None:
    model, folder = published
    ids, mask, types = texts()
    told = {"token_type_ids": types} if pairs and model.config.model_type in TYPED else {}
    wanted = model(input_ids=ids, attention_mask=mask, **told).logits
    found = started(folder, pairs=pairs)(ids, mask)
    assert wanted.std() > 0.05 and (found - wanted).abs().max() < 1e-5
    if told:  # and the second type matters
        assert (model(input_ids=ids, attention_mask=mask).logits - wanted).abs().max() > 1e-4


@torch.inference_mode()
def test_an_exit_is_the_models_head_on_fewer_layers(bert: tuple[Any, Path]) -> None:
    from edgeformer.models.pretrained.adapter import ADAPTER

    model, folder = bert
    ids, mask, _ = texts()
    states = model.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
    exits = ADAPTER.exits(started(folder))
    found = exits(ids, mask)
    assert exits.exits == (1, 2, 3, 4)
    for exit_, logits in zip(exits.exits, found, strict=False):
        wanted = model.classifier(model.bert.pooler(states[exit_]))
        assert (logits - wanted).abs().max() < 1e-5
        assert (found[3 + exit_] - states[exit_])[mask.bool()].abs().max() < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_pooling_is_of_real_tokens(bert: tuple[Any, Path], pooling: str) -> None:
    model, folder = bert
    ids, mask, _ = texts()
    states = model.bert(input_ids=ids, attention_mask=mask).last_hidden_state
    real = [state[seen.bool()] for state, seen in zip(states, mask, strict=True)]
    pooled = {"cls": states[:, 0], "mean": torch.stack([rows.mean(0) for rows in real]),
              "max": torch.stack([rows.amax(0) for rows in real])}[pooling]  # fmt: skip
    built = started(folder, pooling=pooling)
    assert (built(ids, mask) - model.classifier(pooled)).abs().max() < 1e-5
    alone = built(ids[2:, :15], None)
    assert (alone - built(ids, mask)[2:]).abs().max() < 1e-5, "a mask that hides nothing may be left out"


ORDERS = {"cycle": [0, 1, 0, 1], "immediate": [0, 0, 1, 1]}


@pytest.mark.parametrize("order", ORDERS)
def test_a_folded_stack_applies_these_layers_in_this_order(bert: tuple[Any, Path], order: str) -> None:
    model, folder = bert
    fold = FoldConfig(layers=2, iterations=2, order=order)  # type: ignore[arg-type]
    assert list(fold.order_of_layers()) == ORDERS[order]
    ids, mask, _ = texts()
    layers = [model.bert.encoder.layer[0], model.bert.encoder.layer[2]]  # stepwise
    hidden = (1 - mask[:, None, None].float()) * -1e4
    with torch.inference_mode():
        state = model.bert.embeddings(ids)
        for number in ORDERS[order]:
            state = layers[number](state, hidden)
        wanted = model.classifier(model.bert.pooler(state))
        found = started(folder, fold={"layers": 2, "iterations": 2, "order": order})(ids, mask)
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("order", ORDERS)
def test_an_average_is_of_the_layers_that_one_stands_for(bert: tuple[Any, Path], order: str) -> None:
    model, folder = bert
    built = started(folder, fold={"layers": 2, "iterations": 2, "order": order, "init": "average"})
    stack = [dict(layer.named_parameters()) for layer in model.bert.encoder.layer]
    name = "attention.self.query.weight"
    for number in range(2):
        stands = [place for place, which in enumerate(ORDERS[order]) if which == number]
        wanted = sum(stack[place][name] for place in stands) / 2
        assert torch.allclose(dict(built.layers[number].named_parameters())[name], wanted, atol=1e-6)


def test_with_adapters_of_full_rank_the_fold_is_the_stack_but_for_its_vectors(bert: tuple[Any, Path]) -> None:
    """The adapters hold what a shared matrix lacks; biases and norms are shared, so those are made alike first."""
    model, folder = bert
    ids, mask, _ = texts()
    built = started(folder, fold={"layers": 2, "iterations": 2, "own": "adapters", "rank": 32})
    with torch.inference_mode():
        layers = model.bert.encoder.layer
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for place, number in enumerate((0, 2, 0, 2)):
            own = dict(layers[number].named_parameters())
            for name, parameter in layers[place].named_parameters():
                if parameter.ndim < 2:
                    parameter.copy_(before[f"bert.encoder.layer.{number}.{name}"])
            assert own
        order = [layers[0], layers[1], layers[2], layers[3]]
        state, hidden = model.bert.embeddings(ids), (1 - mask[:, None, None].float()) * -1e4
        for layer in order:
            state = layer(state, hidden)
        wanted = model.classifier(model.bert.pooler(state))
        model.load_state_dict(before)
        assert (built(ids, mask) - wanted).abs().max() < 1e-4


def test_own_norms_begin_as_those_of_the_layer_in_that_place(bert: tuple[Any, Path]) -> None:
    model, folder = bert
    built = started(folder, fold={"layers": 2, "iterations": 2, "own": "norms"})
    found = dict(built.layers[1].named_parameters())["output.LayerNorm.weight"]
    wanted = [model.bert.encoder.layer[place].output.LayerNorm.weight for place in (1, 3)]
    assert torch.equal(found, torch.stack(wanted))
    names = {name for name, _ in built.named_parameters() if name.startswith("layers.")}
    assert len(names) == 2 * 16, "matrices once, and of everything else one of each application, in one tensor"


def test_graphs_of_folded_stacks_store_what_they_use_once(bert: tuple[Any, Path], tmp_path: Path) -> None:
    """With adapters, and in the order that no host can loop; the other order is among the families' own checks."""
    from edgeformer.models.pretrained.adapter import ADAPTER

    fold = {"layers": 2, "iterations": 2, "own": "adapters", "order": "immediate", "rank": 2}
    built = started(bert[1], fold=fold)
    with torch.no_grad():  # what begins as zeros would be stored once for all of a shape
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    assert not built.loops_one_graph
    graphs = ADAPTER.trace(built, ("input_ids", "attention_mask"), steps=True)
    assert not graphs.steps, "nothing is looped where each layer is repeated by itself"
    ids, mask, _ = texts()
    with torch.inference_mode():
        wanted = ADAPTER.exits(built)(ids, mask)
    for exit_, needed in ADAPTER.needed(built).items():
        path = tmp_path / f"{exit_}.onnx"
        write_graph(cut_out(graphs.exits, {exit_logits(exit_): "logits"}), path)
        assert audit_sharing(onnx.load(str(path)), needed).stored_parameters == needed
        with OnnxSession(path) as session:
            found = session.run({"input_ids": ids.numpy(), "attention_mask": mask.numpy()})["logits"]
        assert np.abs(found - wanted[exit_ - 1].numpy()).max() < 1e-4


def test_exported_form_computes_the_same_and_leaves_the_model_as_it_was(published: tuple[Any, Path]) -> None:
    from edgeformer.models.pretrained.model import exported_form

    ids, mask, _ = texts()
    built = started(published[1])
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    made = exported_form(built)
    with torch.inference_mode():
        assert (made(ids, mask) - built(ids, mask)).abs().max() < 1e-5
        assert (made(ids) - built(ids)).abs().max() < 1e-5
    assert sum(p.numel() for p in made.parameters()) == sum(p.numel() for p in built.parameters())
    after = built.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    configs = {module.config._attn_implementation for module in built.modules() if hasattr(module, "config")}
    assert configs == {"sdpa"}, "training keeps torch's fused kernels"


def test_exported_graph_turns_no_key_twice(bert: tuple[Any, Path]) -> None:
    from edgeformer.models.pretrained.adapter import ADAPTER

    built = started(bert[1], fold={"layers": 2, "iterations": 2, "own": "norms"})
    graph = ADAPTER.trace(built, ("input_ids", "attention_mask"), steps=True).steps["loop"].graph
    moved = Counter(tuple(node.attributes["perm"].as_ints()) for node in graph if node.op_type == "Transpose")
    # Of two layers each: q, v and what comes out; and k, as the product takes it.
    assert moved == {(0, 2, 1, 3): 2 * 3, (0, 2, 3, 1): 2}


def test_layers_far_from_the_head_learn_more_slowly(bert: tuple[Any, Path]) -> None:
    from edgeformer.models.pretrained.adapter import ADAPTER

    built = started(bert[1], fold={"layers": 2, "iterations": 2, "own": "norms"})
    training = recipe_of(bert[1]).training.model_copy(update={"layer_decay": 0.5})
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    found = {names[id(one.parameter)]: one for one in ADAPTER.learning(built, training)}
    assert set(found) == {name for name, _ in built.named_parameters()}
    assert found["head.out.weight"].rate == 1 and found["embeddings.words.weight"].rate == 0.5**5
    # Applied as 1 2 1 2: the second layer's last application is the fourth, the first layer's the third.
    assert found["layers.1.attention.self.query.weight"].rate == 0.5
    assert found["layers.0.attention.self.query.weight"].rate == 0.25
    stacked = found["layers.0.attention.self.query.bias"]
    assert stacked.parameter.ndim == 2 and not stacked.decays and found["head.out.weight"].decays


def test_a_recipe_takes_sizes_and_tokenizer_from_its_source(bert: tuple[Any, Path], tmp_path: Path) -> None:
    source = tmp_path / "recipe.yaml"
    data = (
        "{split: random-split, labels: [a, b], parts: {train: [{kind: synthetic-reviews, rows: 100}]}, max_length: 8}"
    )
    source.write_text(
        f"name: mine\ntask: classification\ndata: {data}\nmodel: {{kind: pretrained, source: '{bert[1]}'}}\n"
        "training: {epochs: 1, batch_size: 2, optimizer: {lr: 1.0e-3}, schedule: {kind: linear}}\n",
        encoding="utf-8",
    )
    recipe: Any = load_recipe(str(source))
    assert (recipe.model.vocab_size, recipe.model.max_positions) == (2, POSITIONS)
    assert recipe.tokenizer.path == str(bert[1] / "tokenizer.json") and len(recipe.model.weights_sha256) == 64
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(str(again)) == recipe


def test_other_weights_than_the_recipes_are_refused(bert: tuple[Any, Path]) -> None:
    from edgeformer.models.pretrained.adapter import ADAPTER

    recipe = recipe_of(bert[1], weights_sha256="0" * 64)
    built, _ = ADAPTER.build(recipe, Place())
    with pytest.raises(ArtifactError, match="weights_sha256"):
        ADAPTER.start(built, recipe)


def test_what_is_no_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json: missing"):
        open_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    with pytest.raises(InputError, match="model_type 'gpt2' is not known here; it can be albert, bert"):
        open_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"config\.json: max_position_embeddings is missing"):
        open_source(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(WHOLE), encoding="utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"has no model\.safetensors.*safe_serialization"):
        open_source(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ArtifactError, match="describes a model that is larger than the 10 bytes beside it"):
        open_source(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no weights" * 100)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: no safetensors file, or damaged"):
        open_source(str(tmp_path))
    whole = save({"embeddings.word_embeddings.weight": torch.zeros(9, 90)})
    (tmp_path / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: no safetensors file, or damaged"):
        open_source(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        open_source(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    from edgeformer.models.pretrained.model import pretrained

    with pytest.raises(ArtifactError, match="transformers cannot make a model of it"):
        pretrained(tmp_path, {**WHOLE, "hidden_act": "zzz"}, 2)


WHOLE = {
    "model_type": "bert", "num_hidden_layers": 4, "max_position_embeddings": 9, "vocab_size": 9, "hidden_size": 8,
    "num_attention_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"pairs": True, "separator": None}, "needs separator"),
        ({"fold": {"layers": 5, "iterations": 2}}, "has 4 layers"),
        ({"architecture": {**WHOLE, "model_type": "albert"}, "fold": {"layers": 1, "iterations": 4}}, "shared already"),
        ({"architecture": {"model_type": "t5"}}, "model_type must be one of"),
        ({"architecture": {**WHOLE, "num_hidden_layers": "many"}}, "num_hidden_layers is missing, or no whole number"),
        ({"max_positions": 10}, "the source takes at most 9 tokens"),
    ],
)
def test_models_that_cannot_be_are_refused(model: dict[str, Any], message: str) -> None:
    document = {"kind": "pretrained", "source": "x", "vocab_size": 9, "max_positions": 9, "architecture": WHOLE}
    with pytest.raises(ValueError, match=message):
        PretrainedConfig.model_validate({**document, **model})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is missing, or no whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads is missing, or no whole number"),
        ({"intermediate_size": 48.0}, "intermediate_size: input should be a valid integer"),
        ({"type_vocab_size": "x"}, "type_vocab_size: input should be a valid integer"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps: input should be a finite number"),
        ({"hidden_act": ["gelu"]}, "hidden_act: input should be a valid string"),
        ({"pad_token_id": 9999}, "pad_token_id: 9999 is no token of a vocabulary of 9"),
        ({"architectures": 5}, "architectures: input should be a valid list"),
        ({"id2label": ["a"]}, "id2label: input should be a valid dictionary"),
        ({"id2label": {"a": "x"}}, "id2label: must name the classes 0, 1, 2"),
        ({"is_decoder": True}, "is_decoder is True, which is not computed here"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"chunk_size_feed_forward": 7}, "chunk_size_feed_forward is 7"),
        ({"quantization_config": {"quant_method": "x"}}, "quantization_config is there"),
        ({"max_position_embeddings": 400_000_000}, "describes a model that is larger than the"),
        ({"type_vocab_size": 400_000_000}, "describes a model that is larger than the"),
        ({"num_labels": 400_000_000}, "describes a model that is larger than the"),
        ({"num_hidden_layers": 400_000_000}, "describes a model that is larger than the"),
        ({"vocab_size": 10}, r"vocab_size is 10, but embeddings\.word_embeddings\.weight in .* has shape \[9, 90\]"),
    ],
    ids=lambda told: "-".join(told) if isinstance(told, dict) else "",
)
def test_a_config_that_cannot_be_is_refused_before_anything_is_built(
    tmp_path: Path, told: dict[str, Any], message: str
) -> None:
    config = {**WHOLE, "position_embedding_type": "absolute", "chunk_size_feed_forward": 0, "is_decoder": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(save({"embeddings.word_embeddings.weight": torch.zeros(9, 90)}))
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert open_source(str(tmp_path)).vocabulary() == 2
    (tmp_path / "config.json").write_text(json.dumps({**config, **told}), encoding="utf-8")
    with pytest.raises(InputError, match=message) as refused:
        open_source(str(tmp_path))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_a_setting_that_transformers_stumbles_over_is_told() -> None:
    from edgeformer.models.pretrained.model import fresh

    for told in ({"num_attention_heads": 0}, {"layer_norm_eps": "x"}, {"pad_token_id": 99}, {"hidden_act": "zzz"}):
        with pytest.raises(ArtifactError, match="transformers cannot make a model of it: "):
            fresh({**WHOLE, **told}, 2)


def test_weights_within_the_encoder_that_go_unused_are_refused(bert: tuple[Any, Path], tmp_path: Path) -> None:
    from edgeformer.models.pretrained.model import pretrained

    folder = shutil.copytree(bert[1], tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    harmless = {"cls.predictions.bias": torch.zeros(3), "bert.embeddings.position_ids": torch.arange(POSITIONS)}
    save_file({**weights, **harmless}, folder / "model.safetensors", {"format": "pt"})
    config = open_source(str(folder)).config
    assert pretrained(folder, config, CLASSES)[1] == frozenset()
    distances = {"bert.encoder.layer.0.attention.self.distance_embedding.weight": torch.zeros(9, 8)}
    save_file({**weights, **distances}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"no encoder of its config\.json uses: .*distance_embedding\.weight"):
        pretrained(folder, config, CLASSES)


def test_a_path_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(InputError, match="is a file; name the folder that it is in"):
        open_source(str(file))
    monkeypatch.chdir(tmp_path)
    for name in ("./models", "/nowhere", "../x/y", "some/where/else", "models/x.safetensors", "~/m", "a\\b", "models/"):
        with pytest.raises(InputError, match="is no folder here, and no name of the hub's, which are OWNER/NAME"):
            open_source(name)
    with pytest.raises(InputError, match="is no folder"):
        open_source("x" * 5000)


def test_a_recipe_whose_source_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises((InputError, RecipeError), match=r"nowhere/at/all: is no folder here"):
        load_recipe("quickstart", ["model={kind: pretrained, source: nowhere/at/all}"])
