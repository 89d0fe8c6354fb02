"""The shipped hardware profiles, how a device is recognised, and its peak rates."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from edgeformer.artifacts import documents
from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import own_profiles, shipped_folder, shipped_names
from edgeformer.measurement.target import find_target
from edgeformer.system import nvidia
from tests.cli.in_process import Edgeformer
from tests.conftest import OLD_FORMAT

load_profile = cache(documents.load_profile)  # reading YAML is most of what these tests would do
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guides" / "profiles.md"
MIB, GIB = 2**20, 2**30
NAMES = (
    "a100-80gb", "amd-ryzen-5-5625u", "amd-ryzen-5700g", "apple-m1", "apple-m4", "gtx1650", "h100", "h200", "host",
    "intel-n100", "intel-n5105", "jetson-agx-orin-64gb", "jetson-orin-nano-8gb", "jetson-orin-nx-16gb", "l4",
    "raspberry-pi-4", "raspberry-pi-5", "rk3588", "rtx3050-6gb", "rtx4050", "rtx4060-laptop", "snapdragon-8-gen-2",
    "t4",
)  # fmt: skip
DEVICES = tuple(name for name in NAMES if name != "host")
NEEDED = (
    "memory_bytes", "system_bytes", "usable_memory_bytes", "context_bytes", "bandwidth_bytes_per_s", "cache_bytes",
    "cores", "launch_overhead_us", "power",
)  # fmt: skip


def facts(profile: DeviceProfile) -> Iterator[tuple[str, Fact[object]]]:
    for owner in (profile, profile.peaks):
        for field in type(owner).model_fields:
            if isinstance(fact := getattr(owner, field), Fact):
                yield field, fact


_HOW = re.compile(r"\b(measured|nvidia-smi|deviceQuery|cudaDeviceProp|NVML|lscpu|benchmarks?/)", re.IGNORECASE)
_DENIED = re.compile(r"\b(not|never|un)[ -]?measured|\bassum|\bspecification|data sheet|\barithmetic", re.IGNORECASE)
_DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def honest(fact: Fact[object]) -> bool:
    """A source says where a figure is from; that of a verified one how and on which day it was measured there."""
    source = fact.source
    if fact.verified != "measured here":
        return len(source) > 10 and (fact.verified != "published" or fact.published is not None)
    return _HOW.search(source) is not None and _DAY.search(source) is not None and _DENIED.search(source) is None


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_profile_is_valid_and_honest(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.calibration is None, "a calibration belongs to one machine"
    for field, fact in facts(profile):
        assert honest(fact), f"{field}: {fact.source!r}, verified: {fact.verified}"
    assert [*profile.budgets] == ["classification", "language-modeling"]


@pytest.mark.parametrize("name", DEVICES)
def test_what_an_estimate_needs_is_there_and_agrees_with_itself(name: str) -> None:
    profile = load_profile(name)
    peaks = profile.peaks
    for field in NEEDED:
        assert getattr(profile, field) is not None, field
    memory, usable = profile.memory_bytes.value, profile.usable_memory_bytes.value
    assert 0 < usable <= memory - profile.system_bytes.value
    assert profile.context_bytes.value < usable and profile.cache_bytes.value < memory
    assert profile.power.value.low_w <= profile.power.value.high_w
    assert 0 < profile.launch_overhead_us.value < 20
    assert peaks.fp32.value > 0
    if profile.kind == "cuda":
        assert profile.compute_capability is not None
        assert peaks.fp32.value <= peaks.fp16_fp32_accumulate.value <= peaks.fp16.value
    for task in profile.budgets.values():
        assert task.latency_p50_ms is not None and task.size_bytes is not None
        assert (task.memory_bytes or task.size_bytes) <= usable


def test_the_document_names_every_profile_and_its_own_one_is_valid(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert tuple(shipped_names("profiles")) == NAMES and all(f"`{name}`" in text for name in NAMES)
    example = next(block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "name: my-card" in block)
    file = tmp_path / "my-card.yaml"
    file.write_text(example, encoding="utf-8")
    profile = documents.load_profile(str(file))
    assert profile.usable_memory_bytes.value <= profile.memory_bytes.value - profile.system_bytes.value
    assert all(honest(fact) for _, fact in facts(profile))


# Recognition


def card(name: str, memory_bytes: int | None = 6 * GIB) -> nvidia.Gpu:
    return nvidia.Gpu(index=0, name=name, uuid=f"GPU-{name}", memory_bytes=memory_bytes, compute_capability="8.9")


def present(monkeypatch: pytest.MonkeyPatch, detected: nvidia.Gpu) -> list[str]:
    """The profiles that a host with this card is the target of."""
    monkeypatch.setattr(nvidia, "gpus", lambda: [detected])
    cuda = [profile for profile in map(load_profile, DEVICES) if profile.kind == "cuda" and not profile.boards]
    return [profile.name for profile in cuda if find_target(profile).present]


SIBLINGS = {
    "NVIDIA GeForce RTX 4060": 8, "NVIDIA GeForce RTX 3050": 8, "NVIDIA GeForce RTX 3050 Laptop GPU": 4,
    "NVIDIA GeForce RTX 3050 6GB Laptop GPU": 6, "NVIDIA GeForce RTX 3050 Ti Laptop GPU": 4,
    "NVIDIA GeForce GTX 1650 SUPER": 4, "NVIDIA GeForce GTX 1650 Ti": 4, "NVIDIA A100-SXM4-40GB": 40,
    "NVIDIA GeForce GTX 1650 with Max-Q Design": 4, "NVIDIA L40S": 45, "NVIDIA T4G": 16, "NVIDIA H200 NVL": 140,
    "NVIDIA A100 80GB PCIe": 80, "NVIDIA H100 PCIe": 80, "NVIDIA GeForce RTX 5090": 32,
}  # fmt: skip
"""Cards that are not taken for those of a profile, and their GiB."""


@pytest.mark.parametrize(
    ("name", "mib", "profile"),
    [
        ("NVIDIA GeForce RTX 4050 Laptop GPU", 6141, "rtx4050"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, "rtx4060-laptop"),
        ("NVIDIA GeForce RTX 3050", 6144, "rtx3050-6gb"),
        ("NVIDIA GeForce GTX 1650", 4096, "gtx1650"),
        ("Tesla T4", 15360, "t4"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H200", 143771, "h200"),
        *((name, gib * 1024, None) for name, gib in SIBLINGS.items()),
    ],
)
def test_a_card_is_its_own_profile_and_no_other(monkeypatch, name, mib, profile):
    assert present(monkeypatch, card(name, mib * MIB)) == ([profile] if profile else [])


def test_why_a_card_is_not_the_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_target(load_profile("host")).present
    laptop, server = card("NVIDIA GeForce RTX 4050 Laptop GPU"), card("NVIDIA H200")
    small = card("NVIDIA GeForce RTX 3050", 8 * GIB)
    for gpus, name, gpu, reason in (
        ([server, laptop], "rtx4050", laptop, ""),
        ([server], "rtx4050", server, "NVIDIA H200"),
        ([small], "rtx3050-6gb", small, "NVIDIA GeForce RTX 3050 with 8.00 GiB"),
        ([], "rtx4050", None, "this host has no NVIDIA GeForce RTX 4050 Laptop GPU (no NVIDIA card)"),
    ):
        monkeypatch.setattr(nvidia, "gpus", lambda gpus=gpus: gpus)
        target = find_target(load_profile(name))
        assert (target.present, target.gpu) == (gpu is laptop, gpu) and reason in target.reason


def jetson(root: Path, part: str, model: str = "NVIDIA Jetson Orin Developer Kit") -> Path:
    tree = root / part / "proc" / "device-tree"
    tree.mkdir(parents=True)
    (tree / "model").write_bytes(model.encode() + b"\0")
    (tree / "compatible").write_bytes(f"nvidia,p0000-0000+{part}\0nvidia,{part}\0nvidia,tegra234\0".encode())
    return root / part


JETSONS = {
    "p3767-0000": "jetson-orin-nx-16gb", "p3767-0003": "jetson-orin-nano-8gb", "p3767-0005": "jetson-orin-nano-8gb",
    "p3701-0005": "jetson-agx-orin-64gb",
}  # fmt: skip
ORIN = card("Orin (nvgpu)", None)


@pytest.mark.parametrize("part", [*JETSONS, "p3767-0001", "p3767-0004", "p3701-0004"])
def test_jetsons_are_told_apart_by_their_part_number(tmp_path, monkeypatch, part):
    monkeypatch.setattr(nvidia, "gpus", lambda: [ORIN])
    # Some board makers' model text names another module: it decides nothing.
    root = jetson(tmp_path, part, "NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super")
    detected = {name: find_target(load_profile(name), root) for name in sorted(set(JETSONS.values()))}
    found = [name for name, target in detected.items() if target.present]
    assert found == ([JETSONS[part]] if part in JETSONS else [])
    for name, target in detected.items():
        assert target.gpu == ORIN
        assert target.present or "none of the part numbers p37" in target.reason, name
        assert "Engineering Reference Developer Kit" in target.reason


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the files are those of Linux")
@pytest.mark.parametrize(
    ("cpuinfo", "model", "profile"),
    [
        ("model name\t: Intel(R) N100\n", None, "intel-n100"),
        ("CPU part\t: 0xd0b\n", "Raspberry Pi 5 Model B Rev 1.1", "raspberry-pi-5"),
        ("CPU part\t: 0xd08\n", "Raspberry Pi 4 Model B Rev 1.5", "raspberry-pi-4"),
        ("CPU part\t: 0xd08\n", "Raspberry Pi 400 Rev 1.0", None),
        ("CPU part\t: 0xd0b\n", "Raspberry Pi 500 Rev 1.0", None),
        ("model name\t: Apple M4\n", None, "apple-m4"),
        ("model name\t: Apple M1\n", None, "apple-m1"),
        ("model name\t: Apple M1 Max\n", None, None),
        ("model name\t: AMD Ryzen 7 5700G with Radeon Graphics\n", None, "amd-ryzen-5700g"),
        ("model name\t: Intel(R) Celeron(R) N5105 @ 2.00GHz\n", None, "intel-n5105"),
        ("model name\t: Apple M4 Pro\n", None, None),
        ("model name\t: Intel(R) N1000\n", None, None),
    ],
)
def test_a_cpu_is_its_own_profile_and_no_other(tmp_path, cpuinfo, model, profile):
    tree = tmp_path / "proc" / "device-tree"
    tree.mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    if model is not None:
        (tree / "model").write_bytes(model.encode() + b"\0")
    cpus = [device for device in map(load_profile, DEVICES) if device.kind == "cpu"]
    assert [device.name for device in cpus if find_target(device, tmp_path).present] == ([profile] if profile else [])


# edgeformer list devices

CALIBRATED = """\
name: host
title: My laptop
kind: cpu
peaks:
  fp32: {value: 400.0e+9, source: measured by this test, verified: measured here}
calibration:
  created: "2026-11-21T12:00:00.000+00:00"
  processor: Some Processor
  threads: 2
  provider: CPUExecutionProvider
  efficiencies: {fp32: {gemm: {of_peak: 0.8}}}
  error:
    {kind: cpu, device: Some Processor, cases: 18, median_log2: 0.14, worst_log2: 0.4, created: "2026-11-21T12:00:00Z"}
"""


def test_list_devices_shows_the_local_calibration_and_survives_a_broken_file(tmp_path, edgeformer):
    local = tmp_path / "artifacts" / "profiles"
    local.mkdir(parents=True)
    (local / "host.yaml").write_text(CALIBRATED, encoding="utf-8")
    (local / "mine.yaml").write_text("name: mine\n", encoding="utf-8")
    folder = ("--artifacts", str(tmp_path / "artifacts"))
    rows = {row["name"]: row for row in json.loads(edgeformer("list", "devices", *folder, "--json"))["devices"]}
    assert set(rows) == {*NAMES, "mine"}
    assert rows["host"]["device"] == "My laptop" and rows["host"]["calibrated"] == "2026-11-21T12:00:00.000+00:00"
    assert rows["mine"]["device"].startswith("unreadable: ") and "title" in rows["mine"]["device"]
    assert rows["rtx4050"]["fp16_ops_per_s"] == 42.09e12 and rows["rtx4050"]["calibrated"] is None
    assert rows["rtx4050"]["power_w"] == [35, 115]
    table = edgeformer("list", "devices", *folder)
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "host cpu – – – – calibrated, error 10% –" in lines
    assert any(line.startswith("t4 cuda") and "503 times, error 11%" in line for line in lines)
    assert "rtx4050 cuda 5.4 GiB 192 42.1 35–115 37 times, error 101% –" in lines
    assert any(line.startswith("mine – – – – – – ") for line in lines) and "unreadable" in table


def test_one_table_of_peaks_the_surest_first() -> None:
    slow, fast = (Fact[float](value=value, source="a test", verified="no") for value in (1e12, 2e12))
    peaks = Peaks(fp32=slow, fp16=fast, fp16_fp32_accumulate=slow)
    assert peaks.of("fp16") == (slow, fast)
    assert peaks.of("fp32") == (slow,)
    assert peaks.of("int8") == () == Peaks().of("fp16")


def test_a_calibration_of_an_earlier_estimator_is_dropped_and_reported(tmp_path: Path) -> None:
    calibration = {"created": "now", "processor": "x", "threads": 2, "provider": "p", "efficiencies": {}}
    host = load_profile("host")
    kept = host.model_dump(exclude={"budgets"}) | {"calibration": calibration}
    former = host.model_dump(exclude={"budgets"}) | {"calibration": calibration | {"speed": {"product_us": 396.0}}}
    assert DeviceProfile.model_validate(kept).calibration is not None
    assert DeviceProfile.model_validate(former).calibration is None
    path, notes = tmp_path / "mine.yaml", list[str]()
    content = {"name": "mine", "title": "Mine", "kind": "cpu", "calibration": {"speed": {"product_us": 396.0}}}
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    assert documents.load_profile(str(path), note=notes.append).calibration is None
    assert notes == [f"{path}:4: calibration: made by an earlier estimator and ignored; run edgeformer calibrate again"]


# A profile in <artifacts>/profiles is found by every command that takes a device.


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A folder of runs with a profile that nobody ships: an RTX 4050 with 1 MiB of memory beside its CUDA context."""
    profile = yaml.safe_load((shipped_folder("profiles") / "rtx4050.yaml").read_text(encoding="utf-8"))
    profile |= {"name": "mine", "title": "My own card"}
    profile["usable_memory_bytes"]["value"] = "301MiB"
    folder = own_profiles(tmp_path / "elsewhere")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    shutil.copytree(OLD_FORMAT / "classifier-v1", tmp_path / "elsewhere" / "old")
    return tmp_path / "elsewhere"


def test_commands_find_an_own_profile(artifacts: Path, edgeformer: Edgeformer) -> None:
    options = ("--artifacts", str(artifacts), "--json")
    planned = json.loads(edgeformer("plan", "quickstart", "--device", "mine", *options, code=3))
    assert planned["device"] == "mine" and planned["budget_bytes"] == 2**20
    listed = json.loads(edgeformer("list", "devices", *options))["devices"]
    (mine,) = [device for device in listed if device["name"] == "mine"]
    assert mine["device"] == "My own card" and mine["usable_memory_bytes"] == 301 * 2**20
    refused = edgeformer("train", "quickstart", "--as-device", "mine", "--accelerator", "cpu", *options, code=2)
    assert "error: --as-device" in refused and "no device profile" not in refused
    refused = edgeformer("profile", "old", "--device", "mine", "--max-size", "1", *options, code=2)
    assert "error: --max-size" in refused, "the profile is read before the limits are"


@pytest.mark.slow
def test_export_is_for_an_own_profile(artifacts: Path, edgeformer: Edgeformer) -> None:
    (artifacts / "old" / "model" / "README.md").unlink()  # as training through Python left it in an earlier version
    options = ("--trt", "--target", "mine", "--replace", "--artifacts", str(artifacts), "--json")
    code = 3 if find_spec("tensorrt_rtx") is None else 0
    assert "artifacts" in json.loads(edgeformer("export", "old", *options, code=code))
    assert (artifacts / "old" / "bundle" / "README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name")
