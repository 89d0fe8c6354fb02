"""Every family does what a family must: the built-in ones, and one that another package brings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from edgeformer.families import ROOM, Family, recipe_type
from edgeformer.formats.errors import RecipeError
from tests.fakes.install import FAMILIES, installed
from tests.families import conformance
from tests.families.conformance import Case, make_case

CHECKS = {name: check for name, check in vars(conformance).items() if name.startswith("check_")}

SIZES: dict[str, dict[str, Any]] = {
    "encoder": {
        "hidden_size": 16, "layers": 1, "iterations": 2, "heads": 2, "ffn_size": 24, "residual_scale": 0.5,
    },
    "crt": {
        "hidden_size": 32, "embedding_size": 16, "embedding_cycles": 1, "attention_heads": 4, "ffn_size": 48,
        "loops": 3, "cycles": 2, "dilations": [1, 4], "exits": [1], "heads": "shared",
    },
    "pretrained": {
        "source": "made here", "fold": {"layers": 2, "iterations": 2, "own": "norms"}, "pooling": "mean",
        "architecture": {
            "model_type": "bert", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 80,
        },
    },
}  # fmt: skip
"""A tiny model of each built-in family; others have a ``TINY`` beside their ``FAMILY``."""
BUILT_IN = [family.kind for family in ROOM.built_in()]
with installed(*FAMILIES):
    SIZES |= {family.kind: import_module(type(family).__module__).TINY for family in ROOM.announced()}
KINDS = [*BUILT_IN, *(kind for kind in SIZES if kind not in BUILT_IN)]

REVIEWS = {"kind": "synthetic-reviews", "rows": 150}
LABELLED = {"parts": {"train": [REVIEWS]}, "split": "random-split", "labels": ["a", "b"], "max_length": 32}
TEXT = {
    "parts": {"train": [REVIEWS], "validation": [{**REVIEWS, "seed": 1}]},
    "mode": "packed", "sequence_length": 32, "min_characters": 20,
}  # fmt: skip
TRAINING = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}
DATA = {"classification": (LABELLED, "wordpiece"), "language-modeling": (TEXT, "bpe")}


def recipe_of(family: Family, task: str) -> Any:
    data, algorithm = DATA[task]
    document = {
        "name": f"tiny-{family.kind}",
        "task": task,
        "data": data,
        "tokenizer": {"kind": "trained", "algorithm": algorithm},
        "model": {"kind": family.kind, "vocab_size": 320, "max_positions": 80, **SIZES[family.kind]},
        "training": TRAINING,
    }
    return recipe_type(task, family.kind).model_validate(document, strict=False)


@pytest.fixture(scope="module", autouse=True)
def _averaging() -> Iterator[None]:
    with installed(*FAMILIES):
        yield


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = next(family for family in ROOM.all() if family.kind == request.param)
    return make_case(recipe_of(family, family.tasks[0]), tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_family(check: Callable[..., None], case: Case, tmp_path: Path) -> None:
    check(case, *([tmp_path] if len(inspect.signature(check).parameters) > 1 else []))


def test_every_family_is_checked_and_an_announced_one_comes_last() -> None:
    assert [family.kind for family in ROOM.all()] == KINDS
    assert "averaging" in KINDS and set(SIZES) == set(KINDS)


def test_without_its_package_a_family_is_unknown() -> None:
    family = ROOM.all()[-1]
    recipe = recipe_of(family, "classification")
    from edgeformer import discovery
    from edgeformer.families import family_of

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "entry_points", lambda group: [])
        discovery._announced.cache_clear()
        with pytest.raises(RecipeError, match=r"model\.kind 'averaging' is no family .*: crt, encoder"):
            family_of(recipe)
    discovery._announced.cache_clear()
    assert family_of(recipe) is family
