"""The scripts behind the published figures.

    python -m benchmarks                    # lists them, with their questions
    python -m benchmarks NAME --help        # target, machine, results and page of one, and its options
    python -m benchmarks NAME ARGUMENTS…    # runs it

A script is a module or package of this folder with a `main` below its `__main__`; scripts.yaml describes it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import yaml

SCRIPTS: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8")
)


def main(words: list[str]) -> None:
    """List the scripts, or run one. Raises SystemExit with its exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        for name, script in SCRIPTS.items():
            print(f"{name:22} {script['question']}")
        return
    name, *arguments = words
    if name not in SCRIPTS:
        raise SystemExit(f"no benchmark {name!r}; there are {', '.join(SCRIPTS)}")
    if arguments in (["-h"], ["--help"]):
        print("\n".join(f"{key:9} {text}" for key, text in SCRIPTS[name].items()), flush=True)
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
