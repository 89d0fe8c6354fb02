"""What a calibration makes of times: of a host and of listings that answer with chosen ones, and counted by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest, Sharing
from edgeformer.bundle import Bundle, seal
from edgeformer.estimate import calibrate as stage
from edgeformer.estimate import calibrate as teaching
from edgeformer.estimate import host_facts as facts
from edgeformer.estimate.calibrate import OVERLAP, calibrate, full_graphs, write_profile
from edgeformer.estimate.fit import memory_ratio
from edgeformer.estimate.listing import ItemNodes, Listing, ListSpec, Repeats
from edgeformer.estimate.operators import count_node, count_nodes, stored_weight_bytes
from edgeformer.estimate.probe import HostRates, ProductTime
from edgeformer.estimate.profiled import Timed, count_call
from edgeformer.estimate.rates import RAMP, Rates, rates_of
from edgeformer.estimate.roofline import Amounts, amounts, beyond_cache, fitted_us, together
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, stated_cache_bytes
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest


def took(duration_us: float, *, rows: int = 1, width: int = 256, weights: int = 1) -> ProductTime:
    return ProductTime(rows=rows, width=width, weights=weights, duration_us=duration_us)


def test_the_largest_cache_is_linuxs_or_what_the_products_show(tmp_path: Path) -> None:
    single = [took(10.0), took(10.0, weights=8), took(40.0, weights=64), took(1.0, rows=2, weights=512)]
    # four times slower from 16 MiB on; half of that cache was still fast
    assert facts.cache_bytes(single, stated_cache_bytes(tmp_path)) == (
        2 * 8 * 256 * 256 * 4,
        "from the time of products of single rows",
    )
    assert facts.cache_bytes([took(10.0)], stated_cache_bytes(tmp_path))[0] == 2 * 256 * 256 * 4
    # a rate is bytes per time: 64 KiB, 4 MiB and 16 MiB at 6.5, 21 and 1.7 GB/s; more rows than one say nothing of it
    widths = [took(10.0, width=128), took(200.0, width=1024), took(1e4, width=2048), took(1.0, rows=2, width=4096)]
    assert facts.cache_bytes(widths, stated_cache_bytes(tmp_path))[0] == 2 * 4 * 1024**2
    # 10, 6 and 3 GB/s, of ever larger ones: bytes count, not rows of weights
    slower = [took(6.5536, width=128), took(174.76, width=512), took(1398.1, width=1024)]
    assert facts.cache_bytes(slower, stated_cache_bytes(tmp_path))[0] == 2 * 4 * 512**2
    for index, size in enumerate(("32K\n", "8192K\n", "1024K\n", "none\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size, encoding="ascii")
    (tmp_path / "index9" / "size").mkdir(parents=True)
    assert facts.cache_bytes(single, stated_cache_bytes(tmp_path)) == (8 * 2**20, "as Linux says")


RATES = Rates(1e11, 1e11, 1e11, 2e10, 2**20, 1.0)


def test_a_probe_counts_half_of_its_time_and_reads_from_memory_what_no_cache_holds() -> None:
    probed = HostRates(products=(took(8.0, rows=4), took(9.0, weights=64)), bandwidth=2e10, operator_us=2.0)
    held, not_held = teaching._probe_samples(RATES, probed)
    weight = 4 * 256 * 256
    assert held.work.operations == 2 * 4 * 256 * 256 and (held.work.rows, held.work.columns) == (4, 256)
    assert (held.work.cls, held.work.key, held.precision) == ("gemm", "MatMul", "fp32")
    assert (held.work.weight_bytes, held.work.moved_bytes) == (weight, 2 * 4 * 4 * 256)
    assert held.amount == Amounts(held.work.operations, weight + 8192, 0.0, weight)
    assert not_held.amount == Amounts(not_held.work.operations, 2048, weight)
    assert (held.duration_us, held.call_us, not_held.call_us) == (8.0, 16.0, 18.0)


def linear(duration_us: float, dtype: str = "float", width: int = 512, rows: int = 32) -> ExecutedNode:
    weight, taken, given = Tensor(dtype, (512, width)), Tensor("float", (rows, 512)), Tensor("float", (rows, width))
    return ExecutedNode("MatMul", "n", (taken, weight), (given,), weight.bytes, duration_us)


def test_a_listed_call_becomes_one_sample_of_it_and_one_of_each_kind_of_node() -> None:
    nodes = (linear(10.0), linear(14.0), linear(6.0, width=256))
    listed = ItemNodes(item=("steady", 1, 32), nodes=nodes, runs=1, feed_bytes=1, call_us=25.0)
    artifact = ArtifactManifest(id="a", file="a", format="onnx", precision="fp16", status="built")
    call = count_call("r", artifact, listed)
    kinds = teaching._samples(call, RATES)
    weights = 4 * 512 * (512 + 512 + 256)
    assert (call.run, call.artifact, call.call_us, call.weight_bytes) == ("r", artifact, 25.0, weights)
    assert (call.works, call.counts) == ((count_node(nodes[0]), count_node(nodes[2])), (2, 1))
    assert (call.nodes, call.nodes_us) == (3, 30.0)
    assert [(kind.duration_us, kind.call_us, kind.precision) for kind in kinds] == [(12, 15, "fp16"), (6, 30, "fp16")]
    assert [kind.work for kind in kinds] == [count_node(nodes[0]), count_node(nodes[2])]
    assert kinds[0].amount == amounts(count_node(nodes[0]), 1.0, 2**20), "2.6 MB are in no cache of 1 MiB"
    shared = Sharing(unique_parameters=1, stored_parameters=1, weight_bytes=2 * 512 * 512)
    call = count_call("r", artifact.model_copy(update={"sharing": shared}), listed)
    assert call.weight_bytes == 4 * 512 * 512, "no more are in the file, of two bytes each; a loop reads them again"


def test_this_hosts_facts_are_the_fastest_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cache_bytes", lambda products, stated: (5 + len(products), "told"))
    rates = HostRates(products=(took(10.0, rows=256), took(1.0)), bandwidth=2.34567e10, operator_us=2.0)
    small = ItemNodes(item=("steady", 1, 32), nodes=(linear(1.0, "int8", 4),), runs=1, feed_bytes=1)
    quick = ItemNodes(
        item=("steady", 1, 8), nodes=(linear(0.5, "int8"), linear(8.0, "int8"), linear(0.0, "int8"), linear(0.1)),
        runs=1, feed_bytes=1,
    )  # fmt: skip
    artifact = ArtifactManifest(id="a", file="a", format="onnx", precision="int8", status="built")
    base = load_profile("host")
    timed = [Timed("r", artifact, Listing(items={small.item: small, quick.item: quick}))]
    found = facts.host_facts(base, 3, rates, timed)
    assert found.peaks.fp32 is not None and found.peaks.fp32.value == float(f"{2 * 256**3 / 1e-5:.4g}")
    assert found.peaks.fp32.verified
    when, _, rest = found.peaks.fp32.source.partition(" with 3 threads ")
    assert rest.startswith(f"({cpu_name()}): the fastest")
    assert re.fullmatch(r"measured by edgeformer calibrate on 20\d\d-\d\d-\d\d", when)
    assert found.peaks.int8 is not None and found.peaks.int8.value == float(f"{2 * 32 * 512**2 / 0.5e-6:.4g}")
    assert found.bandwidth_bytes_per_s is not None and found.bandwidth_bytes_per_s.value == 2.346e10
    assert found.launch_overhead_us is not None and found.launch_overhead_us.value == 2.0
    assert found.cache_bytes is not None and (found.cache_bytes.value, found.cache_bytes.source) == (
        7, f"told ({cpu_name()})"
    )  # fmt: skip
    assert found.cores is not None and (found.cores.value, found.cores.verified) == (3, True)
    known = (
        found.peaks.fp32,
        found.peaks.int8,
        found.bandwidth_bytes_per_s,
        found.launch_overhead_us,
        found.cache_bytes,
    )
    assert all(fact is not None and fact.verified and "None" not in fact.source for fact in known)
    assert (found.name, found.title, found.budgets) == (base.name, base.title, base.budgets)
    assert (
        facts.host_facts(base, 3, rates, [Timed("r", artifact, Listing(items={small.item: small}))]).peaks.int8 is None
    )


PRECISIONS = ("fp16", "int8", "fp32")  # not the order that they are timed in
NODE_US, CALL_US = {"fp32": 10.0, "int8": 5.0, "fp16": 20.0}, 7.0
"""Microseconds of a product per row of 512; a call takes so many more than its nodes."""


def product_us(rows: int, width: int, weights: int) -> float:
    """60 GFLOP/s, 40 GB/s from the cache, 10 GB/s from memory, where eight weights are, and a microsecond more."""
    computing_us, moving_us, weight_bytes = 2 * rows * width**2 / 6e4, 8 * rows * width / 4e4, 4 * width**2
    if weights == 1:
        return 1 + moving_us + together(computing_us, weight_bytes / 4e4, OVERLAP)
    return 1 + moving_us + computing_us + weight_bytes / 1e4


PROBED = HostRates(
    products=tuple(
        ProductTime(rows=rows, width=width, weights=weights, duration_us=product_us(rows, width, weights))
        for width in (256, 248)
        for rows in (1, 16, 256)
        for weights in (1, 8)
    ),
    bandwidth=2e10,
    operator_us=2.0,
    call_us=CALL_US,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full graphs in three precisions, and what must not be timed."""
    others: dict[str, dict[str, Any]] = {
        "exit1": {"role": "exit", "exit": 1},
        "trimmed": {"trimmed": True},
        "engine": {"format": "tensorrt"},
        "rejected": {"status": "rejected"},
    }
    names = [*others, *PRECISIONS]
    folder = write_bundle(tmp_path_factory.mktemp("calibrating") / "bundle", dict.fromkeys(names, classifier_graph()))
    entries = [artifact_of(folder, f"onnx/{name}.onnx", **changes) for name, changes in others.items()]
    entries += [artifact_of(folder, f"onnx/{name}.onnx", precision=name) for name in PRECISIONS]
    write_manifest(folder, entries)
    return folder


class Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.bars: list[tuple[Any, ...]] = []
        self.steps: list[int] = []
        self.messages: list[str] = []

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.bars.append((description, total, unit))
        self.steps.append(0)

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.steps[-1] += amount

    def finish(self) -> None:
        self.bars.append(("finished",))

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The processes that measure, which answer at once; what they were asked, and what was fitted to."""
    seen = SimpleNamespace(specs=[], threads=[], refused={}, nodes=[], ratio=None, disturbed={})

    def run_probe(threads: int) -> HostRates:
        seen.threads.append(threads)
        return PROBED.model_copy(update={"disturbed": seen.disturbed.get("probe")})

    def run_listing(spec: ListSpec, tick: Callable[[], None]) -> Listing:
        seen.specs.append(spec)
        precision, found = spec.checked.artifact.precision, Listing()
        found.disturbed = next(seen.disturbed.get(precision, iter(())), None)
        for item in spec.items:
            tick()
            if item[1:] in seen.refused.get(precision, ()):
                found.refused[item] = "out of memory"
                continue
            rows = item[1] * item[2]
            nodes = tuple(linear(NODE_US[precision] * rows + extra, rows=rows) for extra in (1.0, 3.0))
            call_us = sum(node.duration_us for node in nodes) + CALL_US
            found.items[item] = ItemNodes(item=item, nodes=nodes, runs=1, feed_bytes=8 * rows, call_us=call_us)
        return found

    def fit_operators(nodes: Sequence[Any], rates: Any, ratio: float) -> Any:
        seen.nodes.append(list(nodes))
        seen.rates, seen.ratio = rates, ratio
        return original(nodes, rates, ratio)

    original = teaching.fit_operators
    monkeypatch.setattr(stage, "run_probe", run_probe)
    monkeypatch.setattr(stage, "run_listing", run_listing)
    monkeypatch.setattr(teaching, "fit_operators", fit_operators)
    monkeypatch.setattr(stage, "default_threads", lambda: 3)
    # one weight of the probe is held, eight are not
    monkeypatch.setattr(facts, "cache_bytes", lambda products, stated: (2**20, f"of {len(products)} products"))
    return seen


SHAPES = [(2, 8), (1, 24), (4, 3), (1, 8), (1, 25)]  # the model takes 24 tokens
SORTED = [(1, 8), (4, 3), (2, 8), (1, 24)]


def test_the_full_graphs_of_a_bundle_in_the_order_that_is_asked_for(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    found = full_graphs(opened, ("fp32", "int8", "fp16"))
    assert [checked.artifact.id for checked in found] == ["fp32", "int8", "fp16"]
    assert [checked.file for checked in found] == [
        bundle / "onnx" / f"{name}.onnx" for name in ("fp32", "int8", "fp16")
    ]
    assert [checked.artifact.id for checked in full_graphs(opened, ("int8",))] == ["int8"]


def test_every_precision_is_timed_at_the_shapes_that_the_model_takes(bundle: Path, host: SimpleNamespace) -> None:
    told = Told()
    calibrate(bundle, load_profile("host"), shapes=SHAPES, progress=told)
    assert host.threads == [3]
    one, back = ("fp32", "int8", "fp16"), ("fp16", "int8", "fp32")
    assert [spec.nodes for spec in host.specs] == [True] * 3 + [False] * 6, "nodes are listed once"
    for spec, precision in zip(host.specs, (*one, *back, *one), strict=True):
        assert spec.checked.artifact.id == precision and spec.checked.file == bundle / "onnx" / f"{precision}.onnx"
        assert spec.items == tuple(("steady", batch, seq) for batch, seq in SORTED), "from small to large"
        assert (spec.threads, spec.timed, spec.budget_s) == (3, True, pytest.approx(200 / 9))
    bars = [("measuring this host's rates", None, "")]
    bars += [
        (f"timing tiny's {name}, sweep {sweep} of 3", 8, "step")
        for sweep, names in enumerate((one, back, one), 1)
        for name in names
    ]
    assert told.bars == [made for one in bars for made in (one, ("finished",))]
    assert told.steps == [0] + [4] * 9 and told.messages == []


def test_threads_that_are_asked_for_are_used(bundle: Path, host: SimpleNamespace) -> None:
    alone = calibrate(bundle, load_profile("host"), shapes=SHAPES, threads=1)
    assert host.threads == [1] and {spec.threads for spec in host.specs} == {1}
    assert alone.calibration is not None and alone.calibration.threads == 1
    assert host.specs[0].budget_s == pytest.approx(200 / 9)
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES, threads=2)
    assert found.calibration is not None and found.calibration.threads == 2
    assert found.cores is not None and found.cores.value == 2


def test_what_was_measured_becomes_a_calibration(bundle: Path, host: SimpleNamespace) -> None:
    base = load_profile("host")
    found = calibrate(bundle, base, shapes=SHAPES)
    assert (found.name, found.title, found.budgets) == (base.name, base.title, base.budgets)
    calibration = found.calibration
    assert calibration is not None
    assert (calibration.processor, calibration.threads, calibration.provider) == (cpu_name(), 3, "CPUExecutionProvider")
    assert calibration.created.startswith("20") and "onnxruntime" in calibration.versions
    assert (calibration.instructions, calibration.stated_cache_bytes) == (kernel_flags(), stated_cache_bytes())
    assert found.peaks.fp32 is not None and found.peaks.fp32.value == float(
        f"{2 * 256**3 / product_us(256, 256, 1) * 1e6:.4g}"
    )
    # twelve products of the probe, and of every precision and shape one kind of node: two that are alike
    (nodes,) = host.nodes
    assert len(nodes) == 12 + 3 * 4
    assert [node.precision for node in nodes] == ["fp32"] * 16 + ["int8"] * 4 + ["fp16"] * 4
    assert [node.duration_us for node in nodes[12:16]] == pytest.approx([10 * rows + 2 for rows in (8, 12, 16, 24)])
    assert set(host.rates) == {"fp32", "int8", "fp16"} and host.rates["int8"].peak == rates_of(found, "int8").peak
    assert host.ratio == memory_ratio(nodes[:12], host.rates["fp32"]) == pytest.approx(4, rel=0.05)
    assert set(calibration.efficiencies) == set(calibration.call_overhead_us) == {"fp32", "int8", "fp16"}
    operators = {precision: set(found) for precision, found in calibration.operators.items()}
    assert operators == {key: {"MatMul"} for key in ("fp32", "int8", "fp16")}, "four sizes of each"
    cases = calibration.fitted_on
    assert [(case.artifact, case.precision, case.batch, case.seq) for case in cases] == [
        (precision, precision, batch, seq) for precision in ("fp32", "int8", "fp16") for batch, seq in SORTED
    ]
    assert {case.run for case in cases} == {"tiny"}
    for case in cases:
        rows = case.batch * case.seq
        assert case.measured_ms == pytest.approx((2 * NODE_US[case.precision] * rows + 4 + CALL_US) / 1000)
        nodes = [linear(1.0, rows=rows)] * 2
        works, artifact = count_nodes(nodes), ArtifactManifest.model_construct(precision=case.precision)
        weights = stored_weight_bytes(nodes, works, artifact)
        us = fitted_us(works, rates_of(found, case.precision), calibration, case.precision, weights)
        assert case.estimated_ms == pytest.approx(us / 1000)
        assert case.estimated_ms == pytest.approx(case.measured_ms, rel=0.25)


def facts_of(found: DeviceProfile) -> list[bool]:
    known = (found.peaks.fp32, found.bandwidth_bytes_per_s, found.launch_overhead_us, found.cache_bytes)
    return [fact.verified for fact in known if fact is not None]


def test_a_process_that_was_disturbed_is_repeated_once(bundle: Path, host: SimpleNamespace) -> None:
    told = Told()
    host.disturbed = {"int8": iter(["other processes used 1.4 cores"])}
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES, progress=told)
    assert [spec.checked.artifact.id for spec in host.specs[:4]] == ["fp32", "int8", "int8", "fp16"]
    assert found.calibration is not None and found.calibration.disturbed is None
    assert facts_of(found) == [True] * 4 and told.messages == []


def test_what_was_disturbed_twice_is_no_verified_fact_and_says_so(bundle: Path, host: SimpleNamespace) -> None:
    told = Told()
    host.disturbed = {"int8": iter(["other processes used 1.4 cores"] * 2)}
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES, progress=told)
    says = "1 of 10 measuring processes were disturbed: other processes used 1.4 cores"
    assert found.calibration is not None and found.calibration.disturbed == says
    assert facts_of(found) == [False] * 4 and found.peaks.fp32 is not None and says in found.peaks.fp32.source
    assert told.messages == [f"these times are no facts: {says}; calibrate again when nothing else runs"]
    host.disturbed = {"probe": "the hypervisor took 0.9 cores away"}
    assert facts_of(calibrate(bundle, load_profile("host"), shapes=SHAPES)) == [False] * 4


def test_shapes_that_could_not_be_timed_are_named_and_four_must_be_left(bundle: Path, host: SimpleNamespace) -> None:
    told = Told()
    host.refused = {"int8": [(4, 3), (1, 24)]}
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES, progress=told)
    said = ("int8 at 4×3: not timed: out of memory", "int8 at 1×24: not timed: out of memory")
    assert tuple(told.messages) == said and found.calibration is not None
    assert [case.precision for case in found.calibration.fitted_on] == ["fp32"] * 4 + ["int8"] * 2 + ["fp16"] * 4
    host.refused = {"fp32": [(4, 3)]}
    with pytest.raises(EdgeformerError, match="fewer than 4 shapes of the FP32 graph"):
        calibrate(bundle, load_profile("host"), shapes=SHAPES)


def test_nothing_is_measured_where_it_could_not_be_fitted(bundle: Path, host: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"at least 4 shapes that the model takes \(up to 24 tokens\), not 3"):
        calibrate(bundle, load_profile("host"), shapes=[(2, 8), (1, 24), (1, 8), (1, 25), (9, 26)])
    with pytest.raises(InputError, match="only processors"):
        calibrate(bundle, load_profile("rtx4050"), shapes=SHAPES)
    theirs = load_profile("host").model_copy(update={"name": "theirs", "match": "Another 9000"})
    with pytest.raises(
        InputError, match=r"--device theirs: this host's processor is .*; calibrate on the device itself"
    ):
        calibrate(bundle, theirs, shapes=SHAPES)
    folder = write_bundle(tmp_path / "bundle")
    for changes in ({"precision": "int8"}, {"trimmed": True}):
        write_manifest(folder, [artifact_of(folder, "onnx/model.onnx", **changes)])
        with pytest.raises(InputError, match="needs the full FP32 ONNX graph"):
            calibrate(folder, load_profile("host"), shapes=SHAPES)
    assert host.threads == host.specs == []


def test_a_profile_is_written_for_people_and_read_back(bundle: Path, host: SimpleNamespace, tmp_path: Path) -> None:
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES)
    device: DeviceProfile = found.model_copy(update={"name": "büro".replace("ü", "ue"), "title": "Büro 2×4"})
    path = write_profile(device, tmp_path / "profiles")
    assert path == tmp_path / "profiles" / "buero.yaml" and load_profile(str(path)) == device
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Written by `edgeformer calibrate`") and "\ntitle: Büro 2×4\nkind: cpu\n" in text
    document = yaml.safe_load(text)
    assert list(document)[:3] == ["name", "title", "kind"], "in the order of the profiles that are shipped"
    assert "match" not in document and "null" not in text and "error" not in document["calibration"]
    assert "validated_on" not in document["calibration"], "nothing that was not said"
    assert max(map(len, text.splitlines())) > 100, "sources are not broken into many lines"
    assert document["budgets"]["classification"]["latency_p50_ms"] == 50.0


def other_model(folder: Path, name: str) -> Path:
    """A bundle of another run with an FP32 graph."""
    made = write_bundle(folder / name / "bundle", {"model": classifier_graph()})
    seal(made, Bundle.open(made).manifest.model_copy(update={"run": name}))
    return made


def test_each_of_three_models_is_left_out_once(bundle: Path, host: SimpleNamespace, tmp_path: Path) -> None:
    others = [other_model(tmp_path, name) for name in ("second", "third")]
    two = calibrate(bundle, load_profile("host"), shapes=SHAPES, further=others[:1]).calibration
    assert two is not None and two.error is None, "two models say nothing of a third"
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES, further=others).calibration
    assert found is not None and found.error is not None and found.error.models == 3
    assert found.validated_on == (), "that is said of other shapes of the same model"
    checked = [(case.run, case.precision) for case in found.left_out]
    # of INT8 and FP16 nobody else had a graph
    assert checked == [(name, "fp32") for name in ("tiny", "second", "third") for _ in SORTED]
    assert found.error.spread_log2 is not None and 0 <= found.error.spread_log2 <= found.error.worst_log2


def test_several_models_show_fewer_shapes_and_the_decoders_of_theirs(host: SimpleNamespace, tmp_path: Path) -> None:
    shapes = [(1, seq) for seq in range(8, 18)]
    graphs = {"model": classifier_graph(50, 128), "decode": classifier_graph(50, 128)}
    folder = write_bundle(tmp_path / "long" / "bundle", graphs)
    entries = [artifact_of(folder, "onnx/model.onnx"), artifact_of(folder, "onnx/decode.onnx", role="decode")]
    write_manifest(folder, entries)
    calibrate(folder, load_profile("host"), shapes=shapes, further=[other_model(tmp_path, "second")])
    asked = {(spec.checked.file.parts[-4], spec.checked.artifact.role): spec.items for spec in host.specs}
    assert asked["long", "full"] == asked["second", "full"] == tuple(("steady", 1, seq) for seq in range(8, 18, 2))
    assert asked["long", "decode"] == (("decode", 1, 24),), "as far as the model's texts go"
    assert [spec.budget_s for spec in host.specs] == pytest.approx([200 / 9] * 9)


def test_models_that_teach_twice_or_take_too_long_are_refused(
    bundle: Path, host: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="--also: tiny is there twice"):
        calibrate(bundle, load_profile("host"), shapes=SHAPES, further=[bundle])
    many = [other_model(tmp_path, f"m{number}") for number in range(28)]
    with pytest.raises(InputError, match=r"--also: 31 graphs take about 1\d minutes, .* at most 10; name fewer runs"):
        calibrate(bundle, load_profile("host"), shapes=SHAPES, further=many)
    assert host.specs == []


def test_there_is_only_so_much_time_for_second_tries() -> None:
    asked: list[int] = []

    def run() -> Listing:
        asked.append(1)
        return Listing(disturbed="others")

    assert Repeats(10.0).undisturbed(run).disturbed == "others" and len(asked) == 2
    Repeats(0.0).undisturbed(run)
    assert len(asked) == 3


def test_a_cache_that_is_stated_larger_than_it_is_shows_in_products(tmp_path: Path) -> None:
    def products(cache: int) -> list[ProductTime]:
        sizes = [(1024, 1), (1024, 4), (1024, 10), (1024, 24), (512, 8), (384, 8)]
        return [
            took(
                2 + 4 * width**2 * (1 + 2 * beyond_cache(4.0 * width**2 * count, cache)) / 3e4,
                width=width,
                weights=count,
            )
            for width, count in sizes
        ]

    size, how = facts.shown_cache(products(32 << 20), 1, 480 << 20, "as Linux says")
    assert size == 32 << 20 and "480 MiB" in how
    assert facts.shown_cache(products(480 << 20), 1, 480 << 20, "told") == (480 << 20, "told")
    assert facts.shown_cache(products(32 << 20)[:3], 1, 480 << 20, "told") == (480 << 20, "told"), "too few to tell"


def test_what_two_cores_hold_for_themselves_is_not_taken_for_the_last_cache() -> None:
    """As a Xeon's products went on two threads: 4 MiB from the caches of its cores, 100 and 200 MiB from memory."""
    rates = {(1024, 1): 90, (384, 8): 41, (512, 8): 43, (1024, 3): 52, (1024, 10): 52, (1024, 24): 35, (1024, 48): 25}
    probed = [
        took(4 * width**2 / gigabytes / 1e3, width=width, weights=count, rows=rows)
        for (width, count), gigabytes in rates.items()
        for rows in (1, 4)
    ]
    size, how = facts.shown_cache(probed, 2, 480 << 20, "as Linux says")
    assert 64 << 20 <= size <= 256 << 20 and "480 MiB" in how


@pytest.mark.parametrize("threads", [1, 2, 8, 10, 16, 24, 32, 64])
def test_a_cache_that_is_as_large_as_stated_is_believed_whatever_the_cores_hold(threads: int) -> None:
    products = probed_with(480 << 20, kept=threads * (2 << 20))
    assert facts.shown_cache(products, threads, 480 << 20, "told") == (480 << 20, "told")


@pytest.mark.parametrize("threads", [1, 2, 8, 10, 16])
def test_a_cache_shows_on_many_threads_too(threads: int) -> None:
    """What they ask of a set is more than most sets of the probe have: then the largest four must do."""
    size, how = facts.shown_cache(probed_with(64 << 20, kept=threads << 20), threads, 480 << 20, "as Linux says")
    assert 48 << 20 <= size <= 96 << 20 and "480 MiB" in how


def test_one_wrong_time_does_not_make_a_cache_of_its_own() -> None:
    """Neither one that came out too long nor one too short, by whatever factor."""
    for place, factor in ((-1, 40), (3, 0.1)):
        products = probed_with(480 << 20)
        wrong = {"duration_us": factor * products[place].duration_us}
        products[place] = products[place].model_copy(update=wrong)
        assert facts.shown_cache(products, 1, 480 << 20, "told") == (480 << 20, "told")


def probed_with(cache: int, kept: int = 0) -> list[ProductTime]:
    """Products of the probe's sizes from a cache that is four times as fast as the memory; sets of up to ``kept``
    bytes, which the cores hold for themselves, are twice as fast again."""

    def us(width: int, count: int) -> float:
        size = 4.0 * width**2
        far = beyond_cache(size * count, cache)
        return 2 + size * (0.5 if size * count <= kept else 1 - far + 4 * far) / 6e4

    sizes = [(256, 4), (384, 8), (512, 8), *((1024, count) for count in (1, 3, 4, 5, 7, 10, 24, 48))]
    return [took(us(*size), width=size[0], weights=size[1], rows=rows) for size in sizes for rows in (1, 4)]


def ramped(ramp: tuple[float, float], noise: float = 0.0) -> list[ProductTime]:
    """Products of the probe's sizes on a processor with a cache of 32 MiB that keeps as much as a ramp says."""
    draw = np.random.default_rng(3)
    sizes = [(512, 8), (384, 8), *((1024, count) for count in (1, 3, 4, 5, 7, 10, 24))]
    return [
        took(
            (2 + 4 * width**2 * (1 + 3 * beyond_cache(4.0 * width**2 * count, 32 << 20, ramp)) / 3e4)
            * float(np.exp(draw.normal(scale=noise))),
            width=width, weights=count, rows=rows,
        )
        for width, count in sizes for rows in (1, 4)
    ]  # fmt: skip


def test_where_a_cache_ends_shows_in_products() -> None:
    """One that keeps everything up to 70 % of it, and nothing from its size on."""
    assert facts.shown_ramp(ramped((0.7, 1.0)), 1, 32 << 20) == (0.7, 1.0)
    for usual in (ramped(RAMP), ramped(RAMP, 0.03), ramped((0.7, 1.0))[:6]):
        assert facts.shown_ramp(usual, 1, 32 << 20) is None, "as usual, noise, or too few to tell"
    assert facts.shown_ramp(ramped((0.7, 1.0)), 1, 0) is None


def test_a_ramp_that_was_shown_is_used_by_estimates(bundle: Path, host: SimpleNamespace) -> None:
    found = calibrate(bundle, load_profile("host"), shapes=SHAPES)
    assert (
        found.calibration is not None and found.calibration.cache_ramp is None and rates_of(found, "fp32").ramp == RAMP
    )
    steep = found.calibration.model_copy(update={"cache_ramp": (0.7, 1.0)})
    rates = rates_of(found.model_copy(update={"calibration": steep}), "fp32")
    assert rates.ramp == (0.7, 1.0)
    half = count_node(linear(1.0))
    shares = [amounts(half, beyond_cache(2**19, 2**20, ramp), 2**20, ramp).far_bytes for ramp in (RAMP, rates.ramp)]
    assert shares[0] > 0 == shares[1]
