"""Gather what a machine with a card and without a network needs: wheels that it lacks, data, weights, and a manifest.

    python -m benchmarks.gpu.pack --data DIR [--model DIR] [--package NAME]… [--python 3.12] [--limit 64MiB]

All of it goes to benchmarks/gpu/brought, which git ignores: copy that folder with the checkout. There, before all else:

    . benchmarks/gpu/unpack.sh

It makes the packages importable without installing them, and says where the data is.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.session import BROUGHT
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.files import replacing_folder, sha256_of, write_json
from edgeformer.artifacts.units import format_bytes, parse_bytes
from edgeformer.system.host import code_version, now

PACKAGES = ("pydantic",)
"""What the host lacks of what we need. `datasets` reads the hub and Parquet only, and there is neither."""
FOR_THE_MODEL = ("transformers", "regex")
"""What reads a pretrained encoder's weights; the rest that they need comes with the host's accelerate."""
LIMIT = "64MiB"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
DATA = (
    "sst2/train.tsv",
    "sst2/dev.tsv",
    "sst2/test.tsv",
    "wikitext-2/train.txt.xz",
    "wikitext-2/valid.txt",
    "wikitext-2/test.txt",
    "tokenizers/bert-base-uncased/tokenizer.json",
    "tokenizers/gpt2/tokenizer.json",
)
MODEL = "models/all-MiniLM-L6-v2"
"""Where recipes for local data look for it, below the data."""
TOKENIZER, WEIGHTS = "tokenizer.json", "model.safetensors"
_OF_THE_MODEL = ("config.json", TOKENIZER, "tokenizer_config.json", "modules.json", "1_Pooling/config.json")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def download(folder: Path, packages: Sequence[str], python: str, *, alone: bool = False) -> None:
    """Wheels for another Python on 64-bit Linux.

    Args:
        folder: where they are put.
        packages: that are asked for, with what they need.
        python: its version.
        alone: without what they need.

    Raises:
        EdgeformerError: pip finds none.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--no-deps"] if alone else []
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    if done.returncode:
        raise EdgeformerError(f"pip cannot download {', '.join(packages)}: {done.stderr.strip()[-400:]}")


def copy_data(source: Path, target: Path) -> None:
    """The files of :data:`DATA`. Raises InputError: one is missing."""
    for name in DATA:
        if not (source / name).is_file():
            raise InputError(f"--data: no {name} in {source}")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def copy_model(source: Path, target: Path, texts: Sequence[Path]) -> None:
    """A pretrained encoder in a third of its bytes: in FP16, token rows that ``texts`` never use zero, compressed.

    Training on these texts reads nothing else of the table, so it is the same training from weights rounded to FP16.

    Raises:
        InputError: no configuration or weights are there.
    """
    from safetensors.torch import load_file, save
    from tokenizers import Tokenizer

    for name in ("config.json", TOKENIZER, WEIGHTS):
        if not (source / name).is_file():
            raise InputError(f"--model: no {name} in {source}")
    for name in _OF_THE_MODEL:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
    tokenizer = Tokenizer.from_file(str(source / TOKENIZER))
    tokenizer.no_truncation()
    lines = [line for path in texts for line in path.read_text(encoding="utf-8").splitlines()]
    used = {number for encoded in tokenizer.encode_batch(lines) for number in encoded.ids}
    used |= {number for number in map(tokenizer.token_to_id, _SPECIAL) if number is not None}
    weights = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source / WEIGHTS).items()
    }
    for name, tensor in weights.items():
        if name.endswith("word_embeddings.weight"):
            tensor[[row for row in range(len(tensor)) if row not in used]] = 0
    with lzma.open(target / f"{WEIGHTS}.xz", "wb", preset=1) as packed:
        packed.write(save(weights, metadata={"format": "pt"}))


def pack(folder: Path, data: Path, model: Path | None, packages: Sequence[str], python: str, limit: int) -> int:
    """Fill ``folder`` anew, all of it or nothing. Returns its size in bytes.

    Raises:
        InputError: something is missing, or it is all more than ``limit`` bytes.
        EdgeformerError: a wheel cannot be had.
    """
    with replacing_folder(folder) as fresh:
        (fresh / "wheels").mkdir()
        if packages:
            download(fresh / "wheels", packages, python)
        copy_data(data, fresh / "data")
        if model is not None:
            download(fresh / "wheels", FOR_THE_MODEL, python, alone=True)
            copy_model(model, fresh / "data" / MODEL, [data / name for name in DATA if name.startswith("sst2/")])
        files = sorted(path for path in fresh.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > limit:
            largest = max(files, key=lambda path: path.stat().st_size).relative_to(fresh)
            raise InputError(
                f"{format_bytes(size)} are more than the {format_bytes(limit)} that may be brought; the largest file "
                f"is {largest}: leave --model out, or raise --limit"
            )
        listed = {str(path.relative_to(fresh)): [path.stat().st_size, sha256_of(path)] for path in files}
        # A copy without git's folder does not know its commit: results take it from here.
        write_json(
            fresh / "manifest.json",
            {"commit": code_version(), "made": now(), "python": python, "size_bytes": size, "files": listed},
        )
    return size


def main(words: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2, wikitext-2 and tokenizers")
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2, for the row on folding")
    parser.add_argument(
        "--package", action="append", help=f"that the host lacks (default: {', '.join(PACKAGES)}; for --model more)"
    )
    parser.add_argument("--python", default="3.12", help="version on the host")
    parser.add_argument("--limit", default=LIMIT, help=f"of all files together (default: {LIMIT})")
    parser.add_argument("--out", type=Path, default=BROUGHT, help="the folder (default: benchmarks/gpu/brought)")
    arguments = parser.parse_args(words)
    try:
        size = pack(
            arguments.out,
            arguments.data,
            arguments.model,
            arguments.package or PACKAGES,
            arguments.python,
            parse_bytes(arguments.limit),
        )
    except EdgeformerError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    if code_version().endswith("-dirty"):
        print("the checkout was changed since its last commit: figures will be of no commit, and never gone on with")
    print(f"{format_bytes(size)} in {arguments.out}; on the host: . benchmarks/gpu/unpack.sh")


if __name__ == "__main__":
    main()
