"""Import decoders: Hugging Face folders of Llama, Qwen2, Qwen3 and Nanbeige, and GGUF files of these.

Weights become those of a :class:`~edgeformer.models.decoder.model.DecoderModel`; nothing in the files is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models
from torch import Tensor

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, sha256_of
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import (
    CONFIG_FILE,
    MOST_JSON_BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    free_folder,
    read_tokenizer_config,
)
from edgeformer.data.byte_pairs import SPLITS
from edgeformer.data.source_folder import ConfigFile, find_folder, read_object
from edgeformer.data.tokenization import embedding_rows, tokenizer_from_file
from edgeformer.export.import_run import ImportOptions, write_language_run
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.gguf import LOOPED
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.models.pretrained.source import weights_sha256

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "NanbeigeForCausalLM": LOOPED,
}  # fmt: skip
"""Class in config.json → llama.cpp's name of the architecture."""
_BASE = "looped_mini"
_MOST_POSITIONS = 1 << 20
_CONTROL = 3
"""llama.cpp's type of special tokens."""
Size = Annotated[int, Field(ge=1)]


class LanguageFile(ConfigFile):
    """Keys of a decoder's config.json."""

    architectures: list[str]
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    max_position_embeddings: Size
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    num_loops: Size = 1
    skip_loop_final_norm: bool = False
    quantization_config: Any = None


def is_language_model(source: str) -> bool:
    """Return whether a folder or a model of the hub is a decoder that can be imported."""
    folder = find_folder(source)
    architectures = read_object(folder / CONFIG_FILE).get("architectures")
    return isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)


def import_causal_lm(source: str, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of the decoder in a folder, or of that name on the hub, and return its folder.

    Raises InputError for an unsupported computation, ArtifactError for a missing or damaged file.
    """
    folder = find_folder(source)
    path = folder / CONFIG_FILE
    try:
        sizes = LanguageFile.model_validate(read_object(path))
    except ValidationError as error:
        raise ArtifactError(f"{path}: {first_problem(error)}") from None
    rope = {**(sizes.rope_scaling or {}), **(sizes.rope_parameters or {})}
    unsupported = {
        "hidden_act": sizes.hidden_act != "silu",
        "attention_bias": sizes.attention_bias,
        "mlp_bias": sizes.mlp_bias,
        "use_sliding_window": sizes.use_sliding_window,
        "skip_loop_final_norm": sizes.skip_loop_final_norm and sizes.num_loops > 1,
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "quantization_config": sizes.quantization_config is not None,
    }
    for key in (key for key, is_set in unsupported.items() if is_set):
        raise InputError(f"{path}: {key} is set in a way that edgeformer does not compute; use another model")
    architecture = next(ARCHITECTURES[name] for name in sizes.architectures if name in ARCHITECTURES)
    config = _config(
        path,
        vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, layers=sizes.num_hidden_layers,
        iterations=sizes.num_loops, heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads or sizes.num_attention_heads, head_size=sizes.head_dim,
        ffn_size=sizes.intermediate_size, tied=sizes.tie_word_embeddings, qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3", max_positions=sizes.max_position_embeddings,
        rope_theta=float(rope.get("rope_theta") or sizes.rope_theta or 10_000.0), norm_eps=sizes.rms_norm_eps,
    )  # fmt: skip
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: has no safetensors, the only format that is read; save it with save_pretrained")
    if config.vocab_size * config.hidden_size > sum(file.stat().st_size for file in files):
        raise ArtifactError(f"{path}: describes a larger model than its weights")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{file}: cannot be read as safetensors: {error}; copy it again") from None
    names = {
        "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "lm_head": "output",
    }  # fmt: skip
    renamed = {}
    for name, tensor in weights.items():
        place, _, kind = re.sub(r"^model\.", "", name).rpartition(".")
        layer = re.match(r"layers\.(\d+)\.(.*)", place)
        prefix, part = (f"blk.{layer[1]}.", layer[2]) if layer else ("", place)
        if part in names:
            renamed[f"{prefix}{names[part]}.{kind}"] = tensor.float()
    model = _model(config, renamed, str(folder))
    name = Path(source).resolve().name if Path(source).is_dir() else source.rsplit("/", 1)[-1]
    tokenizer = options.tokenizer or folder / TOKENIZER_FILE
    described = read_tokenizer_config(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        described["chat_template"] = read_at_most(template, MOST_JSON_BYTES).decode("utf-8", "replace")
    return _write(model, name, ImportOptions(options.artifacts, options.name, tokenizer, options.data), progress,
                  sha256=weights_sha256(folder), tokenizer=_fitting(tokenizer_from_file(tokenizer), model),
                  described=described)  # fmt: skip


def import_gguf(path: Path, options: ImportOptions, progress: Progress = SILENT) -> Path:
    """Make a finished run of a GGUF file, whose weights are dequantised, and return its folder.

    Raises InputError for an unsupported computation or quantisation, ArtifactError for a missing or damaged file.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: does not exist; give a GGUF file")
    with needs_extra("llamacpp", "reading GGUF files"):
        import gguf
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader raises many types for damaged files
        raise ArtifactError(f"{path}: is damaged or no GGUF file: {error}; copy it again") from None
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES.values():
        supported = ", ".join(ARCHITECTURES.values())
        raise InputError(f"{path}: has the architecture {architecture[:40]}; supported are {supported}")
    values = {name.removeprefix(f"{architecture}."): value for name, value in fields.items()}
    if values.get("skip_loop_final_norm") or values.get("rope.scaling.type") not in (None, "none"):
        raise InputError(f"{path}: scales its rotary positions, or has no norm between loops; use another model")
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    try:
        config = _config(
            path,
            vocab_size=len(values["tokenizer.ggml.tokens"]), hidden_size=values["embedding_length"],
            layers=values["block_count"], iterations=values.get("num_loops", 1), heads=values["attention.head_count"],
            kv_heads=values.get("attention.head_count_kv", values["attention.head_count"]),
            head_size=values.get("attention.key_length"), ffn_size=values["feed_forward_length"],
            tied="output.weight" not in shapes, qkv_bias="blk.0.attn_q.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes, max_positions=values["context_length"],
            rope_theta=values.get("rope.freq_base", 10_000.0), norm_eps=values["attention.layer_norm_rms_epsilon"],
        )  # fmt: skip
    except KeyError as error:
        raise ArtifactError(f"{path}: lacks {error.args[0]}; copy it again") from None
    weights = {}
    for tensor in reader.tensors:
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise InputError(
                f"{path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which the package gguf does not "
                "read; use a file in F16, Q8_0, Q4_0 or Q4_1"
            ) from None
        rows = torch.from_numpy(np.array(array, dtype=np.float32))
        matched = re.fullmatch(r".*attn_([qk])\.(weight|bias)", tensor.name)
        if matched and architecture in ("llama", LOOPED):  # neighbours become halves again
            heads = config.heads if matched[1] == "q" else config.kv_heads
            if len(rows) % (2 * heads) == 0:  # else its shape is refused below
                rows = rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        weights[tensor.name] = rows
    model = _model(config, weights, str(path))
    given = options.tokenizer
    tokenizer = tokenizer_from_file(given) if given is not None else _gguf_tokenizer(values, path)
    described = {"chat_template": values.get("tokenizer.chat_template")}
    for kind in ("bos", "eos"):
        number = values.get(f"tokenizer.ggml.{kind}_token_id")
        described[f"{kind}_token"] = tokenizer.id_to_token(number) if number is not None else None
    return _write(model, path.stem, options, progress, sha256=sha256_of(path), tokenizer=_fitting(tokenizer, model),
                  described=described)  # fmt: skip


def _config(path: Path, **sizes: Any) -> DecoderConfig:
    """Return the configuration of a model without early exits.

    Raises ArtifactError if its sizes do not fit, InputError if it takes too many tokens.
    """
    try:
        config = DecoderConfig(kind="decoder", exits=(), **sizes)
    except ValidationError as error:
        raise ArtifactError(f"{path}: {first_problem(error)}") from None
    if config.max_positions > _MOST_POSITIONS:
        raise InputError(f"{path}: takes {config.max_positions:,} tokens; at most {_MOST_POSITIONS:,} are supported")
    return config


def _model(config: DecoderConfig, weights: Mapping[str, Tensor], source: str) -> DecoderModel:
    """Return a model with weights by llama.cpp's names. Raises ArtifactError: one is missing or of another shape."""
    state: dict[str, Tensor] = {}
    try:
        state["tokens.weight"], state["norm.weight"] = weights["token_embd.weight"], weights["output_norm.weight"]
        if not config.tied:
            state["head.weight"] = weights["output.weight"]
        for number in range(config.layers):
            layer, own = f"layers.{number}.", partial("blk.{}.{}".format, number)
            for kind in ("weight", *(["bias"] if config.qkv_bias else [])):
                parts = [weights[own(f"attn_{part}.{kind}")] for part in "qkv"]
                state[f"{layer}attention.qkv.{kind}"] = torch.cat(parts)
            for part in "qk" if config.qk_norm else "":
                state[f"{layer}attention.{part}_norm.weight"] = weights[own(f"attn_{part}_norm.weight")]
            names = {"norm1": "attn_norm", "norm2": "ffn_norm", "attention.out": "attn_output", "ffn.w3": "ffn_down"}
            state |= {f"{layer}{name}.weight": weights[own(f"{other}.weight")] for name, other in names.items()}
            halves = [weights[own(f"ffn_{part}.weight")] for part in ("gate", "up")]
            state[f"{layer}ffn.w12.weight"] = torch.cat(halves)
    except KeyError as error:
        raise ArtifactError(f"{source}: lacks the weights {error.args[0]}; copy it again") from None
    except RuntimeError as error:
        raise ArtifactError(f"{source}: its weights do not fit together: {error}; copy it again") from None
    with torch.device("meta"):  # sizes that the file does not fill must not take memory
        expected = DecoderModel(config).state_dict()
    for name, tensor in expected.items():
        if (shape := state[name].shape) != tensor.shape:
            raise ArtifactError(f"{source}: {name} is {list(shape)}, not {list(tensor.shape)}; copy it again")
    model = DecoderModel(config).eval()
    model.load_state_dict(state)
    return model


def _gguf_tokenizer(values: Mapping[str, Any], path: Path) -> Tokenizer:
    """Build the byte-level BPE tokenizer of a GGUF file. Raises InputError for another kind."""
    kind, splits = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or splits not in SPLITS:
        raise InputError(
            f"{path}: has the tokenizer {str(kind)[:40]} ({str(splits)[:40]}), which is not read; give the model's "
            "tokenizer.json with --tokenizer"
        )
    tokens, types = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.token_type", ())
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", ())]
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ArtifactError(f"{path}: its tokenizer is damaged: {error}; copy it again, or use --tokenizer") from None
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[splits](), decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=False) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _fitting(tokenizer: Tokenizer, model: DecoderModel) -> Tokenizer:
    """Return the tokenizer. Raises InputError: it has more tokens than the model."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (size := embedding_rows(tokenizer)) > model.config.vocab_size:
        raise InputError(
            f"the tokenizer has {size} tokens, more than the model's {model.config.vocab_size}; use its own"
        )
    return tokenizer


def _write(
    model: DecoderModel, name: str, options: ImportOptions, progress: Progress, *, sha256: str, tokenizer: Tokenizer,
    described: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Write the run. ``described``: keys of a tokenizer_config.json, of which those about chats are kept."""
    if isinstance(templates := described.get("chat_template"), list):
        described = {
            **described,
            "chat_template": {each["name"]: each["template"] for each in templates}.get("default"),
        }
    kept = {key: described[key] for key in ("bos_token", "eos_token", "chat_template") if described.get(key)}
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("._-")[:60] or "imported"
    free = partial(free_folder, options.artifacts, options.name, slug, or_else="")
    free()  # fails early if the name is taken
    return write_language_run(
        free, _BASE, slug, model, options, progress, description=f"a decoder, imported from {name}", origin=name,
        sha256=sha256, tokenizer=tokenizer, tokenizer_config=kept,
    )  # fmt: skip
