"""``export --gguf``: language models as GGUF files, which llama.cpp and what is built on it run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest, Precision, Sharing
from edgeformer.artifacts.progress import bar
from edgeformer.artifacts.workspace import TOKENIZER_CONFIG, TOKENIZER_FILE, read_tokenizer_config
from edgeformer.runtimes.llamacpp.library import EXTRA, PACKAGE, XLLAMACPP, Llama
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Builder, BuildJob, Target

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from edgeformer.data.tokenization import TextBounds

FORMAT = "gguf"
_TYPES: dict[Precision, str] = {"fp32": "F32", "fp16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""Precision → llama.cpp's type of matrices; vectors stay F32."""
_BLOCK = 32
"""Weights of a row that share a scale in Q8_0 and Q4_0."""
_TABLES = ("token_embd.weight", "output.weight")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""llama.cpp's types of tokens."""


class GGUFBuilder(Builder):
    """A file per precision of the export (FP32 if there is no other), for whole texts and for writing."""

    name = "gguf"
    formats = (FORMAT,)
    flag = "--gguf"
    packages, extra = ("gguf",), EXTRA

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        graphs = [graph for graph in job.graphs if graph.role in ("full", "decode") and not graph.trimmed]
        precisions = list(dict.fromkeys(graph.precision for graph in graphs if graph.is_graph))
        for precision in [name for name in precisions if name != "fp32"] or precisions:
            sources = [graph for graph in graphs if graph.precision == precision]
            reason = f"{PACKAGE} is not installed, which runs it; run on the device: edgeformer verify --write"
            entries = [
                self.initial_entry(graph, precision, parity=self.unmeasured_parity(graph, reason)) for graph in sources
            ]
            file = f"{ENGINES_FOLDER}/model-{_TYPES[precision].lower()}.gguf"
            try:
                model: Any = getattr(job.module(sources[0]), "model", None)
                if not hasattr(model, "gguf_contents"):
                    raise EdgeformerError("GGUF holds language models of model.kind: decoder only; leave out --gguf")
                with bar(job.progress, f"Writing {file}", None):
                    stored = write_gguf(job.bundle / file, job.bundle, model.gguf_contents(), precision)
                    tokenization = compare_tokenizer(job.bundle / file, job.bundle, *job.texts())
                unique = sum(parameter.numel() for parameter in model.parameters())
            except EdgeformerError as error:
                (job.bundle / file).unlink(missing_ok=True)
                yield from (entry.model_copy(update={"reason": str(error)}) for entry in entries)
                continue
            size = (job.bundle / file).stat().st_size
            sharing = Sharing(
                unique_parameters=unique, stored_parameters=stored, constant_elements=0, weight_bytes=size,
            )  # fmt: skip
            for entry in entries:
                described = {"sharing": sharing, "tokenization": tokenization}
                yield self.built_entry(entry, job.bundle, file, ("gguf", "torch"), **described)


def compare_tokenizer(path: Path, bundle: Path, texts: Sequence[str], origin: str) -> str:
    """Compare llama.cpp's tokenizer on a GGUF file with the bundle's, on probe texts and on ``texts`` of an origin.

    Returns what was compared, or why nothing was. Raises EdgeformerError: tokens of a text, or its end tokens, differ.
    """
    if (problem := XLLAMACPP.missing()) is not None:
        return f"not compared: {problem}"
    from edgeformer.data.encoding import PlainText  # imports tokenizers, which other commands do not need
    from edgeformer.data.probes import PROBE_TEXTS, token_probes

    tokenizer, bounds = _read_tokenizer(bundle)
    plain, normalizer = PlainText(tokenizer, bounds), tokenizer.normalizer
    probes = [*map(str, PROBE_TEXTS), *token_probes(tokenizer)]
    with closing(Llama(path, 1, _BLOCK)) as llama:
        for text in (*probes, *texts):
            normalized = normalizer.normalize_str(text) if normalizer is not None else text
            ids = llama.tokenize(normalized, add_special=True, parse_special=bounds.reads_names)
            chat_ids = llama.tokenize(normalized, parse_special=True)
            if ids != [*bounds.begin, *plain.encode(text).ids] or chat_ids != plain.encode(text, is_chat=True).ids:
                raise EdgeformerError(
                    f"GGUF: llama.cpp reads {text[:80]!r} as other tokens than the bundle's tokenizer; use a "
                    "tokenizer that llama.cpp has a counterpart of, or run the ONNX artifacts"
                )
        if missing := sorted({*bounds.ends} - {*llama.end_tokens()}):
            names = ", ".join(map(str, map(tokenizer.id_to_token, missing)))
            raise EdgeformerError(f"GGUF: has no key for the end tokens {names}, so llama.cpp does not stop at them")
    unlike = "" if normalizer is None else "; llama.cpp does not normalise, so give it texts in NFC"
    return f"llama.cpp's tokens are the bundle's on {len(probes)} probe texts and {len(texts):,} {origin}{unlike}"


def _read_tokenizer(bundle: Path) -> tuple[Tokenizer, TextBounds]:
    from tokenizers import Tokenizer  # which other commands do not need

    from edgeformer.data.tokenization import TextBounds

    tokenizer = Tokenizer.from_file(str(bundle / TOKENIZER_FILE))
    return tokenizer, TextBounds.of(tokenizer, read_tokenizer_config(bundle / TOKENIZER_CONFIG))


def write_gguf(
    path: Path, bundle: Path, contents: tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]], precision: Precision
) -> int:
    """Write a GGUF file with the tokenizer of ``bundle``; return the number of weights in it.

    ``contents`` are architecture, metadata, and name → array; ``precision`` is that of the matrices. With 4 bits the
    token table and the head keep 8, as in llama.cpp's own files.
    Raises EdgeformerError: the tokenizer is no byte-level BPE, or rows are no whole blocks.
    """
    import gguf

    from edgeformer.data.byte_pairs import split_name  # imports tokenizers, which other commands do not need

    architecture, metadata, tensors = contents
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, architecture)
        for key, value in metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{architecture}.{key}", value)

        # 1. Add tokens and merges
        document = json.loads((bundle / TOKENIZER_FILE).read_text(encoding="utf-8"))
        _, bounds = _read_tokenizer(bundle)
        model, splits = document["model"], split_name(document)
        if splits is None:
            raise EdgeformerError(
                "GGUF: is written for byte-level BPE tokenizers that llama.cpp has a counterpart of only, and neither "
                "for SentencePiece's nor for others; use such a tokenizer, as tokenizer: {kind: trained, algorithm: "
                "bpe} makes one, or run the ONNX artifacts"
            )
        if len(bounds.begin) > 1:
            raise EdgeformerError(f"GGUF: llama.cpp puts one token in front of a text, not {len(bounds.begin)}")
        tokens = [f"[unused{number}]" for number in range(metadata["vocab_size"])]
        types = [_UNUSED] * len(tokens)
        for token, number in model["vocab"].items():
            tokens[number], types[number] = token, _NORMAL
        for added in document["added_tokens"]:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(splits)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
        described = read_tokenizer_config(bundle / TOKENIZER_CONFIG)
        end = described.get("eos_token")
        eos = tokens.index(end) if end in tokens else bounds.boundary
        writer.add_bos_token_id(bounds.begin[0] if bounds.begin else bounds.boundary)
        writer.add_eos_token_id(eos)
        others = sorted({*bounds.ends} - {eos}, key=bounds.boundary.__eq__)  # llama.cpp knows most boundaries by name
        for add_end, number in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
            add_end(number)
        writer.add_add_bos_token(bool(bounds.begin))
        writer.add_add_eos_token(False)
        if template := described.get("chat_template"):
            writer.add_chat_template(template)

        # 2. Add the weights
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        prefix = "ALL" if precision == "fp32" else "MOSTLY"
        writer.add_file_type(int(getattr(gguf.LlamaFileType, f"{prefix}_{_TYPES[precision]}")))
        for name, array in tensors.items():
            is_table = precision == "int4" and name in _TABLES
            kind = "F32" if array.ndim == 1 else _TYPES["int8" if is_table else precision]
            if kind.startswith("Q") and array.shape[-1] % _BLOCK:
                raise EdgeformerError(
                    f"GGUF: {kind} needs rows of whole blocks of {_BLOCK}, and those of {name} have {array.shape[-1]}; "
                    "use --fp16, or sizes that are multiples of it"
                )
            quantized = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), quantized), raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return sum(array.size for array in tensors.values())
