"""Import decoders: Hugging Face folders of Llama, Qwen2, Qwen3 and Nanbeige, and GGUF files of these.

Weights become those of a :class:`~edgeformer.models.decoder.model.DecoderModel`; nothing in the files is executed.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, sha256_of
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import (
    CONFIG_FILE,
    MOST_JSON_BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    free_folder,
    read_tokenizer_config,
)
from edgeformer.data.byte_pairs import IGNORES_MERGES, SPLITS
from edgeformer.data.encoding import PlainText
from edgeformer.data.source_folder import find_folder, read_object
from edgeformer.data.tokenization import BEGIN_IDS, END_IDS, TextBounds, embedding_rows, tokenizer_from_file
from edgeformer.export.import_run import ImportOptions, write_language_run
from edgeformer.export.language_keys import (
    ARCHITECTURES,
    DEFAULTS,
    GGUF_KEYS,
    NEUTRAL_GGUF_KEYS,
    NEUTRAL_GGUF_VALUES,
    NEUTRAL_KEYS,
    REFUSED_KEYS,
    UNAPPLIED_KEYS,
    LanguageFile,
)
from edgeformer.export.language_proof import COMPUTED_TOKENS, prove_by_llama, prove_by_transformers
from edgeformer.export.proof import unproven
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.gguf import LOOPED
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.models.pretrained.source import WEIGHTS, weights_sha256
from edgeformer.runtimes.llamacpp.library import XLLAMACPP, Llama

_BASE = "looped_mini"
_MOST_POSITIONS = 1 << 20
_SPECIAL, _USER_DEFINED = (2, 3), 4
"""llama.cpp's types of tokens that are found in a text by their names: unknown and control, user-defined."""
_SAME_SPLITS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "smaug-bpe": "dbrx"}
"""Further names of :data:`~edgeformer.data.byte_pairs.SPLITS` in GGUF files."""


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
    document: dict[str, Any] = read_object(path)
    architecture = next(ARCHITECTURES[name] for name in document["architectures"] if name in ARCHITECTURES)
    try:
        sizes = LanguageFile.model_validate({**DEFAULTS.get(architecture, {}), **document})
    except ValidationError as error:
        raise ArtifactError(f"{path}: {first_problem(error)}") from None
    for key in (key for key, is_refused in REFUSED_KEYS.items() if is_refused(sizes)):
        raise InputError(f"{path}: {key} is set in a way that edgeformer does not compute; use another model")
    # Other keys have no effect in transformers' own classes, but may have one in code that comes with a model.
    unknown = sorted(document.keys() - NEUTRAL_KEYS - LanguageFile.model_fields.keys())
    if unknown and architecture == LOOPED and not options.unproven:
        raise InputError(
            f"{path}: has keys that edgeformer does not know: {', '.join(unknown)[:200]}; import it all the same, "
            "marked as unproven, with --unproven"
        )
    config = _config(
        path,
        vocab_size=sizes.vocab_size, hidden_size=sizes.hidden_size, layers=sizes.num_hidden_layers,
        iterations=sizes.num_loops, heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads or sizes.num_attention_heads, head_size=sizes.head_dim,
        ffn_size=sizes.intermediate_size, tied=sizes.tie_word_embeddings, qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3", max_positions=sizes.max_position_embeddings,
        rope_theta=float(sizes.rope.get("rope_theta") or sizes.rope_theta or 10_000.0), norm_eps=sizes.rms_norm_eps,
    )  # fmt: skip
    index = folder / f"{WEIGHTS}.index.json"
    listed = {WEIGHTS} if (folder / WEIGHTS).is_file() else set()
    if index.is_file() and not listed:
        listed = set(map(str, read_object(index).get("weight_map", {}).values()))
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.name in listed or not listed]
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
    renamed, unused = {}, []
    for name, tensor in weights.items():
        place, _, kind = re.sub(r"^model\.", "", name).rpartition(".")
        layer = re.match(r"layers\.(\d+)\.(.*)", place)
        prefix, part = (f"blk.{layer[1]}.", layer[2]) if layer else ("", place)
        if part in names:
            renamed[f"{prefix}{names[part]}.{kind}"] = tensor.float()
        elif not name.endswith("rotary_emb.inv_freq"):  # computed from rope_theta
            unused.append(name)
    if config.tied:  # as transformers ties the two: from the one that exists; both, if different, stay apart
        head, table = renamed.pop("output.weight", None), renamed.get("token_embd.weight")
        if head is not None and table is None:
            renamed["token_embd.weight"] = head
        elif head is not None and table is not None and not torch.equal(head, table):
            config, renamed["output.weight"] = config.model_copy(update={"tied": False}), head
    model = _model(config, renamed, str(folder), unused)
    name = Path(source).resolve().name if Path(source).is_dir() else source.rsplit("/", 1)[-1]
    generation_path = folder / "generation_config.json"
    generation = read_object(generation_path) if generation_path.is_file() else {"eos_token_id": sizes.eos_token_id}
    if unapplied := [key for key in generation if key in UNAPPLIED_KEYS and generation[key] not in (None, 0, 1, [])]:
        progress.message(
            f"{generation_path.name}: {', '.join(unapplied)} is not applied; edgeformer samples as asked for"
        )
    described = read_tokenizer_config(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        described["chat_template"] = read_at_most(template, MOST_JSON_BYTES).decode("utf-8", "replace")
    tokenizer = _fitting(_hf_tokenizer(folder), model)
    added = tokenizer.encode("a").special_tokens_mask
    begin = [*itertools.takewhile(bool, added)]
    if sum(added) != len(begin):
        raise InputError(
            f"{folder / TOKENIZER_CONFIG}: the tokenizer ends every text with a token, so a model cannot "
            "continue it; remove the token from post_processor in tokenizer.json"
        )
    ends = generation.get("eos_token_id")
    described[BEGIN_IDS] = tokenizer.encode("a").ids[: len(begin)]
    described[END_IDS] = [ends] if isinstance(ends, int) else [*(ends or ())]
    plain = PlainText(tokenizer, TextBounds.of(tokenizer, described))
    proof = prove_by_transformers(folder, model, plain, allow=options.unproven, progress=progress)
    return _write(model, name, options, progress, sha256=weights_sha256(folder), tokenizer=tokenizer,
                  described=described, proof=proof)  # fmt: skip


def _hf_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that transformers makes of a folder; without transformers, that of tokenizer.json.

    Classes that tokenizer_config.json names build parts of it anew, such as what is put in front of a text.
    """
    tokenizer = tokenizer_from_file(folder / TOKENIZER_FILE)
    if util.find_spec("transformers") is not None:
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):  # of any type; the proof names it
            tokenizer = Tokenizer.from_str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    return tokenizer


def _put_in_front(tokenizer: Tokenizer, token: str | None) -> None:
    """Let the tokenizer put a token in front of every text, or none."""
    number = tokenizer.token_to_id(token) if token is not None else None
    pieces = ["$A:0"] if number is None else [f"{token}:0", "$A:0"]
    tokens = [] if number is None else [(token, number)]
    tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=tokens)


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
    for key, value in values.items():
        if key in GGUF_KEYS or key.startswith(NEUTRAL_GGUF_KEYS) or value in NEUTRAL_GGUF_VALUES.get(key, ()):
            continue
        raise InputError(
            f"{path}: {key} = {str(value)[:40]} asks for what edgeformer does not compute; use another model"
        )
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
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, config.head_width) != config.head_width:
            raise InputError(
                f"{path}: {key} is {values[key]}, not the {config.head_width} of a head; use another model"
            )
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
    if (factors := weights.get("rope_freqs.weight")) is not None and bool((factors == 1).all()):
        del weights["rope_freqs.weight"]
    model = _model(config, weights, str(path))
    given = options.tokenizer
    tokenizer = _fitting(tokenizer_from_file(given) if given is not None else _gguf_tokenizer(values, path), model)
    described: dict[str, Any] = {"chat_template": values.get("tokenizer.chat_template")}
    ids = {kind: values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom")}
    numbers = {kind: int(number) for kind, number in ids.items() if number is not None}
    described |= {f"{kind}_token": tokenizer.id_to_token(numbers[kind]) for kind in ("bos", "eos") if kind in numbers}
    splits = str(values.get("tokenizer.ggml.pre"))
    adds_begin = values.get("tokenizer.ggml.add_bos_token", _SAME_SPLITS.get(splits, splits) in IGNORES_MERGES)
    _put_in_front(tokenizer, described.get("bos_token") if adds_begin else None)
    described[BEGIN_IDS] = [numbers["bos"]] if adds_begin and "bos" in numbers else []
    described[END_IDS] = [number for kind, number in numbers.items() if kind != "bos"]
    with contextlib.ExitStack() as stack:
        llama, problem = None, XLLAMACPP.missing()
        if problem is None:
            opened = Llama(path, 1, min(config.max_positions, COMPUTED_TOKENS), exact=True)
            llama = stack.enter_context(contextlib.closing(opened))
            described[END_IDS] = llama.end_tokens()  # it also knows some by their names
        plain = PlainText(tokenizer, TextBounds.of(tokenizer, described))
        proof = unproven(str(problem))
        if llama is not None:
            kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
            proof = prove_by_llama(llama, kinds, model, plain, allow=options.unproven, progress=progress)
    return _write(model, path.stem, options, progress, sha256=sha256_of(path), tokenizer=tokenizer,
                  described=described, proof=proof)  # fmt: skip


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


def _model(config: DecoderConfig, weights: dict[str, Tensor], source: str, unused: Sequence[str] = ()) -> DecoderModel:
    """Return a model with weights by llama.cpp's names.

    Raises:
        ArtifactError: one is missing or of another shape.
        InputError: one is not used, or there are ``unused`` ones.
    """
    state: dict[str, Tensor] = {}
    try:
        state["tokens.weight"], state["norm.weight"] = (
            weights.pop("token_embd.weight"),
            weights.pop("output_norm.weight"),
        )
        if not config.tied:
            state["head.weight"] = weights.pop("output.weight")
        for number in range(config.layers):
            layer, own = f"layers.{number}.", partial("blk.{}.{}".format, number)
            for kind in ("weight", *(["bias"] if config.qkv_bias else [])):
                parts = [weights.pop(own(f"attn_{part}.{kind}")) for part in "qkv"]
                state[f"{layer}attention.qkv.{kind}"] = torch.cat(parts)
            for part in "qk" if config.qk_norm else "":
                state[f"{layer}attention.{part}_norm.weight"] = weights.pop(own(f"attn_{part}_norm.weight"))
            names = {"norm1": "attn_norm", "norm2": "ffn_norm", "attention.out": "attn_output", "ffn.w3": "ffn_down"}
            state |= {f"{layer}{name}.weight": weights.pop(own(f"{other}.weight")) for name, other in names.items()}
            halves = [weights.pop(own(f"ffn_{part}.weight")) for part in ("gate", "up")]
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
    if unused := [*weights, *unused]:
        raise InputError(
            f"{source}: has weights that edgeformer does not use: {', '.join(unused)[:300]}; use another model"
        )
    model = DecoderModel(config).eval()
    model.load_state_dict(state)
    return model


def _gguf_tokenizer(values: Mapping[str, Any], path: Path) -> Tokenizer:
    """Build the byte-level BPE tokenizer of a GGUF file. Raises InputError for another kind."""
    kind, splits = values.get("tokenizer.ggml.model"), str(values.get("tokenizer.ggml.pre"))
    splits = _SAME_SPLITS.get(splits, splits)
    if kind != "gpt2" or splits not in SPLITS:
        raise InputError(
            f"{path}: has the tokenizer {str(kind)[:40]} ({splits[:40]}), which is not read; give the model's "
            "tokenizer.json with --tokenizer"
        )
    tokens, types = values["tokenizer.ggml.tokens"], values.get("tokenizer.ggml.token_type", ())
    merges = [tuple(merge.split(" ", 1)) for merge in values.get("tokenizer.ggml.merges", ())]
    try:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splits in IGNORES_MERGES))
    except Exception as error:  # tokenizers raises plain exceptions
        raise ArtifactError(f"{path}: its tokenizer is damaged: {error}; copy it again, or use --tokenizer") from None
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[splits](), decoders.ByteLevel()
    for token, type_ in zip(tokens, types, strict=False):
        if type_ in (*_SPECIAL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=type_ in _SPECIAL, normalized=False)])
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
    described: Mapping[str, Any], proof: ImportProof,
) -> Path:  # fmt: skip
    """Write the run. ``described``: keys of a tokenizer_config.json, of which those that name tokens are kept."""
    if isinstance(templates := described.get("chat_template"), list):
        described = {
            **described,
            "chat_template": {each["name"]: each["template"] for each in templates}.get("default"),
        }
    kept = {key: described[key] for key in (BEGIN_IDS, END_IDS)}
    kept |= {
        key: value
        for key, value in described.items()
        if isinstance(value, str) and (key.endswith("_token") or key == "chat_template")
    }
    if proof.reason is not None:
        progress.message(f"unproven: {proof.reason}")
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("._-")[:60] or "imported"
    free = partial(free_folder, options.artifacts, options.name, slug, or_else="")
    free()  # fails early if the name is taken
    return write_language_run(
        free, _BASE, slug, model, options, progress, description=f"a decoder, imported from {name}", origin=name,
        sha256=sha256, tokenizer=tokenizer, tokenizer_config=kept, proof=proof,
    )  # fmt: skip
