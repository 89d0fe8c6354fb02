"""Data files, tokenizers and archives that are small on disk and huge in memory are refused early."""

import bz2
import gzip
import json
import lzma
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.golden import GoldenError, read_golden
from edgeformer.artifacts.manifest import RunManifest
from edgeformer.artifacts.workspace import MOST_JSON_BYTES, read_manifest
from edgeformer.data import records
from edgeformer.data.records import MAX_LINE
from edgeformer.data.sources import read
from edgeformer.data.tokenization import tokenizer_from_file
from edgeformer.run import run_folders
from tests.cli.measure_cli import measured, refused
from tests.cli.test_bad_input import RECIPE

PACKERS: dict[str, Callable[[bytes], bytes]] = {".xz": lzma.compress, ".gz": gzip.compress, ".bz2": bz2.compress}


def train(folder: Path, name: str) -> tuple[str, ...]:
    (folder / "recipe.yaml").write_text(RECIPE.replace("reviews.tsv", name), encoding="utf-8")
    return ("train", "recipe.yaml")


def rows(path: Path) -> list[str]:
    return [row.text for row in read(FileSource(kind="file", path=str(path), label=None))]


def bomb(path: Path, suffix: str) -> Path:
    """4 GB of rows in less than 12 MB."""
    pack, row = PACKERS[suffix], b"1\t" + b"good " * 200 + b"\n"
    path.write_bytes(pack(b"label\ttext\n") + pack(row * (2**20 // len(row))) * 4096)
    assert path.stat().st_size < 12e6
    return path


@pytest.mark.parametrize("suffix", [".xz", ".gz", pytest.param(".bz2", marks=pytest.mark.slow)])
def test_four_gigabytes_in_short_lines(tmp_path: Path, suffix: str) -> None:
    path, started = bomb(tmp_path / f"bomb.tsv{suffix}", suffix), time.process_time()
    with pytest.raises(DataError, match=r"200 times its size.*unpack it"):
        rows(path)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", ["line.txt", "line.csv", "line.jsonl"])
def test_line_of_a_gigabyte(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(b'{"text": "\n'[: -1 if name == "line.jsonl" else None])
        file.truncate(2**30)
    with pytest.raises(DataError, match="longer than 16 MiB"):
        rows(path)
    path = tmp_path / "book.txt"
    path.write_bytes(b"x" * (MAX_LINE - 1) + b"\nshort\n")
    assert list(map(len, rows(path))) == [MAX_LINE - 1, 5]


def test_bomb_behind_real_text(tmp_path: Path) -> None:
    generator = random.Random(1)
    text = "\n".join(f"{generator.getrandbits(64):x}" for _ in range(150_000)).encode() + b"\n"
    path = tmp_path / "late.txt.xz"
    path.write_bytes(lzma.compress(text, preset=0) + lzma.compress((b"a" * 9999 + b"\n") * 1700) * 8)
    stream = read(FileSource(kind="file", path=str(path), label=None))
    assert [next(stream).text for _ in range(150_000)] == text.decode().split()
    with pytest.raises(DataError, match="200 times"):
        for _ in stream:
            pass


@pytest.mark.parametrize("suffix", PACKERS)
def test_repetitive_but_real_files_stream(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log whose lines differ in a number only, and a small file that packs as well as a bomb."""
    monkeypatch.setattr(records, "_RATIO_WINDOW", 2**20)  # avoids files of hundreds of megabytes
    generator = random.Random(2)
    lines = [f"2026-11-22 worker answered request in {generator.randrange(10**9)} ms, no error" for _ in range(20_000)]
    path = tmp_path / f"log.txt{suffix}"
    path.write_bytes(PACKERS[suffix]("\n".join(lines).encode()))
    assert rows(path) == lines
    path.write_bytes(PACKERS[suffix](b"the same line\n" * 50_000))
    assert len(rows(path)) == 50_000


def test_wide_tables_and_long_names_give_short_messages(tmp_path: Path) -> None:
    for name, separator in (("wide.tsv", "\t"), ("wide.csv", ",")):
        (tmp_path / name).write_text(separator.join(map(str, range(500_000))) + "\n1\n", encoding="utf-8")
        with pytest.raises(DataError, match="500,000 columns; at most 10,000") as caught:
            rows(tmp_path / name)
        assert len(str(caught.value)) < 500
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"x" * 2**20: 1, **{f"c{n}": n for n in range(5000)}}) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="no column 'text'") as caught:
        rows(path)
    assert len(str(caught.value)) < 1000


def test_parquet_of_repeated_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet, path = pytest.importorskip("pyarrow.parquet"), tmp_path / "bomb.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**20, np.int32)), pa.array(["word " * 200]))
    table = pa.table({"text": column})
    with parquet.ParquetWriter(path, table.schema, write_statistics=False) as writer:
        for _ in range(8):
            writer.write_table(table)
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match="8,388,608 rows") as caught:
        rows(path)
    assert "bomb.parquet" in str(caught.value) and "JSONL" in str(caught.value)
    parquet.write_table(pa.table({"text": [f"a text of its own, number {n}" for n in range(3000)]}), path)
    assert len(rows(path)) == 3000


@pytest.mark.parametrize("entry", ["0,", "[],", '"",'])
def test_tokenizer_of_absurd_size(tmp_path: Path, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(f'{{"version": "1.0", "model": {{"type": "BPE", "vocab": [{entry * 3_000_001}0]}}}}')
    with pytest.raises(DataError, match="3,000,000 entries"):
        tokenizer_from_file(path)
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(DataError, match="larger than 128 MiB"):
        tokenizer_from_file(path)


def test_manifest_of_absurd_size(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "run"
    folder.mkdir(parents=True)
    with (folder / "run.json").open("wb") as file:
        file.truncate(2**32)
    with pytest.raises(Exception, match=r"run\.json: cannot be read: it is larger than 16 MiB"):
        read_manifest(RunManifest, folder / "run.json")
    assert run_folders(tmp_path / "artifacts") == [folder]
    (folder / "run.json").write_bytes(b"[" * (MOST_JSON_BYTES - 1))
    refused(measured("evaluate", "run", cwd=tmp_path), "run.json")


def test_golden_inputs_of_absurd_size(tmp_path: Path) -> None:
    path, real = tmp_path / "golden.npz", np.ones((2, 8), np.int64)
    for arrays, message in (
        ({"input_ids": np.zeros((1000, 40_000), np.int64)}, r"golden\.npz: damaged .*more than 256 MiB"),
        ({"input_ids": real, **{f"a{n}": real for n in range(1001)}}, "1000 arrays"),
    ):
        np.savez_compressed(path, **arrays)
        with pytest.raises(GoldenError, match=message):
            read_golden(path)
    np.savez_compressed(path, input_ids=real)
    assert len(read_golden(path)) == 2
    with zipfile.ZipFile(path) as archive:
        content = archive.read("input_ids.npy").replace(b"(2, 8), }", b"(99999999, 99999), }")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input_ids.npy", content)
    with pytest.raises(GoldenError, match="holds fewer numbers"):
        read_golden(path)
