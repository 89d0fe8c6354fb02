"""Import decoders: Hugging Face folders of Llama, Qwen2, Qwen3 and Nanbeige, and GGUF files of these.

Weights become those of a :class:`~edgeformer.models.decoder.model.DecoderModel`; nothing in the files is executed.
"""

import contextlib
import itertools
import re
from collections.abc import Mapping
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, processors
from torch import Tensor

from edgeformer.artifacts.errors import ArtifactError, InputError, needs_extra
from edgeformer.artifacts.files import read_at_most, sha256_of
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.artifacts.progress import SILENT, Progress
from edgeformer.artifacts.workspace import (
    CONFIG_FILE,
    MOST_JSON_BYTES,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    read_tokenizer_config,
)
from edgeformer.data.byte_pairs import IGNORES_MERGES, SPLITS
from edgeformer.data.encoding import PlainText
from edgeformer.data.source_folder import find_folder, read_object, validate_file
from edgeformer.data.tokenization import BEGIN_IDS, END_IDS, TextBounds, embedding_rows, tokenizer_from_file
from edgeformer.imports import language_keys
from edgeformer.imports.language_keys import ARCHITECTURES
from edgeformer.imports.language_proof import COMPUTED_TOKENS, LOCAL, prove_by_llama, prove_by_transformers
from edgeformer.imports.proof import unproven
from edgeformer.imports.run import ImportOptions, reserve_name, write_language_run
from edgeformer.models.decoder import LOOPED, DecoderConfig
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.models.pretrained.source import WEIGHTS, weights_sha256
from edgeformer.runtimes.llamacpp.library import XLLAMACPP, Llama

_BASE = "looped_mini"
_MOST_POSITIONS = 1 << 20
_SPECIAL, _USER_DEFINED, _BYTE = (2, 3), 4, 6
"""llama.cpp's types of tokens: unknown and control, user-defined (both found in a text by their names), byte."""
_SAME_SPLITS = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "smaug-bpe": "dbrx"}
"""Further names of :data:`~edgeformer.data.byte_pairs.SPLITS` in GGUF files."""


def is_language_model(source: str) -> bool:
    """Return whether a folder or a model of the hub is a decoder that can be imported."""
    folder = find_folder(source)
    if not (folder / CONFIG_FILE).is_file():  # of an adapter alone, or 0_Transformer has it
        return False
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

    # 1. Read the sizes, and refuse what is not computed.
    defaults = language_keys.DEFAULTS.get(architecture, {})
    sizes = validate_file(language_keys.LanguageFile, {**defaults, **document}, path)
    for key in (key for key, is_refused in language_keys.REFUSED_KEYS.items() if is_refused(sizes)):
        raise InputError(f"{path}: {key} is set in a way that edgeformer does not compute; use another model")
    # Other keys have no effect in transformers' own classes, but may have one in code that comes with a model.
    unknown = sorted(document.keys() - language_keys.NEUTRAL_KEYS - language_keys.LanguageFile.model_fields.keys())
    if unknown and architecture == LOOPED and not options.unproven:
        raise InputError(
            f"{path}: has keys that edgeformer does not know: {', '.join(unknown)[:200]}; import it "
            "unproven, and marked so, with --unproven"
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

    # 2. Read the weights, under llama.cpp's names.
    files = sorted(folder.glob(WEIGHTS)) or sorted(folder.glob("model-*.safetensors"))
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
        if not name.endswith("rotary_emb.inv_freq"):  # computed from rope_theta
            renamed[f"{prefix}{names[part]}.{kind}" if part in names else name] = tensor.float()
    if config.tied and (head := renamed.pop("output.weight", None)) is not None:
        # As in transformers: the one that exists is both, and different ones stay apart.
        is_tied = torch.equal(renamed.setdefault("token_embd.weight", head), head)
        config = config.model_copy(update={"tied": is_tied})
        renamed |= {} if is_tied else {"output.weight": head}
    model = _model(config, renamed, str(folder))

    # 3. Read the tokenizer, and the tokens around a text.
    name = Path(source).resolve().name if Path(source).is_dir() else source.rsplit("/", 1)[-1]
    generation_path = folder / "generation_config.json"
    generation = read_object(generation_path) if generation_path.is_file() else {"eos_token_id": sizes.eos_token_id}
    keys = sorted(generation.keys() - language_keys.NEUTRAL_GENERATION_KEYS - {"eos_token_id"})
    if unapplied := [key for key in keys if generation[key] not in (None, 0, 1, [])]:
        progress.message(f"{generation_path}: is not applied: {', '.join(unapplied)}; edgeformer samples as asked for")
    described = read_tokenizer_config(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        described["chat_template"] = read_at_most(template, MOST_JSON_BYTES).decode("utf-8", "replace")
    # Classes that tokenizer_config.json names build parts of it anew, such as what is put in front of a text.
    tokenizer = tokenizer_from_file(folder / TOKENIZER_FILE)
    if util.find_spec("transformers") is not None:
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):  # of any type; the proof names it
            tokenizer = Tokenizer.from_str(AutoTokenizer.from_pretrained(folder, **LOCAL).backend_tokenizer.to_str())
    tokenizer = _fitting(tokenizer, model)
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

    # 4. Prove the answers, and write the run.
    plain = PlainText(tokenizer, TextBounds.of(tokenizer, described))
    proof = prove_by_transformers(folder, model, plain, allow=options.unproven, progress=progress)
    return _write(model, name, options, progress, sha256=weights_sha256(folder), tokenizer=tokenizer,
                  described=described, proof=proof)  # fmt: skip


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
    if (parts := int(fields.get("split.count", 1))) > 1:
        raise InputError(f"{path}: is one of {parts} parts; join them: llama-gguf-split --merge FIRST OUT")

    # 1. Read the sizes.
    # Keys are taken out when they are used; what is left is refused below if it could change an answer.
    values = {re.sub(rf"^({architecture}|tokenizer\.ggml)\.", "", name): value for name, value in fields.items()}
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    try:
        config = _config(
            path,
            vocab_size=len(values["tokens"]), hidden_size=values.pop("embedding_length"),
            layers=values.pop("block_count"), iterations=values.pop("num_loops", 1),
            heads=(heads := values.pop("attention.head_count")), kv_heads=values.pop("attention.head_count_kv", heads),
            head_size=values.pop("attention.key_length", None), ffn_size=values.pop("feed_forward_length"),
            tied="output.weight" not in shapes, qkv_bias="blk.0.attn_q.bias" in shapes,
            qk_norm="blk.0.attn_q_norm.weight" in shapes, max_positions=values.pop("context_length"),
            rope_theta=values.pop("rope.freq_base", 10_000.0),
            norm_eps=values.pop("attention.layer_norm_rms_epsilon"),
        )  # fmt: skip
    except KeyError as error:
        raise ArtifactError(f"{path}: lacks {error.args[0]}; copy it again") from None
    allowed = {
        **language_keys.NEUTRAL_GGUF_VALUES,
        "attention.value_length": (config.head_width,), "rope.dimension_count": (config.head_width,),
        "vocab_size": (config.vocab_size,),
    }  # fmt: skip

    # 2. Dequantise the weights.
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

    # 3. Build the tokenizer, and read the tokens around a text.
    kind, splits = values.pop("model", None), str(values.pop("pre", None))
    splits = _SAME_SPLITS.get(splits, splits)
    if kind == "llama" and _BYTE not in values.get("token_type", ()):
        raise InputError(
            f"{path}: its SentencePiece tokenizer has no tokens of bytes, without which llama.cpp ends the process; "
            "use another file of the model"
        )
    if options.tokenizer is not None:
        tokenizer = tokenizer_from_file(options.tokenizer)
    else:
        if kind != "gpt2" or splits not in SPLITS:
            raise InputError(
                f"{path}: has the tokenizer {str(kind)[:40]} ({splits[:40]}), which is not read; give the model's "
                "tokenizer.json with --tokenizer"
            )
        tokens, types = values["tokens"], values.get("token_type", ())
        merges = [tuple(merge.split(" ", 1)) for merge in values.get("merges", ())]
        try:
            vocabulary = {token: number for number, token in enumerate(tokens)}
            tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splits in IGNORES_MERGES))
        except Exception as error:  # tokenizers raises plain exceptions
            raise ArtifactError(
                f"{path}: its tokenizer is damaged: {error}; copy it again, or use --tokenizer"
            ) from None
        tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[splits](), decoders.ByteLevel()
        for token, type_ in zip(tokens, types, strict=False):
            if type_ in (*_SPECIAL, _USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, special=type_ in _SPECIAL, normalized=False)])
    tokenizer = _fitting(tokenizer, model)
    described: dict[str, Any] = {"chat_template": values.pop("tokenizer.chat_template", None)}
    ids = {kind: values.pop(f"{kind}_token_id", None) for kind in ("bos", "eos", "eot", "eom")}
    numbers = {kind: int(number) for kind, number in ids.items() if number is not None}
    described |= {f"{kind}_token": tokenizer.id_to_token(numbers[kind]) for kind in ("bos", "eos") if kind in numbers}
    adds_begin = values.pop("add_bos_token", splits in IGNORES_MERGES) and "bos" in numbers
    described[BEGIN_IDS] = [numbers["bos"]] if adds_begin else []
    described[END_IDS] = [number for kind, number in numbers.items() if kind != "bos"]
    if adds_begin:
        begin = described["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            [f"{begin}:0", "$A:0"], None, [(begin, numbers["bos"])]
        )

    # 4. Refuse keys that could change an answer.
    for key in (key for key in values if not key.startswith(language_keys.NEUTRAL_GGUF_KEYS)):
        if values[key] not in allowed.get(key, ()):
            reason = f"{key} = {str(values[key])[:40]} asks for what edgeformer does not compute; use another model"
            raise InputError(f"{path}: {reason}")

    # 5. Prove the answers, and write the run.
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
    config = validate_file(DecoderConfig, {"kind": "decoder", "exits": (), **sizes}, path)
    if config.max_positions > _MOST_POSITIONS:
        raise InputError(f"{path}: takes {config.max_positions:,} tokens; at most {_MOST_POSITIONS:,} are supported")
    return config


def _model(config: DecoderConfig, weights: dict[str, Tensor], source: str) -> DecoderModel:
    """Return a model with weights by llama.cpp's names.

    Raises ArtifactError: one is missing or of another shape; InputError: one is not used.
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
    if weights:
        raise InputError(
            f"{source}: has weights that edgeformer does not use: {', '.join(weights)[:300]}; use another model"
        )
    model = DecoderModel(config).eval()
    model.load_state_dict(state)
    return model


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
    slug, free = reserve_name(options.artifacts, options.name, name)
    return write_language_run(
        free, _BASE, slug, model, options, progress, description=f"a decoder, imported from {name}", origin=name,
        sha256=sha256, tokenizer=tokenizer, tokenizer_config=kept, proof=proof,
    )  # fmt: skip
