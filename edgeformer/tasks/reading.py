"""How a trained model reads text, and what is known of the text that it was trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from edgeformer.data.encoding import Rows
from edgeformer.data.labelled import LabelledTexts
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import DataFinding

if TYPE_CHECKING:  # answering from a bundle reads no data sets
    from edgeformer.data.sources import Columns


@dataclass(frozen=True)
class TextReader:
    """How a trained model reads text: its tokenizer, the token that fills up rows, and how many tokens it knows."""

    tokenizer: Tokenizer
    pad: int
    vocabulary: int


@dataclass(frozen=True)
class Origin:
    """What is known of a trained model's data.

    Attributes:
        cache: where encoded sets are kept; None: nowhere.
        trained_on: set → fingerprint, as training recorded it; other data cut by the same protocol is refused.
        as_trained: cut the text as training did. Exported graphs read every document by itself.
    """

    cache: Path | None = None
    trained_on: Mapping[str, str] = field(default_factory=dict)
    as_trained: bool = False


class OwnData(ABC):
    """What a task does with files that a user has. ``data`` is of the task's own type."""

    @abstractmethod
    def local_data(self, data: Any, folder: Path) -> tuple[Any, list[str]]:
        """``--data DIR``: the same data section on the files of a folder, and notes. Raises DataError."""

    def known_sets(self, data: Any) -> dict[str, LabelledTexts]:
        """The texts of every set that is there for a model which was trained elsewhere. Raises DataError."""
        return {}

    def set_texts(self, data: Any, name: str) -> LabelledTexts:
        """Read one set, not encoded: ``train``, ``validation`` or a test set by its own name.

        Pairs of an embedding model are flat: rows 2i and 2i + 1 are pair i. A language model's labels are all 0.

        Raises:
            DataError: it cannot be read, or nothing is known of it.
            InputError: a task without texts.
        """
        raise InputError("this model reads no text")

    def file_texts(self, data: Any, path: Path) -> LabelledTexts:
        """Read a labelled or plain file, not encoded; with the columns and labels of ``data``. Raises as set_texts."""
        raise InputError("this model reads no text")

    def encode_rows(self, data: Any, reader: TextReader, texts: LabelledTexts) -> Rows:
        """Encode such texts as exported artifacts read them. Labels are indices into those of ``data``."""
        raise InputError("this model reads no text")

    def findings(self, data: Any) -> Sequence[DataFinding]:
        """What the owner of the data should know of it, which is read for that. Raises DataError."""
        return ()

    @abstractmethod
    def read_file(
        self, data: Any, reader: TextReader, path: Path, columns: Columns | None = None, *, as_trained: bool = False
    ) -> Rows:
        """Encode a labelled or plain file as the model's own sets were.

        Args:
            columns: those that the user named; None: there is no way to name any.

        Raises:
            DataError: the file, its columns or its rows.
        """
