"""Keys of language models' files: config.json, generation_config.json and GGUF; each is used, neutral or refused."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from edgeformer.data.source_folder import ConfigFile
from edgeformer.models.decoder import LOOPED

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "NanbeigeForCausalLM": LOOPED,
}  # fmt: skip
"""Class in config.json → llama.cpp's name of the architecture."""
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
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    partial_rotary_factor: float | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """Settings of rotary positions, under their older and newer key."""
        return {**(self.rope_scaling or {}), **(self.rope_parameters or {})}


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"eos_token_id": 2},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""Values of transformers for keys that a config.json lacks, where they are no defaults of :class:`LanguageFile`."""
REFUSED_KEYS: Mapping[str, Callable[[LanguageFile], bool]] = {
    "hidden_act": lambda file: file.hidden_act not in ("silu", "swish"),
    "attention_bias": lambda file: file.attention_bias,
    "mlp_bias": lambda file: file.mlp_bias,
    "use_sliding_window": lambda file: file.use_sliding_window,
    "layer_types": lambda file: not {*(file.layer_types or ())} <= {"full_attention"},
    "skip_loop_final_norm": lambda file: file.skip_loop_final_norm and file.num_loops > 1,
    "rope_scaling": lambda file: file.rope.get("rope_type", file.rope.get("type", "default")) != "default",
    "partial_rotary_factor": lambda file: (
        not {file.partial_rotary_factor, file.rope.get("partial_rotary_factor")} <= {None, 1.0}
    ),
    "quantization_config": lambda file: file.quantization_config is not None,
}
"""Keys of config.json → whether it asks for a computation that a decoder here does not have."""
NEUTRAL_KEYS = frozenset({
    "_name_or_path", "auto_map", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "sliding_window", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys of config.json that do not change an answer: training, output format, and slices of the same sums.
``sliding_window`` and ``max_window_layers`` have no effect without ``use_sliding_window``."""
NEUTRAL_GENERATION_KEYS = frozenset({
    "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "do_sample", "temperature",
    "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits",
    "max_length", "max_new_tokens", "max_time", "use_mtp", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "speculation_type", "compile_config", "disable_compile",
    "continuous_batching_config", "low_memory", "prefill_chunk_size", "chat_template",
})  # fmt: skip
"""Keys of generation_config.json that do not change greedy text: defaults of sampling, lengths, speed and output.
Others but ``eos_token_id`` are noted and not applied: sampling is explicit here."""
NEUTRAL_GGUF_KEYS = (
    "GGUF.", "general.", "quantize.", "tokenizer.chat_template.", "tokenizer.chat_templates",
    "tokenizer.huggingface.json", "tokens", "token_type", "merges", "scores", "padding_token_id", "unknown_token_id",
    "seperator_token_id", "cls_token_id", "mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
    "fim_", "add_space_prefix", "remove_extra_whitespaces",
)  # fmt: skip
"""Beginnings of keys that do not change an answer beyond their use: origin, storage, the tokenizer's tables, and what
byte-level BPE has no use for. The names of the architecture and of the tokenizer are not in front."""
NEUTRAL_GGUF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",), "rope.scaling.factor": (0.0, 1.0), "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.finetuned": (False,), "skip_loop_final_norm": (False,), "attention.causal": (True,),
    "attention.sliding_window": (0,), "logit_scale": (0.0, 1.0), "expert_count": (0,), "expert_used_count": (0,),
    "add_eos_token": (False,), "add_sep_token": (False,), "suppress_tokens": ([],), "split.count": (0, 1),
    "split.no": (0,),
}  # fmt: skip
"""Further keys → values that do not change an answer. Other values, and all other keys that are not used, are refused
by name."""
