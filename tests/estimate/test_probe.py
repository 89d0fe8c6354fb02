"""The graphs that are written byte by byte are what the onnx package takes for them, and compute what they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeformer.benchmark.process import End
from edgeformer.estimate import probe
from edgeformer.estimate.host_facts import cache_bytes
from edgeformer.estimate.probe import HostRates, ProductTime
from edgeformer.estimate.speed_probe import add_chain, matmul_chain
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system.host import stated_cache_bytes


def test_onnx_accepts_them() -> None:
    for content in (matmul_chain(16, 3), add_chain(300, 2)):
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


def test_a_chain_of_products_is_the_product_of_its_weights(tmp_path: Path) -> None:
    content = matmul_chain(16, 3)
    (tmp_path / "chain.onnx").write_bytes(content)
    weights = [numpy_helper.to_array(tensor) for tensor in onnx.load_from_string(content).graph.initializer]
    assert len({weight.tobytes() for weight in weights}) == 3
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    session = OnnxSession(tmp_path / "chain.onnx")
    assert session.run({"x": x})["y"] == pytest.approx(np.linalg.multi_dot([x, *weights]), abs=1e-4)
    session.close()


def test_a_chain_of_sums_runs_every_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "chain.onnx").write_bytes(add_chain(4, 5))
    x = np.arange(4, dtype=np.float32)
    (nodes,) = ProfiledGraph(tmp_path / "chain.onnx").list_nodes({"x": x})
    assert [node.op for node in nodes] == ["Add"] * 5
    session = OnnxSession(tmp_path / "chain.onnx")
    assert session.run({"x": x})["y"] == pytest.approx(6 * x)
    session.close()


def test_chains_for_which_there_is_no_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {1 << 30: (1024, 48), 500 << 20: (1024, 24)}
    for size, largest in free.items():
        monkeypatch.setattr(probe, "host_free_bytes", lambda size=size: (size, "free here"))
        kept = probe._that_fit(probe._CHAINS)
        assert kept[-1] == largest and kept == list(probe._CHAINS[: len(kept)])


def times(*per_weight_us: float) -> list[ProductTime]:
    counts = (1, 4, 8, 24)
    return [
        ProductTime(rows=1, width=1024, weights=count, duration_us=us)
        for count, us in zip(counts, per_weight_us, strict=True)
    ]


def test_the_cache_is_what_the_system_says_or_where_products_get_slow(tmp_path: Path) -> None:
    for number, size in enumerate(("32K", "512K", "16384K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n", encoding="ascii")
    assert cache_bytes(times(100, 170, 225, 255), stated_cache_bytes(tmp_path)) == (16 * 2**20, "as Linux says")
    size, how = cache_bytes(times(100, 150, 225, 255), stated_cache_bytes(tmp_path / "elsewhere"))
    assert size == 2 * 16 * 2**20 and "products" in how


def test_a_probe_that_was_disturbed_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [HostRates(products=(), bandwidth=1.0, operator_us=1.0, disturbed=doubts) for doubts in ("x", "y", None)]

    def run_job(job: object, messages: object, silence_s: float, take: Callable[[HostRates], None]) -> End:
        take(said.pop(0))
        return End()

    monkeypatch.setattr(probe, "run_job", run_job)
    assert probe.run_probe(1).disturbed == "y" and len(said) == 1
    assert probe.run_probe(1).disturbed is None and not said
