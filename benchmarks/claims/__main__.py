"""Fill the verdicts of docs/claims.yaml from the committed results, and write docs/results/claims.md.

python -m benchmarks.claims            # write both
python -m benchmarks.claims --check    # write nothing; 1 where they are not what the results say
python -m benchmarks.claims --history  # also read from git in which commits rules and figures took their present form
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims.figures import Finder
from benchmarks.claims.history import read_history, write_history
from benchmarks.claims.page import VERDICTS, page, tally
from benchmarks.claims.schema import Claims, read_claims
from benchmarks.claims.verdicts import judge_all
from benchmarks.frame import RESULTS, ROOT
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import write_text

CLAIMS, PAGE = ROOT / "docs" / "claims.yaml", ROOT / "docs" / "results" / "claims.md"
HEADER = """\
# Every quantitative claim of the five texts. People write what is claimed, how our figure is found and the rule;
# `python -m benchmarks.claims` writes each `result` and brings the file into this form (comments do not survive it).
# The keys are explained in benchmarks/claims/schema.py; docs/results/claims.md is made of it.
"""


class _Dumper(yaml.SafeDumper):
    """Leaves on one line, claims in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def judged(path: Path, results: Path) -> Claims:
    """The claims of a file, each with its result. Raises InputError."""
    claims = read_claims(path)
    return claims.model_copy(update={"claims": judge_all(claims.claims, Finder(claims, results))})


def dump(claims: Claims) -> str:
    """As YAML, always in the same form."""
    content = claims.model_dump(mode="json", exclude_defaults=True)
    text = yaml.dump(
        content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140, default_flow_style=None, indent=2
    )
    return HEADER + text


def untested(claims: Claims) -> list[str]:
    """Why claims have no verdict yet, one reason for each of them."""
    results = [claim.result for claim in claims.claims.values() if claim.result is not None]
    return [result.why for result in results if result.verdict == "not tested yet"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--check", action="store_true", help="write nothing")
    modes.add_argument("--history", action="store_true", help="read the commits of docs/claims.yaml again")
    arguments = parser.parse_args()
    try:
        claims = judged(CLAIMS, RESULTS)
        if arguments.history:
            write_text(CLAIMS, dump(claims))
            write_history(CLAIMS)
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    written = {CLAIMS: dump(claims), PAGE: page(claims, read_history())}
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale if not arguments.check else ():
        write_text(path, written[path])
    number, *verdicts = tally([claim for claim in claims.claims.values() if claim.is_counted])
    print(f"{number} claims: " + ", ".join(f"{n} {name}" for n, name in zip(verdicts, VERDICTS, strict=True)))
    for reason, waiting in Counter(untested(claims)).items():
        print(f"  not tested yet, {waiting}: {reason}")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is stale' if arguments.check else 'written'}")
    raise SystemExit(1 if stale and arguments.check else 0)


if __name__ == "__main__":
    main()
