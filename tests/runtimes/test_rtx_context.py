"""How engines of tensorrt-rtx are opened: kernel specialization, CUDA graphs, and the cache of compiled kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.files import sha256_of
from edgeformer.bundle import Bundle
from edgeformer.runtimes import OpenOptions
from edgeformer.system import cuda_driver
from edgeformer.system.cuda_driver import Device
from edgeformer.system.leftovers import cache_folder
from tests.runtimes.stand_in_tensorrt import (
    CudaGraphStrategy,
    StandInEngine,
    StandInRuntimeCache,
    StandInRuntimeConfig,
    stand_in,
    with_engines,
)

MEASURING, ANSWERING = OpenOptions(repeated_shapes=True), OpenOptions()
FULL = "tensorrt-rtx-fp32"


@pytest.fixture
def bundle(tmp_path: Path) -> Iterator[Bundle]:
    """Of a classifier, with engines of the stand-in."""
    with stand_in():
        yield Bundle.open(with_engines("classifier-v1", tmp_path / "bundle"))


def call(rows: int = 2, length: int = 8) -> dict[str, np.ndarray[Any, Any]]:
    ids = np.ones((rows, length), np.int64)
    return {"input_ids": ids, "attention_mask": ids}


def run(bundle: Bundle, options: OpenOptions = MEASURING, calls: int = 1) -> tuple[dict[str, Any], StandInEngine]:
    """Open the full engine, call it, close it; return its settings and the stand-in that computed."""
    with bundle.session(bundle.artifact(FULL), options) as session:
        for _ in range(calls):
            session.run(call())
        return session.settings(), StandInEngine.opened[-1]


def cache_files() -> list[Path]:
    return sorted(cache_folder().rglob("*.cache"))


def test_the_stand_in_has_nothing_that_tensorrt_rtx_lacks() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    for name in vars(StandInRuntimeConfig()).keys() - {"cache"} | {"create_runtime_cache", "set_runtime_cache"}:
        assert hasattr(trt.IRuntimeConfig, name), name
    assert hasattr(trt.ICudaEngine, "create_runtime_config")
    assert hasattr(trt.IRuntimeCache, "serialize") and hasattr(trt.IRuntimeCache, "deserialize")
    for strategy in ("DynamicShapesKernelSpecializationStrategy", "CudaGraphStrategy"):
        ours = getattr(sys.modules[StandInEngine.__module__], strategy)
        assert set(ours.__members__) == set(getattr(trt, strategy).__members__)


def test_measuring_compiles_before_the_first_answer_and_captures(bundle: Bundle) -> None:
    settings, engine = run(bundle, MEASURING, calls=5)
    assert settings == {"kernel_specialization": "eager", "cuda_graphs": "whole_graph_capture", "runtime_cache": "new"}
    assert engine.config is not None and engine.config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    assert len(engine.calls) == 5 and len(set(engine.calls)) == 1, "shapes and addresses repeat: one captured graph"
    settings, _ = run(bundle, ANSWERING)
    assert (settings["kernel_specialization"], settings["cuda_graphs"]) == ("lazy", "disabled")


def test_an_engine_with_caches_neither_specialises_nor_captures(tmp_path: Path) -> None:
    with stand_in():
        bundle = Bundle.open(with_engines("language-v1", tmp_path / "bundle"))
        for options in (MEASURING, ANSWERING):
            decoder = bundle.decoder(bundle.artifact("tensorrt-rtx-fp32-decode"), (bundle.loops,), options)
            for token in range(1, 9):
                decoder.read([token])
                decoder.advance(bundle.loops)
            settings, engine = decoder.settings(), StandInEngine.opened[-1]
            decoder.close()
            assert (settings["kernel_specialization"], settings["cuda_graphs"]) == ("none", "disabled")
            assert len(set(engine.calls)) == 8, "every token has a shape of its own"
        assert engine.compiled == [], "the second process found the kernels of the first"


def test_kernels_are_compiled_once_per_engine_and_gpu(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = run(bundle)
    settings, second = run(bundle)
    assert (len(first.compiled), second.compiled, settings["runtime_cache"]) == (1, [], "loaded")
    (file,) = cache_files()
    engine = sha256_of(bundle.folder / str(bundle.artifact(FULL).file))
    assert file.name == f"{engine}-nvidia-geforce-rtx-4050-laptop-gpu-8.9-1.7.1.cache"
    monkeypatch.setattr(cuda_driver, "devices", lambda: (Device(0, "NVIDIA GeForce RTX 4060 Laptop GPU", "8.9"),))
    settings, third = run(bundle)
    assert (len(third.compiled), settings["runtime_cache"]) == (1, "new")
    assert len(cache_files()) == 2


def test_a_cache_that_cannot_be_used_is_written_again(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file does not reach TensorRT; that of another driver is refused by it."""
    run(bundle)
    (file,) = cache_files()
    content, unusable = file.read_bytes(), "new, because the cache file was damaged, or of another driver or version"
    for damaged in (content[:-1], content[:20], content[:40] + b"?" + content[41:]):
        file.write_bytes(damaged)
        with monkeypatch.context() as patch:
            patch.setattr(StandInRuntimeCache, "deserialize", lambda *_: pytest.fail("damaged bytes reached TensorRT"))
            settings, engine = run(bundle)
        assert settings["runtime_cache"] == unusable
        assert len(engine.compiled) == 1 and file.read_bytes() == content
    monkeypatch.setattr(StandInRuntimeCache, "environment", b"driver 600;")
    assert run(bundle)[0]["runtime_cache"] == unusable
    assert run(bundle)[0]["runtime_cache"] == "loaded"
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("EDGEFORMER_CACHE", str(tmp_path / "file"))  # no folder: it costs no answer
    settings, engine = run(bundle)
    assert settings["runtime_cache"].startswith("new") and len(engine.calls) == 1
