"""All scripts that claims of speed rest on, one after the other, in half an hour: `make bench`.

The models are made first: the light recurrent encoder and the baseline, trained for a hundred steps (random and
trained ones take the same time, but INT8 of random ones may miss its bar). What cannot run here is skipped with its
reason, as is what there is no time for. A script that fails leaves the others alone; one that could not judge all of
its bars is incomplete, and says why. Each writes its JSON below --out, and session.json says of every one whether it
ran, how long it took, or why not. Every kind of machine has a folder of its own in benchmarks/results/bench; --only
adds to the session that is there, if that was of the same machine and versions, and begins a new one if not.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from benchmarks.frame import RESULTS as ALL_RESULTS
from benchmarks.frame import ROOT, run_script
from benchmarks.judging import INCOMPLETE
from edgeformer.artifacts.files import write_json
from edgeformer.runtimes import library_versions
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import code_version, cpu_name, default_threads, now

RESULTS = ALL_RESULTS / "bench"
SESSION = "session.json"
_KERNELS = {"amx_int8": "amx", "avx512_bf16": "bf16", "avx512_vnni": "vnni", "avx_vnni": "vnni", "i8mm": "i8mm"}
"""A processor's flag → what two processors of the same name may differ in."""


def kernels_here() -> list[str]:
    """What this processor multiplies in beside FP32: ``amx``, ``bf16``, ``vnni``."""
    flags = kernel_flags() or ()
    return sorted({kind for flag, kind in _KERNELS.items() if flag in flags})


def machine_folder(cpu: str, kernels: Sequence[str]) -> str:
    """Return a kind of machine as the name of a folder: ``amd-epyc-bf16-vnni``; virtual machines tell no more."""
    plain = re.sub(r"\([^)]*\)|\bprocessor\b|\bcpu\b|@.*", " ", cpu, flags=re.IGNORECASE).lower()
    return "-".join([*re.findall(r"[a-z0-9]+", plain), *kernels])


@dataclass(frozen=True)
class Case:
    """A script with its standard arguments, in which ``{light}`` stands for the model or folder of that name.

    ``packages`` are modules that it imports beyond edgeformer's own.
    """

    name: str
    arguments: tuple[str, ...]
    packages: tuple[str, ...] = ()


CASES = (
    Case("waiting", ("{light}", "--rounds", "3")),
    Case("floors", ("{light}/bundle", "{baseline}/bundle", "--rounds", "5", "--minutes", "4")),
    Case(
        "hugging_face_trainer",
        ("--model", "{model}", "--data", "{data}", "--rows", "3200", "--rounds", "3", "--minutes", "6"),
        ("transformers",),
    ),
)
_TRAINED = {"light": "recurrent_sst2_fast", "baseline": "baseline_sst2_fast"}
"""Model → the recipe that it is made of."""
_ABSENT = {"model": "needs MiniLM's folder: --model DIR", "data": "needs the folder of SST-2's train.tsv: --data DIR"}


@dataclass
class Models:
    """What the scripts are pointed at: paths from the command line, and models, made when a script wants them."""

    paths: Mapping[str, str]
    folder: Path
    deadline: float
    _problems: dict[str, str] = field(default_factory=dict)  # model that was made → why that failed, or nothing

    def path(self, name: str) -> str:
        """Where it lies. Raises LookupError with the reason why it is not there."""
        if name in self.paths:
            return self.paths[name]
        if name in _ABSENT:
            raise LookupError(_ABSENT[name])
        if name not in self._problems:
            local = [
                word for key in ("data", "tokenizer") if key in self.paths for word in (f"--{key}", self.paths[key])
            ]
            self._problems[name] = self._edgeformer(
                "train", _TRAINED[name], "--max-steps", "100", "--name", name, *local
            ) or self._edgeformer("export", name, "--int8", "--keep-going")
        if self._problems[name]:
            raise LookupError(self._problems[name])
        return str(self.folder / name)

    def _edgeformer(self, *words: str) -> str:
        """Run a command; return why it failed, or an empty text."""
        command = [sys.executable, "-m", "edgeformer", *words, "--artifacts", str(self.folder)]
        code, why = finished(command, self.deadline)
        return "" if code in (0, INCOMPLETE) else f"edgeformer {' '.join(words)}: {why}"


def finished(command: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """A command's exit code, and its last words. It is ended at the deadline, and has no code then."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return None, "no time is left"
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=remaining_s, check=False)
    except subprocess.TimeoutExpired:
        return None, "it was ended when the time was over"
    return done.returncode, (done.stderr.strip().splitlines() or ["it says nothing"])[-1]


def command_of(case: Case, models: Models, out: Path) -> list[str]:
    """Its command line. Raises LookupError with the reason why it cannot run here."""
    absent = [name for name in case.packages if importlib.util.find_spec(name) is None]
    if absent:
        raise LookupError(f"needs {', '.join(absent)}, which is not installed")
    words = [re.sub(r"\{(\w+)\}", lambda match: models.path(match[1]), word) for word in case.arguments]
    return [sys.executable, "-m", "benchmarks", case.name, *words, "--json", str(out)]


def run(case: Case, models: Models, folder: Path) -> dict[str, Any]:
    """What became of a case: ``status`` done, incomplete, skipped or failed, ``seconds``, ``reason``."""
    began = time.monotonic()
    out = folder / f"{case.name}.json"
    try:
        if began >= models.deadline:
            raise LookupError("no time is left")
        command = command_of(case, models, out)
    except LookupError as error:
        return {"status": "skipped", "reason": str(error)}
    out.unlink(missing_ok=True)  # a script that fails leaves none of an earlier session
    built, began = began, time.monotonic()
    code, why = finished(command, models.deadline)
    status = {0: "done", INCOMPLETE: "incomplete"}.get(code if code is not None else -1, "failed")
    outcome: dict[str, Any] = {"status": status, "seconds": time.monotonic() - began}
    outcome |= {"preparing_s": began - built, "measured": now(), "code_version": code_version()}
    return {**outcome, **({"reason": why} if status != "done" else {})}


def cases_before(folder: Path, session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases of the session in a folder; none, with a message, if its machine or versions are others."""
    try:
        earlier = json.loads((folder / SESSION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    other = [name for name in ("host", "kernels", "threads", "versions") if earlier.get(name) != session[name]]
    if other:
        print(f"a new session begins: {' and '.join(other)} are not those of the one in {folder}", flush=True)
    return {} if other else dict(earlier["cases"])


def main(
    out: Path | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    model: str | None = None,
    only: str = "",
    minutes: float = 30.0,
) -> int:
    """Run the scripts; 1 where one failed.

    Args:
        out: folder of the results; default: that of this kind of machine.
        data: the folder of SST-2's train.tsv.
        tokenizer: the file of BERT's tokenizer; without both the recipes fetch them.
        model: MiniLM's folder.
        only: names of scripts, with commas.
        minutes: for all of them.
    """
    cpu, kernels = cpu_name(), kernels_here()
    folder = out or RESULTS / machine_folder(cpu, kernels)
    names = only.split(",") if only else [case.name for case in CASES]
    if unknown := sorted(set(names) - {case.name for case in CASES}):
        raise typer.BadParameter(f"--only: unknown {', '.join(unknown)}; there are {', '.join(c.name for c in CASES)}")
    session: dict[str, Any] = {
        "host": cpu, "kernels": kernels, "threads": default_threads(), "measured": now(),
        "code_version": code_version(), "versions": library_versions(), "minutes": minutes, "cases": {},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    session["cases"] |= cases_before(folder, session) if only else {}
    paths = {name: path for name, path in (("data", data), ("tokenizer", tokenizer), ("model", model)) if path}
    with tempfile.TemporaryDirectory(prefix="edgeformer-bench-") as work:
        models = Models(paths, Path(work), time.monotonic() + 60 * minutes)
        for case in CASES:
            if case.name not in names:
                continue
            outcome = session["cases"][case.name] = run(case, models, folder)
            write_json(folder / SESSION, session)
            print(f"{case.name}: {outcome['status']}: {outcome.get('reason', '')}".rstrip(": "), flush=True)
    return 1 if any(case["status"] == "failed" for case in session["cases"].values()) else 0


if __name__ == "__main__":
    run_script(main)
