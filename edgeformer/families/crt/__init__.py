"""CRT-Deep of paper B: a decoder whose single block is looped, with exits on the way."""

from __future__ import annotations

from typing import ClassVar

from edgeformer.families.crt.config import CRTConfig
from edgeformer.families.family import Family
from edgeformer.formats.recipe import ModelConfig


class CRTDeep(Family):
    """One shared block of attention and dilated convolutions, applied L times."""

    kind: ClassVar[str] = "crt"
    tasks: ClassVar[tuple[str, ...]] = ("language-modeling",)
    config_type: ClassVar[type[ModelConfig]] = CRTConfig
    model_type: ClassVar[str] = "edgeformer-crt"
    architecture: ClassVar[str] = "CRT"
    network_module: ClassVar[str] = "edgeformer.families.crt.network"

    def loops(self, config: CRTConfig) -> int:
        """Loops."""
        return config.loops

    def trained_exits(self, config: CRTConfig) -> tuple[int, ...]:
        """See :meth:`Family.trained_exits`."""
        return (*config.exits, config.loops)

    def leaks(self, config: CRTConfig) -> bool:
        """The published convolutions look ahead."""
        return not config.causal

    def card_line(self, config: CRTConfig) -> str:
        """See :meth:`Family.card_line`."""
        after = ", ".join(map(str, config.exits))
        exits = f"exits after {after} ({config.heads} heads)" if config.exits else "no early exit"
        return (
            f"one shared block × {config.loops} loops, {config.cycles} TRM cycles ({config.trm}), "
            f"{exits}; width {config.hidden_size}, {config.attention_heads} heads, "
            f"FFN {config.ffn_size}, {config.norm} norm; {config.vocab_size:,} tokens"
        )

    def tags(self) -> tuple[str, ...]:
        """See :meth:`Family.tags`."""
        return ("weight-sharing", "recurrent-depth", "early-exit", "edge", "onnx")


FAMILY = CRTDeep()
