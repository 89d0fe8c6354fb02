"""Hostile documents, made from real ones, through the functions that commands read them with.

Only errors of edgeformer's own tree that end a command with 2 may come out. Shared by the default suite (few examples)
and by ``make torture`` (many).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from edgeformer.artifacts.documents import load_profile, shipped_folder
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.report import Report, read_report, seal_report
from edgeformer.bundle import Bundle
from edgeformer.data.sources import file_source, read
from edgeformer.models import load_recipe
from edgeformer.report.compare import compare_reports, format_pairs
from edgeformer.report.context import ReportContext
from edgeformer.report.documents import as_markdown
from edgeformer.run import Run

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
        node = copy
        while isinstance(node, (dict, list)) and node:
            keys = sorted(node, key=str) if isinstance(node, dict) else range(len(node))
            key = draw(st.sampled_from(list(keys)))
            if isinstance(node[key], (dict, list)) and node[key] and draw(st.integers(0, 4)):
                node = node[key]
                continue
            match draw(st.sampled_from(["replace", "remove", "add"])):
                case "replace":
                    node[key] = draw(_VALUE)
                case "remove":
                    del node[key]
                case _ if isinstance(node, dict):
                    node[draw(st.text(max_size=8))] = draw(_VALUE)
            break
    return copy


def _as_yaml(document: Any) -> bytes:
    return yaml.safe_dump(document, allow_unicode=True).encode("utf-8", "surrogatepass")


def _as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


_RECIPE = yaml.safe_load((shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8"))
_LANGUAGE = yaml.safe_load((shipped_folder("recipes") / "crt_mini.yaml").read_text(encoding="utf-8"))
_PROFILE = yaml.safe_load((shipped_folder("profiles") / "rtx4050.yaml").read_text(encoding="utf-8"))
_BUNDLE = json.loads((_OLD / "bundle" / "bundle.json").read_bytes())
_RUN = json.loads((_OLD / "run.json").read_bytes())
_REPORT = json.loads((_OLD / "reports" / "rtx4050.json").read_bytes())
_SEALED = seal_report(Report.model_validate(_REPORT, strict=False)).model_dump(mode="json", by_alias=True)


def _read_bundle(path: Path) -> None:
    bundle = Bundle.open(path.parent)
    for artifact in bundle.artifacts[:3]:
        bundle.files(artifact)
    bundle.reader()


def _read_report(path: Path) -> None:
    report = read_report(path)
    context = ReportContext(report)
    as_markdown(context)
    context.columns("csv").csv(report.rows)
    format_pairs(compare_reports(report, report), "markdown")


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
    places, cuts, inserted = st.integers(0, len(table)), st.integers(0, 3), st.binary(max_size=3)
    patched = st.builds(lambda at, cut, new: table[:at] + new + table[at + cut :], places, cuts, inserted)
    return patched | patched | st.binary(max_size=200)


KINDS: dict[str, tuple[str, st.SearchStrategy[bytes], Callable[[Path], Any]]] = {
    "recipe": ("r.yaml", (changed(_RECIPE) | changed(_LANGUAGE)).map(_as_yaml), lambda path: load_recipe(str(path))),
    "profile": ("p.yaml", changed(_PROFILE).map(_as_yaml), lambda path: load_profile(str(path))),
    "any YAML": ("y.yaml", st.text(max_size=80).map(str.encode), lambda path: load_recipe(str(path))),
    "bundle": ("bundle.json", changed(_BUNDLE).map(_as_json), _read_bundle),
    "run": ("run.json", changed(_RUN).map(_as_json), lambda path: Run.open(path.parent)),
    "report": ("report.json", changed(_REPORT).map(_as_json), _read_report),
    "sealed report": ("report.json", changed(_SEALED).map(_as_json), _read_report),
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
