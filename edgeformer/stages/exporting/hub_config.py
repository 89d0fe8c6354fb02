"""config.json of a bundle: what clients of Hugging Face repositories need to open it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeformer.formats.manifest import Precision

CLIENT_TYPE = "distilbert"
"""Clients only open a ``model_type`` that they know, and take from it which inputs to send. To them DistilBERT is any
text encoder that takes ``input_ids`` and ``attention_mask`` and nothing else, which is what our graphs are: the layers
themselves are in the graph, and no client of one looks at them."""

_ENCODER = "edgeformer-encoder"


def hub_config(config: Mapping[str, Any], precision: Precision = "fp32") -> dict[str, Any]:
    """The bundle's config.json from the run's.

    A classifier's says ``distilbert`` to clients (see :data:`CLIENT_TYPE`) and keeps its true description under
    ``edgeformer``. A language model's stays as it is: no client knows its caches, so none could run it anyway.

    Args:
        config: the run's config.json; with the vocabulary's new size where that was trimmed.
        precision: of the graph that a client gets which does not ask for one.
    """
    if config.get("model_type") != _ENCODER:
        return dict(config)
    return {
        "model_type": CLIENT_TYPE,
        "architectures": config["architectures"],
        "problem_type": "single_label_classification",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["layers"] * config["iterations"],
        "iterations": config["iterations"],  # how often a host runs the loop graph of a step bundle
        "num_attention_heads": config["heads"],
        "max_position_embeddings": config["max_positions"],
        "pad_token_id": config["pad_token_id"],
        "id2label": config["id2label"],
        "label2id": config["label2id"],
        # In a browser Transformers.js would otherwise look for a file that is not there (model_quantized.onnx).
        "transformers.js_config": {"dtype": precision},
        "edgeformer": dict(config),
    }
