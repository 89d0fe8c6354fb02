"""The part of a recipe that is the embedding task's own."""

from __future__ import annotations

from typing import Literal

from edgeformer.formats.data_config import PairsConfig
from edgeformer.formats.recipe import Recipe, TrainingConfig


class EmbeddingRecipe(Recipe):
    """An encoder that makes one vector of a text. It was trained elsewhere: the ``training`` section is not used."""

    task: Literal["embedding"]
    data: PairsConfig
    training: TrainingConfig
