"""What weights are made of beside texts: a tokenizer, the weights that they start from, a teacher; by checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.data.tokenization import fingerprint
from edgeformer.families.pretrained.source import WEIGHTS, open_source
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.workspace import MODEL_FOLDER
from edgeformer.run import locate


@dataclass
class Origins:
    """Checksums of what recipes take from elsewhere, each file read once.

    Attributes:
        artifacts: where a teacher is looked for by its name.
    """

    artifacts: Path
    _known: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, recipe: Recipe, tokenizer: Tokenizer, *, taught_by_row: bool) -> dict[str, str]:
        """What the recipe's weights are made of: ``tokenizer``, ``source``, ``teacher`` → sha256.

        Args:
            tokenizer: the recipe's. One that is trained is left out: the texts and the recipe decide it.
            taught_by_row: its teacher is another row of the study, which has a key of its own.

        Raises:
            InputError, ArtifactError: the source or the teacher is not there.
        """
        found = {} if recipe.tokenizer.kind == "trained" else {"tokenizer": fingerprint(tokenizer)}
        source, teacher = getattr(recipe.model, "source", None), getattr(recipe.training, "teacher", None)
        if source is not None:
            found["source"] = self._once("source", source)
        if teacher is not None and not taught_by_row:
            found["teacher"] = self._once("teacher", teacher)
        return found

    def _once(self, what: str, name: str) -> str:
        if (what, name) not in self._known:
            known = open_source(name).weights_sha256() if what == "source" else self._teacher(name)
            self._known[what, name] = known
        return self._known[what, name]

    def _teacher(self, name: str) -> str:
        weights = locate(name, self.artifacts).require_run() / MODEL_FOLDER / WEIGHTS
        if not weights.is_file():
            raise ArtifactError(f"training.teacher: {name}: has no weights ({weights})")
        return sha256_of(weights)


def told_of(origins: Mapping[str, str]) -> str:
    """As a key has it; nothing where there is nothing."""
    return "".join(f" {name}:{sha256}" for name, sha256 in sorted(origins.items()))
