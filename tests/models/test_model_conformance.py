"""Every model passes the conformance suite: the built-in ones, and one from another package."""

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from edgeformer import registry
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import REGISTRY, ModelSpec, model_spec_of, recipe_type
from tests.fakes.install import MODELS, installed
from tests.models import conformance
from tests.models.conformance import Case

SLOW = ("check_graphs", "check_fp16", "check_shared_weights")
CHECKS = {name: check for name, check in vars(conformance).items() if name.startswith("check_")}

SIZES: dict[str, dict[str, Any]] = {
    "encoder": {
        "hidden_size": 16, "layers": 1, "iterations": 2, "heads": 2, "ffn_size": 24, "residual_scale": 0.5,
    },
    "crt": {
        "hidden_size": 32, "embedding_size": 16, "embedding_cycles": 1, "attention_heads": 4, "ffn_size": 48,
        "loops": 3, "cycles": 2, "dilations": [1, 4], "exits": [1], "heads": "shared",
    },
    "decoder": {
        "hidden_size": 32, "layers": 2, "iterations": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48, "tied": False,
    },
    "linear": {"ngrams": [1, 3]},
    "pretrained": {
        "source": "unused", "fold": {"layers": 2, "iterations": 2, "own": "norms"}, "pooling": "mean",
        "architecture": {
            "model_type": "bert", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 80,
        },
    },
}  # fmt: skip
"""A tiny model of each built-in kind; other packages define ``TINY`` beside ``MODEL``."""
BUILT_IN = [model_spec.kind for model_spec in REGISTRY.built_in()]
with installed(*MODELS):
    SIZES |= {model_spec.kind: import_module(type(model_spec).__module__).TINY for model_spec in REGISTRY.announced()}
KINDS = [*BUILT_IN, *(kind for kind in SIZES if kind not in BUILT_IN)]
ENCODERS: dict[str, dict[str, Any]] = {
    "mpnet": {"max_position_embeddings": 82, "pad_token_id": 1},
    "deberta-v2": {
        "relative_attention": True, "position_biased_input": False, "share_att_key": True, "type_vocab_size": 0,
        "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "position_buckets": 16,
    },
}  # fmt: skip
"""Further pretrained encoders with layers of their own, whose positions are relative."""

REVIEWS = {"kind": "synthetic-reviews", "rows": 150}
LABELLED = {"parts": {"train": [REVIEWS]}, "split": "random-split", "labels": ["a", "b"], "max_length": 32}
TEXT = {
    "parts": {"train": [REVIEWS], "validation": [{**REVIEWS, "seed": 1}]},
    "mode": "packed", "sequence_length": 32, "min_characters": 20,
}  # fmt: skip
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}
DATA = {"classification": (LABELLED, "wordpiece"), "language-modeling": (TEXT, "bpe")}


def recipe_of(model_spec: ModelSpec, task: str, **changes: Any) -> Any:
    data, algorithm = DATA[task]
    is_fitted = model_spec.training_type is not None
    document = {
        "name": f"tiny-{model_spec.kind}",
        "task": task,
        "data": data,
        "tokenizer": {"kind": "trained", "algorithm": "words" if is_fitted else algorithm},
        "model": {"kind": model_spec.kind, "vocab_size": 320, "max_positions": 80, **SIZES[model_spec.kind], **changes},
        "training": {} if is_fitted else TRAINING,
    }
    return recipe_type(task, model_spec.kind).model_validate(document, strict=False)


@pytest.fixture(scope="module", autouse=True)
def _averaging() -> Iterator[None]:
    with installed(*MODELS):
        yield


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ENCODERS)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, changes = request.param, {}
    if kind in ENCODERS:
        architecture = {**SIZES["pretrained"]["architecture"], "model_type": kind, **ENCODERS[kind]}
        kind, changes = "pretrained", {"architecture": architecture}
    model_spec = next(model_spec for model_spec in REGISTRY.all() if model_spec.kind == kind)
    return Case(recipe_of(model_spec, model_spec.tasks[0], **changes), tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    "check", [pytest.param(check, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, check in CHECKS.items()]
)
def test_model(check: Callable[..., None], case: Case, tmp_path: Path) -> None:
    check(case, *([tmp_path] if len(inspect.signature(check).parameters) > 1 else []))


def test_every_registered_model_is_checked() -> None:
    assert [model_spec.kind for model_spec in REGISTRY.all()] == KINDS
    assert "averaging" in KINDS and set(SIZES) == set(KINDS)


def test_model_of_a_missing_package_is_unknown() -> None:
    model_spec = REGISTRY.all()[-1]
    recipe = recipe_of(model_spec, "classification")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda group: [])
        registry._announced.cache_clear()
        with pytest.raises(RecipeError, match=r"model\.kind 'averaging' is unknown; available models: crt, decoder"):
            model_spec_of(recipe)
    registry._announced.cache_clear()
    assert model_spec_of(recipe) is model_spec
