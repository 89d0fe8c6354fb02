"""A variant: one precision of a model's graphs, with the whole vocabulary or a trimmed one."""

from __future__ import annotations

from dataclasses import dataclass

from edgeformer.formats.manifest import Precision

TRIMMED_FOLDER = "trimmed"
"""A small repository of its own inside the bundle, because a trimmed vocabulary has a tokenizer of its own."""


@dataclass(frozen=True)
class Variant:
    """Names of what is written: files where clients of Hugging Face ONNX repositories look for each precision."""

    precision: Precision
    trimmed: bool = False

    @property
    def folder(self) -> str:
        """Where the graphs lie, relative to the bundle."""
        return f"{TRIMMED_FOLDER}/onnx" if self.trimmed else "onnx"

    @property
    def _suffix(self) -> str:
        return "" if self.precision == "fp32" else f"_{self.precision}"

    @property
    def weights(self) -> str:
        """The file of weights that several graphs share, relative to the bundle."""
        return f"{self.folder}/model{self._suffix}.onnx_data"

    def file(self, stem: str) -> str:
        """``model`` → ``onnx/model_fp16.onnx``."""
        return f"{self.folder}/{stem}{self._suffix}.onnx"

    def exit_file(self, exit_: int | None) -> str:
        """The graph up to an exit; None: the full graph."""
        return self.file("model" if exit_ is None else f"model_exit{exit_}")

    def id(self, what: str = "") -> str:
        """``exit2`` → ``onnx-fp16-exit2``; nothing: the full graph's."""
        return "-".join(part for part in ("onnx", self.precision, what, "trim" if self.trimmed else "") if part)
