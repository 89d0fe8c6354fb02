"""Models to estimate, of several families, with random weights: no time depends on them, so nothing is trained.

Sizes are those of models that people use. What is made once lies in a work folder, and is not made again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.import_sizes import make_albert

_REVIEWS = "kind: synthetic-reviews"
_CLASSES = (
    f"data.parts={{train: [{{{_REVIEWS}, rows: 300, seed: 1}}]}}", "data.split=random-split", "training.batch_size=4",
)  # fmt: skip
_TEXT = (
    f"data.parts={{train: [{{{_REVIEWS}, rows: 300, seed: 1}}], validation: [{{{_REVIEWS}, rows: 20, seed: 2}}], "
    f"test: [{{{_REVIEWS}, rows: 20, seed: 3}}]}}",
    "data.min_characters=20", "data.first_n=null", "training.batch_size=2",
)  # fmt: skip
_WIDE_CRT = (
    "model.hidden_size=256", "model.embedding_size=128", "model.ffn_size=768", "model.loops=4", "model.exits=[2]",
)  # fmt: skip
_BERT: dict[str, Any] = {"max_position_embeddings": 512, "vocab_size": 30522}


@dataclass(frozen=True)
class Model:
    """One model of the record."""

    name: str
    family: str
    theirs: bool  # not of edgeformer's own design
    make: Callable[[Path], object]  # writes a bundle into a folder that does not exist yet
    artifacts: int = 2  # that are measured: graphs in FP32 and INT8, and decoders where it has them

    @property
    def kind(self) -> str:
        """Families that have much in common: imported encoders of all makes are one."""
        return "imported" if self.family.startswith("imported ") else self.family.split(",")[0]

    def bundle_folder(self, work: Path) -> Path:
        """Folder of its bundle, which may not exist."""
        return work / "models" / self.name / "bundle"

    def exists(self, work: Path) -> bool:
        """Whether its bundle lies in the work folder."""
        return (self.bundle_folder(work) / "bundle.json").is_file()

    def bundle(self, work: Path) -> Path:
        """Return the bundle in the work folder; make it if it does not exist."""
        bundle = self.bundle_folder(work)
        if not self.exists(work):
            shutil.rmtree(bundle.parent, ignore_errors=True)
            self.make(bundle.parent)
        return bundle


def trained_one_step(recipe: str, overrides: tuple[str, ...], folder: Path) -> None:
    """A shipped recipe's model after one step on generated reviews: export wants a finished run."""
    from edgeformer.export.export import export
    from edgeformer.export.variants import ExportOptions
    from edgeformer.models import load_recipe
    from edgeformer.training.train import TrainOptions, train

    plain = load_recipe(recipe, [*overrides])
    folder.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(folder.parent / f"{folder.name}-tokenizer.json", plain.model.vocab_size)
    settings = [f"tokenizer={{kind: file, path: {tokenizer}}}", "training.precision=fp32"]
    small = load_recipe(recipe, [*overrides, *settings])
    run = train(small, TrainOptions(folder.parent, name=folder.name, max_steps=1, ignore_memory=True))
    export(run, ExportOptions(int8=True))


def imported(kind: str, sizes: Mapping[str, Any], folder: Path) -> None:
    """A model of transformers' own making with a configuration that is in use, imported as a checkpoint would be."""
    import torch
    from transformers import AutoConfig, AutoModel

    from edgeformer.export.export import export
    from edgeformer.export.variants import ExportOptions
    from edgeformer.imports.encoder import HfOptions, import_hf

    source = folder.parent / f".{folder.name}-source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    tokenizer = _tokenizer(source / "tokenizer.json", _BERT["vocab_size"])
    if kind == "albert":
        make_albert(source, tokenizer)  # reads the tokenizer, and writes it where it is
    else:
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**_BERT, **sizes})
        AutoModel.from_config(config).save_pretrained(source)
    run = import_hf(str(source), HfOptions(folder.parent, name=folder.name))
    export(run, ExportOptions(int8=True))
    shutil.rmtree(source)


def _tokenizer(file: Path, tokens: int) -> Path:
    """A WordPiece tokenizer of so many tokens, most of which no text has: embedding tables get their real size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from edgeformer.data.synthetic import SENTENCES

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += sorted({word for text in SENTENCES for word in text.split()})
    words += [f"[unused{number}]" for number in range(tokens - len(words))]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(file.resolve()))
    return file.resolve()


def wrapped(source: Path, shapes: Mapping[str, Any], ranges: Mapping[str, Any], folder: Path) -> None:
    """Somebody's ONNX file as it is."""
    from edgeformer.imports.onnx import OnnxImportOptions, import_onnx

    import_onnx(source, folder / "bundle", OnnxImportOptions(shapes=shapes, ranges=ranges))


def own_models() -> list[Model]:
    """Everything that can be made without any file of others."""

    def recipe(of: str, family: str, overrides: tuple[str, ...], name: str | None = None) -> Model:
        make = partial(trained_one_step, of, overrides)
        return Model(name or of, family, False, make, artifacts=4 if family == "CRT" else 2)

    def hub(name: str, kind: str, **sizes: Any) -> Model:
        return Model(name, f"imported {kind}", True, partial(imported, kind, sizes))

    return [
        recipe("recurrent_sst2_fast", "encoder, three layers in a loop", _CLASSES),
        recipe("baseline_sst2_fast", "encoder, stacked layers", _CLASSES),
        recipe("crt_mini", "CRT", _TEXT),
        recipe("crt_mini", "CRT", (*_TEXT, *_WIDE_CRT), name="crt_wide"),
        hub("albert-base", "albert"),
        hub("minilm-l6", "bert", hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
        hub("bert-mini", "bert", hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024),
        hub("distilbert-base", "distilbert", dim=768, hidden_dim=3072, n_layers=6, n_heads=12),
        hub("electra-small", "electra", embedding_size=128, hidden_size=256, num_hidden_layers=12,
            num_attention_heads=4, intermediate_size=1024),
    ]  # fmt: skip


def foreign_models(folder: Path) -> list[Model]:
    """Those ONNX files of known packages that lie unpacked in a folder (``unzip`` of their wheels), as they are."""
    models: list[tuple[str, str, str, dict[str, Any], dict[str, Any]]] = [
        ("magika", "file types, convolutions and products", "magika/models/standard_v3_3/model.onnx",
         {"bytes": ("B", 2048)}, {"bytes": (0, 256)}),
        ("ppocr-rec", "text recognition, convolutions and attention",
         "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", {"x": ("B", 3, 48, 160)}, {}),
        ("ppocr-det", "text detection, convolutions",
         "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", {"x": ("B", 3, 160, 160)}, {}),
    ]  # fmt: skip
    return [
        Model(name, family, True, partial(wrapped, folder / file, shapes, ranges), artifacts=1)
        for name, family, file, shapes, ranges in models
        if (folder / file).is_file()
    ]
