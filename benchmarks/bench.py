"""All scripts that claims of speed rest on, one after the other, in half an hour: `make bench`.

The models are made first: the light recurrent encoder and the baseline, trained for a hundred steps (random and
trained ones take the same time, but INT8 of random ones may miss its bar), and MiniLM, if its folder is named. What
cannot run here is skipped with its reason, as is what there is no time for. A script that fails leaves
the others alone; one that could not judge all of its bars is incomplete, and says why. Each writes its JSON below
--out, and session.json says of every one whether it ran, how long it took, or why not. Every kind of machine has a
folder of its own in benchmarks/results/bench, so that one does not replace another; `make results` shows what their
sessions say was done. --only adds to the session that is there, if that was of the same machine and versions, and
begins a new one if not.

Usage: python -m benchmarks.bench [--out DIR] [--data DIR] [--tokenizer FILE] [--model DIR]
                                  [--peers-python FILE] [--only NAME,…] [--minutes 30]

--data: the folder of SST-2's train.tsv, and --tokenizer the file of BERT's; without them the recipes fetch both.
--model: MiniLM's folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.judging import INCOMPLETE
from edgeformer.runtimes import library_versions
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import code_version, cpu_name, default_threads, now

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "bench"
SESSION = "session.json"
_KERNELS = {"amx_int8": "amx", "avx512_bf16": "bf16", "avx512_vnni": "vnni", "avx_vnni": "vnni", "i8mm": "i8mm"}
"""A processor's flag → what two processors of the same name may differ in."""


def kernels_here() -> list[str]:
    """What this processor multiplies in beside FP32: ``amx``, ``bf16``, ``vnni``."""
    flags = kernel_flags() or ()
    return sorted({kind for flag, kind in _KERNELS.items() if flag in flags})


def machine_folder(cpu: str, kernels: Sequence[str]) -> str:
    """A kind of machine as the name of a folder: ``amd-epyc-bf16-vnni``; virtual machines tell no more of theirs.

    Args:
        cpu: its processor's name.
        kernels: as of :func:`kernels_here`.
    """
    plain = re.sub(r"\([^)]*\)|\bprocessor\b|\bcpu\b|@.*", " ", cpu, flags=re.IGNORECASE).lower()
    return "-".join([*re.findall(r"[a-z0-9]+", plain), *kernels])


@dataclass(frozen=True)
class Case:
    """A script with its standard arguments.

    Attributes:
        name: of the script and its JSON.
        arguments: ``{light}`` stands for what is called that in ``needs``.
        needs: models and folders.
        packages: modules that it imports beyond edgeformer's own.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


CASES = (
    Case("waiting", ("{light}", "--rounds", "3"), ("light",)),
    Case("floors", ("{light}/bundle", "{baseline}/bundle", "--rounds", "5", "--minutes", "4"), ("light", "baseline")),
    Case(
        "peers",
        ("--model", "{model}", "--bundle", "{minilm}/bundle", "--light", "{light}/bundle",
         "--peers-python", "{peers_python}", "--rounds", "4", "--minutes", "6"),
        ("model", "minilm", "light"),
    ),
    Case(
        "hugging_face_trainer",
        ("--model", "{model}", "--data", "{data}", "--rows", "3200", "--rounds", "3", "--minutes", "6"),
        ("model", "data"),
        ("transformers",),
    ),
)  # fmt: skip

_ABSENT = {
    "model": "needs MiniLM's folder: --model DIR",
    "data": "needs the folder of SST-2's train.tsv: --data DIR",
}


@dataclass
class Models:
    """What the scripts are pointed at; models are made when the first script wants them.

    Attributes:
        given: name → paths from the command line.
        folder: where models are made.
        deadline: on the monotonic clock.
    """

    given: Mapping[str, list[str]]
    folder: Path
    deadline: float
    _made: dict[str, str] = field(default_factory=dict)

    def paths(self, name: str) -> list[str]:
        """Where it lies. Raises LookupError with the reason why it is not there."""
        if name in self.given:
            return self.given[name]
        if name in _ABSENT:
            raise LookupError(_ABSENT[name])
        makers: dict[str, Callable[[], None]] = {
            "light": lambda: self._trained("light", "recurrent_sst2_fast"),
            "baseline": lambda: self._trained("baseline", "baseline_sst2_fast"),
            "minilm": self._imported,
        }
        if name not in self._made:
            try:
                makers[name]()
                self._made[name] = ""
            except LookupError as error:
                self._made[name] = str(error)
        if self._made[name]:
            raise LookupError(self._made[name])
        return [str(self.folder / name)]

    def _trained(self, name: str, recipe: str) -> None:
        local = [
            word for key in ("data", "tokenizer") for item in self.given.get(key, []) for word in (f"--{key}", item)
        ]
        self._edgeformer("train", recipe, "--max-steps", "100", "--name", name, *local)
        self._export(name)

    def _imported(self) -> None:
        self._edgeformer("import", "hf", *self.paths("model"), "--name", "minilm")
        self._export("minilm")

    def _export(self, name: str) -> None:
        self._edgeformer("export", name, "--int8", "--keep-going")

    def _edgeformer(self, *words: str) -> None:
        command = [sys.executable, "-m", "edgeformer", *words, "--artifacts", str(self.folder)]
        code, why = finished(command, self.deadline)
        if code not in (0, INCOMPLETE):
            raise LookupError(f"edgeformer {' '.join(words)}: {why}")


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
    existing = {name: models.paths(name) for name in case.needs}
    words = [sys.executable, "-m", f"benchmarks.{case.name}"]
    for word in case.arguments:
        several = next((paths for name, paths in existing.items() if word == f"{{{name}}}"), None)
        item = {name: paths[0] for name, paths in {**models.given, **existing}.items()}
        words += several if several is not None else [word.format(**item)]
    return [*words, "--json", str(out)]


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
    """Return the cases of the session in a folder; none, with a message, if it belongs to a different machine.

    Args:
        folder: of the results.
        session: the new session, whose machine and versions must equal those of the stored one.
    """
    try:
        earlier = json.loads((folder / SESSION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    other = [name for name in ("host", "kernels", "threads", "versions") if earlier.get(name) != session[name]]
    if other:
        print(f"a new session begins: {' and '.join(other)} are not those of the one in {folder}", flush=True)
    return {} if other else dict(earlier["cases"])


def main(words: Sequence[str] | None = None) -> int:
    """Command line; 1 where a script failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder_here = RESULTS / machine_folder(cpu_name(), kernels_here())
    parser.add_argument("--out", type=Path, default=folder_here)
    parser.add_argument("--data")
    parser.add_argument("--tokenizer")
    parser.add_argument("--model")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--only", help="names of scripts, with commas")
    parser.add_argument("--minutes", type=float, default=30.0)
    arguments = parser.parse_args(words)
    names = arguments.only.split(",") if arguments.only else [case.name for case in CASES]
    if unknown := sorted(set(names) - {case.name for case in CASES}):
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(case.name for case in CASES)}")
    single = {name: [vars(arguments)[name]] for name in ("data", "tokenizer", "model", "peers_python")}
    parameters = {name: [str(path) for path in paths if path] for name, paths in single.items()}
    session: dict[str, Any] = {"host": cpu_name(), "kernels": kernels_here()}
    session |= {"threads": default_threads(), "measured": now()}
    session |= {
        "code_version": code_version(),
        "versions": library_versions(),
        "minutes": arguments.minutes,
        "cases": {},
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    session["cases"] |= cases_before(arguments.out, session) if arguments.only else {}
    with tempfile.TemporaryDirectory(prefix="edgeformer-bench-") as folder:
        deadline = time.monotonic() + 60 * arguments.minutes
        models = Models({name: paths for name, paths in parameters.items() if paths}, Path(folder), deadline)
        for case in CASES:
            if case.name not in names:
                continue
            outcome = session["cases"][case.name] = run(case, models, arguments.out)
            print(f"{case.name:22} {outcome['status']:8} {outcome.get('reason', '')}", flush=True)
            (arguments.out / SESSION).write_text(json.dumps(session, indent=2) + "\n", encoding="utf-8")
    return int(any(session["cases"].get(name, {}).get("status") == "failed" for name in names))


if __name__ == "__main__":
    sys.exit(main())
