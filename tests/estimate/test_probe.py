"""The graphs that are written byte by byte are what the onnx package takes for them, and compute what they should."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeformer.artifacts.documents import load_profile
from edgeformer.estimate import probe
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.probe import HostRates, ProductTime, cache_bytes, disturbance, host_facts
from edgeformer.measurement.conditions import CpuReading
from edgeformer.measurement.speed_probe import SpeedProbe, add_chain, matmul_chain
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system.host import cpu_name
from edgeformer.system.worker import End


def test_chains_are_valid_and_compute_what_they_should(tmp_path: Path) -> None:
    content = matmul_chain(16, 3)
    (tmp_path / "chain.onnx").write_bytes(content)
    weights = [numpy_helper.to_array(tensor) for tensor in onnx.load_from_string(content).graph.initializer]
    assert len({weight.tobytes() for weight in weights}) == 3
    x = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    session = OnnxSession(tmp_path / "chain.onnx")
    assert session.run({"x": x})["y"] == pytest.approx(np.linalg.multi_dot([x, *weights]), abs=1e-4)
    session.close()
    (tmp_path / "chain.onnx").write_bytes(add_chain(4, 5))
    x = np.arange(4, dtype=np.float32)
    (nodes,) = ProfiledGraph(tmp_path / "chain.onnx").list_nodes({"x": x})
    assert [node.op for node in nodes] == ["Add"] * 5
    session = OnnxSession(tmp_path / "chain.onnx")
    assert session.run({"x": x})["y"] == pytest.approx(6 * x)
    session.close()
    for content in (matmul_chain(16, 3), add_chain(300, 2)):
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


def products_at(*rates: float) -> list[ProductTime]:
    """Single rows times 4, 16, 32, 96 and 192 MiB of weights, at so many bytes per microsecond."""
    times = zip((1, 4, 8, 24, 48), (4 * 1024**2 / rate for rate in rates), strict=True)
    return [ProductTime(rows=1, width=1024, weights=count, duration_us=us) for count, us in times]


@pytest.mark.parametrize(
    ("rates", "stated_mib", "mib"),
    [
        ((9, 9, 9, 9, 8), 480, 480),  # all of them fit: the system is believed
        ((9, 9, 9, 9, 8), None, 384),
        ((9, 9, 9, 7, 4), 480, 192),  # a virtual machine's neighbours use the cache
        ((9, 9, 9, 7, 4), 64, 64),  # never more than the system states
        ((9, 9, 8, 3, 3), None, 64),
    ],
)
def test_the_cache_is_what_the_system_states_or_less_where_products_get_slow(rates, stated_mib, mib):
    size, source = cache_bytes(products_at(*rates), stated_mib and stated_mib << 20)
    assert size == mib << 20
    assert source == ("as Linux says" if mib == stated_mib else source) and source


def test_host_facts_are_the_fastest_products_with_their_source() -> None:
    rates = HostRates(products=tuple(products_at(9, 9, 9, 9, 9)), bandwidth=2.34567e10, operator_us=2.0)
    base = load_profile("host")
    int8 = NodeWork("gemm", "MatMulInteger", 2e7, 1.0, 1.0, quantized=True)
    small = NodeWork("gemm", "MatMulInteger", 1e6, 1.0, 1.0, quantized=True)
    works = [(int8, 8.0), (int8, 4.0), (int8, 0.0), (small, 0.001)]
    device = host_facts(base, 3, rates, works, None)
    facts = (device.peaks.fp32, device.peaks.int8, device.bandwidth_bytes_per_s, device.launch_overhead_us)
    assert [fact.value for fact in facts if fact is not None] == [4.5e6 * 1.0, 5e12, 2.346e10, 2.0]
    assert device.cores is not None and device.cores.value == 3
    for fact in facts:
        assert fact is not None and fact.verified == "measured here" and f"with 3 threads ({cpu_name()})" in fact.source
    assert (device.name, device.title, device.budgets) == (base.name, base.title, base.budgets)
    disturbed = host_facts(base, 3, rates, [], "others computed")
    assert disturbed.peaks.int8 is None and disturbed.peaks.fp32 is not None
    assert disturbed.peaks.fp32.verified == "no" and "others computed" in disturbed.peaks.fp32.source


@pytest.mark.parametrize(("busy_s", "text"), [(1.0, None), (1.15, None), (1.9, "other processes used 0.9 cores")])
def test_other_work_beside_a_measurement_is_seen(monkeypatch, busy_s, text):
    """One second, in which this process used one core."""
    start, end = (CpuReading(second, second * busy_s, second, 0.0, None) for second in (0.0, 1.0))
    monkeypatch.setattr(probe, "read_cpu", lambda: end)
    result = disturbance(start)
    assert result is None if text is None else result is not None and text in result


def test_a_probe_that_was_disturbed_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [HostRates(products=(), bandwidth=1.0, operator_us=1.0, disturbed=text) for text in ("x", "y", None)]

    def run_job(job: object, take: Callable[[HostRates], None]) -> End:
        take(answers.pop(0))
        return End()

    monkeypatch.setattr(probe, "run_job", run_job)
    assert probe.run_probe(1).disturbed == "y" and len(answers) == 1
    assert probe.run_probe(1).disturbed is None and not answers


def test_the_speed_probe_measures_a_product_and_a_copy() -> None:
    speed_probe = SpeedProbe()
    speeds = [speed_probe.speed() for _ in range(3)]
    assert all(0 < speed.product_us < 1e6 and 0 < speed.copy_us < 1e6 for speed in speeds)
