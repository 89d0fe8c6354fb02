"""Small random models of transformers' own making, in folders as save_pretrained leaves them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeformer.data.synthetic import SENTENCES

LAYERS, WIDTH, VOCABULARY = 2, 32, 400
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64}
_SIZES["initializer_range"] = 0.2  # so that logits differ from row to row
OWN: dict[str, dict[str, Any]] = {
    "bert": {},
    "distilbert": {"dim": WIDTH, "hidden_dim": 48, "n_layers": LAYERS, "n_heads": 4},
    "roberta": {"max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "xlm-roberta": {"max_position_embeddings": 66, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "mpnet": {"max_position_embeddings": 66},
    "deberta-v2": {
        "relative_attention": True, "position_biased_input": False, "share_att_key": True, "type_vocab_size": 0,
        "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "position_buckets": 8, "max_relative_positions": -1,
    },
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16, "num_hidden_groups": 1},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0, "cls_token_id": 2},
}  # fmt: skip
"""``model_type`` → what its configuration has beside the sizes."""
_BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SPECIAL_TOKENS = {
    **{kind: ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] for kind in ("roberta", "xlm-roberta")},
    "mpnet": ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"],
    "deberta-v2": ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"],
}


def save_tokenizer(folder: Path, kind: str) -> None:
    """A tokenizer.json as such models have it: byte-level BPE, Unigram (SentencePiece) or WordPiece."""
    builders = {"roberta": _byte_level, "xlm-roberta": _unigram, "deberta-v2": _unigram}
    tokenizer, trainer = builders.get(kind, _word_piece)(_SPECIAL_TOKENS.get(kind, _BERT_TOKENS))
    tokenizer.train_from_iterator(SENTENCES, trainer)
    number = tokenizer.token_to_id
    if kind in ("roberta", "xlm-roberta", "mpnet"):
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", number("</s>")), ("<s>", number("<s>")))
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, number(name)) for name in ("[CLS]", "[SEP]")],
        )
    tokenizer.enable_padding(length=12)  # as files from the hub often carry it, and as nothing here may be read
    tokenizer.enable_truncation(12)
    tokenizer.save(str(folder / "tokenizer.json"))
    if kind == "albert":  # ALBERT's own tokenizer is a SentencePiece model; Chinese ones name BERT's like this
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def _byte_level(special: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    return tokenizer, trainer


def _unigram(special: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=VOCABULARY, special_tokens=special, unk_token=special[3], show_progress=False
    )


def _word_piece(special: list[str]) -> tuple[Tokenizer, Any]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)


def make_model(folder: Path, kind: str, labels: tuple[str, ...] = (), *, per_token: bool = False, **keys: Any) -> Any:
    """Save a random model of ``kind`` with its tokenizer, and return it.

    With ``labels`` it is a sequence classifier, or ``per_token`` a token classifier; without, a bare encoder.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    names: dict[str, Any] = {"id2label": dict(enumerate(labels)), "label2id": {}} if labels else {}
    config = AutoConfig.for_model(kind, **{**_SIZES, **OWN[kind], **names, **keys})
    torch.manual_seed(0)
    head = "ForTokenClassification" if per_token else "ForSequenceClassification" if labels else ""
    model = getattr(transformers, f"AutoModel{head}").from_config(config).eval()
    for parameter in model.parameters():  # fresh biases and norms are all alike: a graph would store them once
        parameter.data += torch.randn_like(parameter) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tokenizer(folder, kind)
    return model


def answer(model: Any, tokenizer: Tokenizer, text: str, pair: str | None = None) -> Any:
    """What transformers computes for a text or a pair, one row per call: logits [C], or states [S, d]."""
    import torch

    tokenizer.no_padding()
    tokenizer.no_truncation()
    result = tokenizer.encode(text, pair)
    inputs = {"input_ids": torch.tensor([result.ids])}
    if int(getattr(model.config, "type_vocab_size", 0) or 0) > 1:
        inputs["token_type_ids"] = torch.tensor([result.type_ids])
    with torch.inference_mode():
        outputs = model(**inputs)
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state)[0].numpy()


def token_classifier(folder: Path) -> Path:
    """Import and export a random token classifier that reads at most 16 tokens at once; return its run."""
    from edgeformer import Run
    from edgeformer.imports.encoder import HfOptions, import_hf

    make_model(folder / "tagger", "bert", TAGS, per_token=True)
    run = import_hf(str(folder / "tagger"), HfOptions(folder / "artifacts", max_length=16))
    Run.open(run).export(int8=True, joining=False)
    return run


def make_cross_encoder(folder: Path, kind: str = "bert", **changes: Any) -> Any:
    """Save a random model with one output, as sentence-transformers' CrossEncoder opens it, and return it."""
    from transformers import PreTrainedTokenizerFast

    model = make_model(folder, kind, ("LABEL_0",), **changes)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    if kind == "roberta":
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    inputs = ["input_ids", *(["token_type_ids"] if kind == "bert" else []), "attention_mask"]
    longest = model.config.max_position_embeddings - 2
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_input_names=inputs, model_max_length=longest, **names
    )
    tokenizer.save_pretrained(folder)
    return model


def sentence_transformers(folder: Path, pooling: str, *, normalize: bool) -> None:
    """Make a folder one of sentence-transformers."""
    mode = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}[pooling]
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 32, **{f"pooling_mode_{mode}": True}}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 48}', encoding="utf-8")
