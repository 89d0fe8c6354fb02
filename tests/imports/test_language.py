"""Import of decoders: the logits of transformers, GGUF files there and back, and what is refused."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.data.byte_pairs import IGNORES_MERGES, SPLITS, split_name
from edgeformer.imports.language import import_causal_lm, import_gguf, is_language_model
from edgeformer.imports.run import ImportOptions
from edgeformer.models.weights import load_model
from edgeformer.run import Run
from edgeformer.runtimes.llamacpp.builder import write_gguf

transformers = pytest.importorskip("transformers", reason="transformers makes the models that are imported")

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
IDS = torch.arange(40).reshape(2, 20) * 7 % 300


def byte_tokenizer(splits: str = "gpt-2") -> Tokenizer:
    """A byte-level BPE with one merge, and a token between documents."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: n for n, token in enumerate([*alphabet, "th"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h")], ignore_merges=splits in IGNORES_MERGES))
    tokenizer.pre_tokenizer, tokenizer.decoder = SPLITS[splits](), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def written(folder: Path, kind: str, **changes: Any) -> tuple[Any, Path]:
    """A random model of transformers, in evaluation mode, and its folder."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{KINDS[kind]}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.05))
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model, folder


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_logits_are_those_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    original, folder = written(tmp_path / "model", kind, **changes)
    assert is_language_model(str(folder))
    run = import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    model: Any = load_model(run)
    assert (model.logits(IDS) - original(IDS).logits).abs().max() < 1e-4
    assert model.exits == (1,)


@torch.inference_mode()
@pytest.mark.skipif(util.find_spec("gguf") is None, reason="the extra llamacpp is not installed")
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_gguf_file_leads_back_to_the_same_model(kind: str, tmp_path: Path) -> None:
    _, folder = written(tmp_path / "model", kind)
    run = import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    model: Any = load_model(run)
    write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "fp32")
    again = import_gguf(tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again"))
    restored: Any = load_model(again)
    rounded = {"norm_eps", "head_size"}  # in FP32; and stated instead of derived
    assert restored.config.model_dump(exclude=rounded) == model.config.model_dump(exclude=rounded)
    assert restored.config.head_width == model.config.head_width
    assert (restored.logits(IDS) - model.logits(IDS)).abs().max() < 1e-5
    one, two = (Tokenizer.from_file(str(path / "model" / "tokenizer.json")) for path in (run, again))
    text = "It's 12 o'clock, naïve 🙂  friend\n"
    assert one.encode(text).ids == two.encode(text).ids and two.decode(two.encode(text).ids) == text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act is set in a way"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_scaling is set in a way"),
        ("quantization_config", {"bits": 4}, "quantization_config is set in a way"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("num_hidden_layers", 3, "lacks the weights blk.2"),
        ("intermediate_size", 100, "is .*, not "),
        ("vocab_size", 10**9, "larger model than its weights"),
        ("intermediate_size", 10**12, "is .*, not "),
        ("max_position_embeddings", 10**12, "at most 1,048,576 are supported"),
        ("num_key_value_heads", 3, "kv_heads must be a divisor"),
    ],
)
def test_other_computations_and_damage_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    _, folder = written(tmp_path / "model", "llama")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises((InputError, ArtifactError), match=message):
        import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    assert not (tmp_path / "artifacts").exists() or not [*(tmp_path / "artifacts").iterdir()]


TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.skipif(util.find_spec("gguf") is None, reason="the extra llamacpp is not installed")
@pytest.mark.parametrize("form", ["text", "list", "file"])
def test_chat_template_and_end_token_of_the_source_are_kept(form: str, tmp_path: Path) -> None:
    _, folder = written(tmp_path / "model", "llama")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "model_max_length": 9,
    }
    if form == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        others = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        described["chat_template"] = TEMPLATE if form == "text" else others
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    run = import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    expected = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    config = Run.open(run).tokenizer_config()
    assert {key: config[key] for key in expected} == expected and config["model_max_length"] > 9
    model: Any = load_model(run)
    write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "fp16")
    again = import_gguf(tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again"))
    config = Run.open(again).tokenizer_config()
    assert {key: config[key] for key in expected} == expected


@pytest.mark.skipif(util.find_spec("gguf") is None, reason="the extra llamacpp is not installed")
def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"GGUF" + bytes(100), b"x" * 1000):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"damaged or no GGUF file|lacks|has the architecture"):
            import_gguf(path, ImportOptions(tmp_path / "artifacts"))


@pytest.mark.skipif(util.find_spec("gguf") is None, reason="the extra llamacpp is not installed")
def test_a_gguf_file_with_a_damaged_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = written(tmp_path / "model", "llama")
    run = import_causal_lm(str(folder), ImportOptions(tmp_path / "artifacts"))
    model: Any = load_model(run)
    import gguf

    add_merges = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, _: add_merges(self, ["a nosuchtoken"]))
    write_gguf(tmp_path / "model.gguf", run / "model", model.gguf_contents(), "fp16")
    with pytest.raises(ArtifactError, match="its tokenizer is damaged"):
        import_gguf(tmp_path / "model.gguf", ImportOptions(tmp_path / "artifacts", "again"))


@pytest.mark.parametrize("name", [*SPLITS])
def test_splits_are_recognised_in_a_tokenizer_json(name: str) -> None:
    assert split_name(json.loads(byte_tokenizer(name).to_str())) == name


def test_other_tokenizers_have_no_name() -> None:
    assert split_name(json.loads(Tokenizer(models.WordPiece()).to_str())) is None
    assert split_name(json.loads(Tokenizer(models.BPE()).to_str())) is None
