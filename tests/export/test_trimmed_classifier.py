"""A classifier with a trimmed vocabulary: identical answers, and its companion files."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from edgeformer.data.cleaning import normalizers
from edgeformer.data.tokenization import train_tokenizer
from edgeformer.data.trimming import Trimmed, trim_tokenizer
from edgeformer.export.run_source import write_trimmed_companions

TEXTS = ["a wonderful film, told with wit", "an endless, dull story without any wit at all"] * 3


def test_companions_are_renumbered(tmp_path: Path) -> None:
    original = train_tokenizer("wordpiece", 200, [*TEXTS, "friends of moving pictures unite"] * 5, normalizers())
    # [MASK] is the last of the special tokens: no text uses it, but it is kept.
    trimmed = trim_tokenizer(original, {number for text in TEXTS for number in original.encode(text).ids})
    source, target = tmp_path / "model", tmp_path / "trimmed"
    source.mkdir()
    target.mkdir()
    config = {"model_type": "edgeformer-encoder", "vocab_size": original.get_vocab_size(), "hidden_size": 32}
    ids = {f"{name}_token_id": original.token_to_id(f"[{name.upper()}]") for name in ("pad", "cls", "sep", "unk")}
    (source / "config.json").write_text(json.dumps({**config, **ids, "bos_token_id": None}), encoding="utf-8")
    described = {"pad_token": "[PAD]", "added_tokens_decoder": {str(ids["cls_token_id"]): {"content": "[CLS]"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    moved = Trimmed(trimmed.tokenizer, trimmed.kept[::-1].copy())  # so that the ids of special tokens change, too
    write_trimmed_companions(source, moved, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(trimmed.kept) and config["hidden_size"] == 32 and config["bos_token_id"] is None
    for name in ("pad", "cls", "sep", "unk"):
        assert moved.kept[config[f"{name}_token_id"]] == original.token_to_id(f"[{name.upper()}]")
        assert config[f"{name}_token_id"] != original.token_to_id(f"[{name.upper()}]")
    described = json.loads((target / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert described["pad_token"] == "[PAD]"
    assert described["added_tokens_decoder"] == {str(config["cls_token_id"]): {"content": "[CLS]"}}
    written = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert written.get_vocab() == trimmed.tokenizer.get_vocab()
