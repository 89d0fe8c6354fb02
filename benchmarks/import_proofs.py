"""Do imported models answer as the library that they came from? Families times heads, from text to answer.

Every model is tiny, random, and saved by transformers or sentence-transformers with a tokenizer of the family's own
class. ``import hf`` compares it with that library on the probe texts, as it does for every model. Language models are
also exported as GGUF in F32, which llama.cpp answers and tokenizes, and imported from that file. The tables on
docs/explanation/reliability.md have the largest difference of each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.frame import markdown, read_record, run_script
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.data.source_folder import quiet_transformers
from edgeformer.data.synthetic import SENTENCES
from edgeformer.export.export import export
from edgeformer.export.variants import ExportOptions
from edgeformer.imports.encoder import HfOptions, import_hf
from edgeformer.imports.language import import_causal_lm, import_gguf
from edgeformer.imports.run import ImportOptions
from edgeformer.run import read_run
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, cpu_name, now
from tests.export.language_models import CLASSES, make_language_model

TOKENIZERS = {
    "bert": "BertTokenizer", "roberta": "RobertaTokenizer", "xlm-roberta": "XLMRobertaTokenizer",
    "distilbert": "DistilBertTokenizer", "electra": "ElectraTokenizer", "albert": "AlbertTokenizer",
    "mpnet": "MPNetTokenizer", "deberta-v2": "DebertaV2Tokenizer", "modernbert": "PreTrainedTokenizerFast",
}  # fmt: skip
HEADS = ("classification", "multi-label", "regression", "token classification", "embedding", "cross-encoder")
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 66, "initializer_range": 0.2,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "deberta-v2": {
        "relative_attention": True, "position_biased_input": False, "share_att_key": True, "type_vocab_size": 0,
        "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "position_buckets": 8, "max_relative_positions": -1,
    },
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16, "num_hidden_groups": 1},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
}  # fmt: skip


def save_tokenizer(folder: Path, kind: str) -> Any:
    """Train and save a tokenizer of the family's class, and return it."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    auto: Any = getattr(transformers, TOKENIZERS[kind])
    if kind == "modernbert":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            SENTENCES,
            trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=letters, show_progress=False),
        )
        bpe.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        tokenizer = auto(
            tokenizer_object=bpe, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
            mask_token="[MASK]",
        )  # fmt: skip
    else:
        tokenizer = auto().train_new_from_iterator(SENTENCES, 500)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_encoder(folder: Path, kind: str, head: str) -> None:
    """Save a random model of the family with that head and its tokenizer, as its library saves it."""
    import torch
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder.mkdir(parents=True)
    tokenizer = save_tokenizer(folder, kind)
    special = {key: getattr(tokenizer, key) for key in ("pad_token_id", "cls_token_id", "sep_token_id")}
    special |= {"bos_token_id": special["cls_token_id"], "eos_token_id": special["sep_token_id"]}
    labels = {"regression": 1, "cross-encoder": 1, "token classification": 5}.get(head, 3)
    names = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC") if labels == 5 else tuple(f"class {n}" for n in range(labels))
    sizes = {**_SIZES, **_OWN.get(kind, {}), **special, "vocab_size": len(tokenizer)}
    if head != "embedding":
        sizes["id2label"] = dict(enumerate(names))
    if head == "multi-label":
        sizes["problem_type"] = "multi_label_classification"
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    classes = {"embedding": "", "token classification": "ForTokenClassification"}
    auto: Any = getattr(transformers, f"AutoModel{classes.get(head, 'ForSequenceClassification')}")
    model = auto.from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    if head == "embedding":
        transformer = Transformer(str(folder), max_seq_length=48)
        SentenceTransformer(
            modules=[transformer, Pooling(32, "mean")], device="cpu",
            prompts={"query": "query: ", "document": "passage: "},
        ).save(str(folder))  # fmt: skip
    elif head == "cross-encoder":
        CrossEncoder(str(folder), device="cpu", max_length=40).save_pretrained(str(folder))


def measure(kind: str, head: str, folder: Path) -> dict[str, Any]:
    """Return the proof of one import, or the reason of its refusal."""
    source = folder / f"{kind}-{head.replace(' ', '-')}"
    save_encoder(source, kind, head)
    try:
        proof = read_run(import_hf(str(source), HfOptions(folder / "artifacts"))).proof
    except EdgeformerError as error:
        return {"family": kind, "head": head, "refused": str(error).replace(str(folder), "…")}
    assert proof is not None
    return {"family": kind, "head": head, **proof.model_dump()}


def measure_language(kind: str, folder: Path) -> dict[str, Any]:
    """Return the proofs of a language model's import, of its GGUF file, and of the import of that file."""
    artifacts = folder / "artifacts"
    _, source = make_language_model(folder / kind, kind)
    run = import_causal_lm(str(source), ImportOptions(artifacts))
    proof = read_run(run).proof
    assert proof is not None
    row: dict[str, Any] = {"family": kind, **proof.model_dump(), "gguf_reason": None}
    export(run, ExportOptions(build=("gguf",), keep_going=True))
    entry = Bundle.open(run / "bundle").artifact("gguf-fp32")
    if entry.status != "built" or entry.parity is None:
        return row | {"gguf_reason": entry.reason}
    again = read_run(import_gguf(run / "bundle" / str(entry.file), ImportOptions(artifacts, f"{kind}-gguf"))).proof
    assert again is not None
    return row | {
        "gguf_parity": entry.parity.max_abs_error, "gguf_tokens": entry.tokenization, "gguf_again": again.model_dump(),
    }  # fmt: skip


def tables(record: dict[str, Any]) -> str:
    """Return the tables of largest differences as Markdown."""
    cells = {(row["family"], row["head"]): row for row in record["rows"]}

    def cell(row: dict[str, Any]) -> str:
        return "refused" if "refused" in row or row["reason"] else f"{row['largest_difference']:.0e}"

    rows = [[kind, *(cell(cells[kind, head]) for head in HEADS)] for kind in TOKENIZERS]
    encoders = markdown(["family", *HEADS], rows)
    rows = []
    for row in record["language"]:
        gguf = ["refused", "–"]
        if row["gguf_reason"] is None:
            gguf = [f"{row['gguf_parity']:.0e}", f"{row['gguf_again']['largest_difference']:.0e}"]
        rows.append([row["family"], cell(row), *gguf])
    headers = [
        "tokenizer",
        "`import hf`, transformers",
        "`export --gguf` in F32, llama.cpp",
        "`import gguf`, llama.cpp",
    ]
    return f"{encoders}\n\n{markdown(headers, rows)}"


def main(json: Path | None = None, show: Path | None = None) -> None:
    """Import and export every model, and write the record; or print the tables of an earlier one."""
    if show is not None:
        print(tables(read_record(show)))
        return
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        rows = [measure(kind, head, Path(folder)) for kind in TOKENIZERS for head in HEADS]
        language = [measure_language(kind, Path(folder)) for kind in CLASSES]
    facts = {"date": now(), "code_version": code_version(), "cpu": cpu_name(), "versions": library_versions()}
    record: dict[str, object] = {**facts, "rows": rows, "language": language}
    if json is not None:
        write_json(json, record)
    print(tables(record))
    for row in rows:
        if row.get("refused") or row.get("reason"):
            print(f"{row['family']} {row['head']}: {row.get('refused') or row['reason']}")


if __name__ == "__main__":
    run_script(main)
