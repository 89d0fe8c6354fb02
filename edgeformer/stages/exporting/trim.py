"""A classifier with a trimmed vocabulary: fewer rows in its table, everything else as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edgeformer.data.trimming import Trimmed
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import write_json, write_text


def trim_model(model: EncoderClassifier, kept: NDArray[np.int64]) -> EncoderClassifier:
    """A model whose table has the rows ``kept`` of the other's; all other parameters are the same tensors, not copies.

    Args:
        kept: int64 [n], the old number of every token in the order of the new ones.
    """
    shared = [*model.parameters(), *model.buffers()]
    trimmed = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    trimmed.tokens = nn.Embedding(len(kept), model.tokens.embedding_dim)
    trimmed.tokens.weight = nn.Parameter(model.tokens.weight.detach()[torch.from_numpy(kept)])
    return trimmed.train(model.training)


def trimmed_companions(model_folder: Path, trimmed: Trimmed, target: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json for the trimmed vocabulary.

    Args:
        model_folder: the run's ``model``, whose files say everything else.

    Raises:
        ArtifactError: a file is missing or damaged, or names a token that was not kept.
    """
    config = _read(model_folder / "config.json")
    for key in [key for key, value in config.items() if key.endswith("_token_id") and value is not None]:
        config[key] = _new_number(trimmed, config[key], model_folder / "config.json", key)
    write_json(target / "config.json", {**config, "vocab_size": len(trimmed.kept)})
    described = _read(model_folder / "tokenizer_config.json")
    if "added_tokens_decoder" in described:
        source = model_folder / "tokenizer_config.json"
        described["added_tokens_decoder"] = {
            str(_new_number(trimmed, number, source, "added_tokens_decoder")): token
            for number, token in described["added_tokens_decoder"].items()
        }
    write_json(target / "tokenizer_config.json", described)
    write_text(target / "tokenizer.json", trimmed.tokenizer.to_str(pretty=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: missing or damaged ({error}); train the run again") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: damaged (an object is expected); train the run again")
    return content


def _new_number(trimmed: Trimmed, old: object, path: Path, key: str) -> int:
    found = [new for new, number in enumerate(trimmed.kept.tolist()) if str(number) == str(old)]
    if not found:
        raise ArtifactError(f"{path}: {key} {old!r} is no token of the trimmed vocabulary; train the run again")
    return found[0]
