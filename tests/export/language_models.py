"""Small random decoders of transformers' own making, with tokenizers like those of Llama, Qwen2 and SmolLM2."""

import json
from importlib import util
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeformer.data.byte_pairs import IGNORES_MERGES, SPLITS
from edgeformer.data.synthetic import PARAGRAPHS

HAS_LLAMA_CPP = util.find_spec("xllamacpp") is not None and util.find_spec("gguf") is not None
WORDS = 420
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip
ENDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
CLASSES = {"llama3": "Llama", "llama2": "Llama", "smollm2": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SPECIAL = {
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
    "llama2": ["<unk>", "<s>", "</s>"],
    **{kind: ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] for kind in ("smollm2", "qwen2", "qwen3")},
}
STATED: dict[str, dict[str, Any]] = {
    "llama3": {"tokenizer_class": "TokenizersBackend", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama2": {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False, "legacy": False,
    },
    "smollm2": {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    "qwen2": {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>"},
    "qwen3": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "add_bos_token": False},
}  # fmt: skip
"""tokenizer_config.json as such models have it."""


def make_tokenizer(kind: str) -> Tokenizer:
    """A trained tokenizer of one of :data:`SPECIAL`; ``<think>`` is a token without being special."""
    special = SPECIAL[kind]
    if kind == "llama2":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bytes_ = [f"<0x{number:02X}>" for number in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=WORDS - 1, special_tokens=[*special, *bytes_], show_progress=False)
        tokenizer.train_from_iterator(PARAGRAPHS, trainer)
        document = json.loads(tokenizer.to_str())
        document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in special]
        tokenizer = Tokenizer.from_str(json.dumps(document))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        name = {"llama3": "llama-bpe", "smollm2": "smollm"}.get(kind, "qwen2")
        tokenizer = Tokenizer(models.BPE(ignore_merges=name in IGNORES_MERGES))
        tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[name](), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=WORDS - 1, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(PARAGRAPHS, trainer)
        if name == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    if kind in ("llama2", "llama3"):
        begin = special[1] if kind == "llama2" else special[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A",
            pair=f"{begin} $A {begin}:1 $B:1",
            special_tokens=[(begin, tokenizer.token_to_id(begin))],
        )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def make_language_model(
    folder: Path, kind: str, generation: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, Path]:
    """Save a random decoder with its tokenizer as models on the hub have it, and return it.

    ``generation``: content of generation_config.json, or None for no such file; ``changes``: of the configuration.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{CLASSES[kind]}Config")(**{**SIZES, **ENDS, **changes})
    model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.05))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    make_tokenizer(kind).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(STATED[kind]))
    return model, folder
