"""What documents and messages state of the code, of machines and of protocols is so, in plain technical English."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeformer import __version__
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import find, load_profile, read_yaml, shipped_names
from edgeformer.artifacts.errors import install_hint
from edgeformer.system.capability import CUDA_13_DRIVER
from tests.cli.run_cli import run_json
from tests.docs.document import DOCUMENTS, ROOT, blocks

GIB, MIB = 2**30, 2**20


def text_of(name: str) -> str:
    """A document in one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def stated(document: str, pattern: str) -> tuple[str, ...]:
    """The groups of a sentence."""
    sentence = re.search(pattern, text_of(document))
    assert sentence is not None, pattern
    return sentence.groups()


# CONTRIBUTING

PACKAGE = ROOT / "edgeformer"
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")


def imports_torch(file: Path) -> bool:
    """At module level: what an import of the file loads."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def test_contributing_lists_every_package_and_where_torch_is() -> None:
    names = set(re.findall(r"`(\w+)(?:/|\.py)`", CONTRIBUTING[: CONTRIBUTING.index("## Rules")]))
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    files = {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    assert len(folders) > 8 and folders | files <= names
    (paragraph,) = (part for part in CONTRIBUTING.split("\n\n") if part.startswith("torch is imported by"))
    places = [place.rstrip("/") for place in re.findall(r"`([\w/.]+)`", paragraph)]
    importers = [file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if imports_torch(file)]
    assert len(places) >= 5 and len(importers) > 20
    belongs = {name: [place for place in places if name == place or name.startswith(f"{place}/")] for name in importers}
    assert [name for name, owners in belongs.items() if not owners] == [], "install_lines nowhere in CONTRIBUTING"
    assert {*places} == {place for owners in belongs.values() for place in owners}, "install_lines, and without torch"


# Installation

# pip install [options] edgeformer, quoted or not, unless it is a path or a wheel's file name; edgeformer[extra]
BY_NAME = re.compile(r"pip3? install (?:-\S+ )*[\"'`\\]*edgeformer(?![-\w/.])|\bedgeformer\[(?=[\w{])")
PLACES = (
    "README.md", "Makefile", "pyproject.toml", ".github", "benchmarks", "docs", "edgeformer", "profiles", "recipes",
    "tests",
)  # fmt: skip
RECORDS = (ROOT / "tests" / "old_format", ROOT / "benchmarks" / "results")
"""Records of former versions, which stay as they were written."""


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of every file that a person may read, but of this one."""
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            skipped = "__pycache__" in file.parts or any(folder in file.parents for folder in RECORDS)
            if file.is_file() and not skipped and file != Path(__file__).resolve():
                yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8", errors="replace")


def test_edgeformer_is_installed_from_a_wheel_of_its_name_only() -> None:
    """A stranger could claim the name on the public index."""
    read = dict(texts())
    assert len(read) > 300
    assert [f"{name}: {hit[0]}" for name, text in read.items() for hit in BY_NAME.finditer(text)] == []
    install_lines = ("pip install edgeformer", 'python -m pip install -q "edgeformer[rtx]"', "pip install 'edgeformer'")
    assert all(BY_NAME.search(text) for text in (*install_lines, "edgeformer[trt]"))
    wheel = 'pip install "dist/edgeformer-0.1.0-py3-none-any.whl[train]"'
    assert not any(BY_NAME.search(text) for text in (install_hint("rtx"), install_hint("train", reinstall=True), wheel))
    text = "\n".join([CONTRIBUTING, *(file.read_text(encoding="utf-8") for file in DOCUMENTS)])
    wheels = set(re.findall(r"edgeformer-[\w.]+-py3-none-any\.whl", text))
    assert wheels == {f"edgeformer-{__version__}-py3-none-any.whl"}


def install_row(start: str) -> str:
    """The commands of a machine in the table of docs/install.md."""
    (row,) = [line for line in (ROOT / "docs" / "install.md").read_text("utf-8").splitlines() if line.startswith(start)]
    return row


def test_the_installation_names_what_each_machine_needs() -> None:
    row = install_row("| Linux, RTX card")
    assert "Python 3.11 or newer" in row and f"driver R{CUDA_13_DRIVER} or newer" in row
    assert "onnxruntime-ep-nv-tensorrt-rtx" in row
    for machine in ("| CPU only", "| Jetson"):  # pip keeps a torch that is installed already
        assert install_row(machine).index("first torch") < install_row(machine).index('".[train]"')
    assert "pytorch.org" in install_row("| CPU only")
    text = text_of("docs/install.md")
    assert f"CUDA 13, which needs NVIDIA driver R{CUDA_13_DRIVER} or newer; `edgeformer doctor` compares" in text
    assert "torch-tensorrt has no wheel for Python 3.14" in text


def test_the_installation_assigns_each_card_the_tensorrt_of_its_profile() -> None:
    rtx, other = stated("docs/install.md", r"without a GPU: (RTX 20, .*?) cards.*?on the card itself: (.*?)\. torch")

    def series(profile: DeviceProfile) -> str:
        name = re.search(r"RTX \d0|GTX \d\d|\b[ATHL]\d+", profile.title)
        assert name is not None, profile.title
        return name[0].removeprefix("RTX ")

    for profile in map(load_profile, shipped_names("profiles")):
        if profile.tensorrt != "none" and "Jetson" not in profile.title and profile.name != "h200":
            assert series(profile) in (rtx if profile.tensorrt == "rtx" else other), profile.name


# Recipes, protocols and plans


def is_part(part: Any, complete: Any) -> bool:
    """Whether every key that is part has the same value in the complete document."""
    if not isinstance(part, dict) or not isinstance(complete, dict):
        return bool(part == complete)
    return all(is_part(value, complete.get(key)) for key, value in part.items())


@pytest.mark.parametrize(
    ("name", "page", "kind"),
    [
        ("linear_sst2", "guides/own-data.md", "linear"),
        ("linear_distilled_sst2", "explanation/folding.md", "linear"),
        ("minilm_sst2", "explanation/folding.md", "pretrained"),
        ("minilm_folded_sst2", "explanation/folding.md", "pretrained"),
    ],
)
def test_lines_of_a_recipe_are_those_of_the_file(name: str, page: str, kind: str, tmp_path: Path) -> None:
    document = blocks(ROOT / "docs" / page)
    (displayed,) = [block for block in document if block.first_line == f"# in recipes/{name}.yaml"]
    (tmp_path / "part.yaml").write_text(displayed.text, encoding="utf-8")
    content: Any = read_yaml(tmp_path / "part.yaml").content
    assert content["model"]["kind"] == kind and "training" in content
    assert is_part(content, read_yaml(find("recipes", name)).content)


@pytest.mark.slow
def test_the_plan_of_a_looped_decoder_is_the_plan(tmp_path: Path) -> None:
    parameters, peak, free, budget = stated(
        "docs/guides/language-models.md",
        r"looped_rtx4050 on rtx4050: ([\d,]+) parameters, bf16.*? peak +([\d.]+) GiB.*?fits: ([\d.]+) GiB of "
        r"([\d.]+) GiB are free",
    )
    plan = run_json("plan", "looped_rtx4050", "--device", "rtx4050", cwd=tmp_path)
    assert plan["status"] == "pass" and 100e6 < plan["parameters"] == int(parameters.replace(",", "")) < 130e6
    expected = plan["peak_bytes"], plan["budget_bytes"] - plan["peak_bytes"], plan["budget_bytes"]
    assert [size / GIB for size in expected] == pytest.approx([float(peak), float(free), float(budget)], abs=0.005)


@pytest.mark.slow
def test_the_documented_plan_is_the_plan(tmp_path: Path) -> None:
    peak, precision, budget, usable, context, mib = stated(
        "docs/guides/language-models.md",
        r"a peak of ([\d.]+) GiB in (\w+)\. The budget is ([\d.]+) GiB: of the ([\d.]+) GiB that the profile calls "
        r"usable, ([\d.]+) GiB \((\d+) MiB\)",
    )
    plan = run_json("plan", "crt_deep_rtx4050", "--device", "rtx4050", cwd=tmp_path)
    assert (plan["status"], plan["fits"], plan["precision"]) == ("pass", True, precision)
    usable_bytes = load_profile("rtx4050").usable_memory_bytes.value
    assert usable_bytes - plan["budget_bytes"] == int(mib) * MIB
    sizes = plan["peak_bytes"], plan["budget_bytes"], usable_bytes, int(mib) * MIB
    figures = [float(figure) for figure in (peak, budget, usable, context)]
    assert [size / GIB for size in sizes] == pytest.approx(figures, abs=0.005)
    hours_and_minutes = stated(
        "docs/guides/language-models.md", r"(\d+) to (\d+) hours for ten epochs, (\d+) to (\d+) minutes each"
    )
    time = plan["time"]
    assert time["rows"] == 10 * 7059 and time["rows_from"] == "recipe"
    part = [f"{round(time[key] / seconds)}" for seconds in (3600, 600) for key in ("low_s", "high_s")]
    assert part == list(hours_and_minutes)


VAGUE = re.compile(
    r"\b(told|tells|nobody|somebody|asked of|is asked|what is there|is there again|by itself|so far as|"
    r"stands? (?:in|there|beside)|all the same|as it was|as they were|what was before|another one|beside it|the house|"
    r"this room|rooms?)\b",
    re.IGNORECASE,
)
"""Phrases that hide subject or object."""


@pytest.mark.parametrize("place", ["documents", "code"])
def test_few_phrases_are_vague(place: str) -> None:
    lines, phrases = 0, []
    for file in DOCUMENTS if place == "documents" else (ROOT / "edgeformer").rglob("*.py"):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            lines += 1
            phrases += [f"{file.relative_to(ROOT)}:{number}: {match[0]}" for match in VAGUE.finditer(line)]
    assert lines > 3000 and len(phrases) <= lines * 0.5 / 1000, phrases


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130
