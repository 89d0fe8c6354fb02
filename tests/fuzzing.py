"""Hostile documents, made from real ones, through the functions that commands read them with.

Only errors of edgeformer's own tree that end a command with 2 may come out. Shared by the default suite (few examples)
and by ``make torture`` (many).
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from edgeformer.bundle import Bundle
from edgeformer.data.sources import file_source, read
from edgeformer.families import load_recipe
from edgeformer.formats.documents import load_profile, shipped_folder
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.report import Report
from edgeformer.formats.workspace import read_manifest
from edgeformer.reporting.compare_reports import compare_reports, format_pairs
from edgeformer.reporting.report_files import as_csv, as_markdown
from edgeformer.run import Run
from edgeformer.stages.profiling.claiming.check import ClaimOptions, verify_claim
from edgeformer.stages.profiling.claiming.contribute import write_contribution

_OLD = Path(__file__).parent / "old_format" / "classifier-v1"
_LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
    st.sampled_from(["classification", "crt", "encoder", "../x", "/etc/passwd", "=1", "\x1b[2J", "1e400", "-0"]),
)  # fmt: skip
_VALUE = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw: Any, document: Any) -> Any:
    """A document with a few of its values replaced, removed or added, at any depth."""
    copy = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        here = copy
        while isinstance(here, (dict, list)) and here:
            keys = sorted(here, key=str) if isinstance(here, dict) else range(len(here))
            key = draw(st.sampled_from(list(keys)))
            if isinstance(here[key], (dict, list)) and here[key] and draw(st.integers(0, 4)):
                here = here[key]
                continue
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    here[key] = draw(_VALUE)
                case "remove":
                    del here[key]
                case _ if isinstance(here, dict):
                    here[draw(st.text(max_size=8))] = draw(_VALUE)
            break
    return copy


def _as_yaml(document: Any) -> bytes:
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


def _as_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


_RECIPE = yaml.safe_load((shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8"))
_LANGUAGE = yaml.safe_load((shipped_folder("recipes") / "crt_mini.yaml").read_text(encoding="utf-8"))
_PROFILE = yaml.safe_load((shipped_folder("profiles") / "rtx4050.yaml").read_text(encoding="utf-8"))
_BUNDLE = json.loads((_OLD / "bundle" / "bundle.json").read_bytes())
_RUN = json.loads((_OLD / "run.json").read_bytes())
_REPORT = json.loads((_OLD / "reports" / "rtx4050.json").read_bytes())
_SUBJECT = {
    "task": "classification", "max_positions": None,
    "artifacts": {one["id"]: {"role": "full", "sha256": one["sha256"]} for one in _BUNDLE["artifacts"]},
}  # fmt: skip
_CLAIMED = {**_REPORT, "subject": _SUBJECT}
_POWER = [next(row["conditions"]["power"] for row in _REPORT["rows"] if "power" in row["conditions"])]
_CLAIM = {
    "created": "2026-11-23", "run": "classifier-v1", "device": "rtx4050", "members": {}, "whole_bundle": False,
    "environment": {"host": _REPORT["host"], "threads": [2], "power": _POWER}, "profile": None,
}  # fmt: skip


def _read_bundle(path: Path) -> None:
    bundle = Bundle.open(path.parent)
    for artifact in bundle.artifacts[:3]:
        bundle.files(artifact)
    bundle.reader()


def _read_report(path: Path) -> None:
    report = read_manifest(Report, path)
    as_markdown(report), as_csv(report), format_pairs(compare_reports(report, report), "markdown")


def _as_claim(documents: tuple[Any, Any, Any]) -> bytes:
    """A claim's file whose checksums hold, whatever its documents say."""
    claim, report, bundle = (_as_json(document) for document in documents)
    members = {"report.json": report, "bundle/bundle.json": bundle}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    told = json.loads(claim)
    if isinstance(told, dict) and told.get("members") == {}:
        claim = _as_json({**told, "members": sums})
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.comment = b"0" * 64
        for name, content in {"claim.json": claim, **members}.items():
            archive.writestr(name, content)
    whole = stream.getvalue()[:-64]
    return whole + hashlib.sha256(whole).hexdigest().encode()


def _claim() -> st.SearchStrategy[bytes]:
    """One of a claim's documents changed, or none."""
    good = [st.just(_CLAIM), st.just(_CLAIMED), st.just(_BUNDLE)]
    bad = [changed(_CLAIM), changed(_CLAIMED), changed(_BUNDLE)]
    one = [
        st.tuples(*(b if place == at else g for place, (g, b) in enumerate(zip(good, bad, strict=True))))
        for at in range(3)
    ]
    return st.one_of(*one, st.tuples(*good)).map(_as_claim) | st.binary(max_size=300)


def _read_claim(path: Path) -> None:
    found, opened = verify_claim(path, None, ClaimOptions())
    write_contribution(opened, found, path.with_name("fuzzed.yaml"))


def _read_data(path: Path) -> None:
    for _ in read(file_source(path)):
        pass


_TABLES = {
    "tsv": b"label\ttext\n1\tgood\n0\tnot good\n1\tfine\n",
    "csv": b'label,text\n1,good\n0,"not, good"\n1,fine\n',
    "jsonl": b'{"label": 1, "text": "good"}\n{"label": 0, "text": "not good"}\n',
}


def _table(kind: str) -> st.SearchStrategy[bytes]:
    """A good table with a few bytes of it replaced, or any bytes."""
    table = _TABLES[kind]
    patched = st.builds(
        lambda at, cut, new: table[:at] + new + table[at + cut :],
        st.integers(0, len(table)),
        st.integers(0, 3),
        st.binary(max_size=3),
    )
    return patched | patched | st.binary(max_size=200)


KINDS: dict[str, tuple[str, st.SearchStrategy[bytes], Callable[[Path], Any]]] = {
    "recipe": ("r.yaml", (changed(_RECIPE) | changed(_LANGUAGE)).map(_as_yaml), lambda path: load_recipe(str(path))),
    "profile": ("p.yaml", changed(_PROFILE).map(_as_yaml), lambda path: load_profile(str(path))),
    "any YAML": ("y.yaml", st.text(max_size=80).map(_as_text), lambda path: load_recipe(str(path))),
    "bundle": ("bundle.json", changed(_BUNDLE).map(_as_json), _read_bundle),
    "run": ("run.json", changed(_RUN).map(_as_json), lambda path: Run.open(path.parent)),
    "report": ("report.json", changed(_REPORT).map(_as_json), _read_report),
    "claim": ("x.claim.zip", _claim(), _read_claim),
    "tsv": ("data.tsv", _table("tsv"), _read_data),
    "csv": ("data.csv", _table("csv"), _read_data),
    "jsonl": ("data.jsonl", _table("jsonl"), _read_data),
}  # fmt: skip


def refused_or_read(kind: str, content: bytes, folder: Path) -> bool:
    """Whether it was refused. Raises what must never come out."""
    name, _, read_it = KINDS[kind]
    path = folder / name
    if kind == "bundle" and not (folder / "onnx").exists():  # its files, so that one that lists them right is read
        shutil.copytree(_OLD / "bundle", folder, dirs_exist_ok=True)
    path.write_bytes(content)
    try:
        read_it(path)
    except EdgeformerError as error:
        assert error.exit_code == 2, error
        assert str(error).strip(), error
        return True
    return False
