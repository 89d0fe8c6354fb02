"""One small change at a time in the code that decides numbers, verdicts and files: does a test notice?

``make mutants`` runs it over every module below, ``make mutants MODULES=artifacts/units.py`` over one. mutmut makes the
changes and runs the tests. Its results are in ``artifacts/mutants/``; docs/explanation/reliability.md has a summary.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
from mutmut.__main__ import cli
from mutmut.configuration import config
from mutmut.mutation import file_mutation
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.workers.isolation import ForkServerRunner

ROOT = Path(__file__).resolve().parents[1]
WORK, FOUND = ROOT / "mutants", ROOT / "artifacts" / "mutants"
"""mutmut's copy of the project, made anew for every module; what was found, one file per module."""

MODULES: dict[str, tuple[str, ...]] = {
    "artifacts/units.py": ("artifacts/test_units.py", "artifacts/test_escaping.py"),
    "artifacts/files.py": ("artifacts/test_files.py", "system/test_leftovers.py"),
    "system/lock.py": ("system/test_lock.py", "system/test_leftovers.py"),
    "system/leftovers.py": ("system/test_leftovers.py",),
    "tasks/early_exit.py": ("tasks/test_early_exit.py",),
    "tasks/metric.py": ("tasks",),
    "tasks/classification.py": ("tasks",),
    "tasks/language_modeling.py": ("tasks",),
    "tasks/texts.py": ("tasks",),
    "tasks/tokens.py": ("tasks",),
    "data/batching.py": ("data/test_batching.py", "data/test_language.py"),
    "measurement/trackers.py": ("measurement", "system/test_host.py"),
    "benchmark/verdict.py": ("benchmark/test_verdict.py",),
    "estimate/roofline.py": ("estimate/test_roofline.py", "estimate/test_fit.py"),
    "estimate/fit.py": ("estimate/test_fit.py",),
    "estimate/estimate.py": ("estimate/test_estimate.py",),
    "estimate/operators.py": ("estimate/test_operators.py",),
    "estimate/calibrate.py": ("estimate/test_calibrate.py",),
    "training/plan/memory.py": ("training/test_training_memory.py",),
    "training/loop/optimizer.py": ("training/test_optimizer.py",),
    "training/loop/checkpoint.py": ("training/test_checkpoint.py",),
    "export/fp16.py": ("export/test_fp16.py",),
    "export/judging.py": ("export/test_judging.py", "export/test_fp16.py"),
}
"""Module under ``edgeformer/`` → the tests under ``tests/`` that are meant to know it."""

KEPT_DECORATORS = {"contextmanager", "contextlib.contextmanager", "property", "torch.inference_mode()"}
"""mutmut leaves decorated functions alone; with these the decorator goes round the switch between the mutants."""


def words_only(node: cst.CSTNode) -> bool:
    """Texts for people: sentences, and what an error says. They are not mutated: tests would only copy them."""
    return isinstance(node, cst.SimpleString) and bool(re.search(r"\s", node.value))


def one_other_string(node: cst.BaseString) -> Iterator[cst.CSTNode]:
    """Of mutmut's three changes of a string the one that needs no letters; none of a text for people."""
    if not words_only(node):
        yield from list(operator_string(node))[:1]


def other_arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """mutmut's changes of arguments, without those that change nothing new.

    None for a literal True or False is the other one once more; None as the dtype of a new array is float64.
    """
    makes = m.matches(node.func, m.Attribute(attr=m.Name("astype") | m.Name("empty") | m.Name("zeros")))
    for mutant in operator_arg_removal(node):
        changed = [old.value for old, new in zip(node.args, mutant.args, strict=False) if old is not new]
        if len(mutant.args) == len(node.args) and (
            m.matches(changed[0], m.Name("True") | m.Name("False")) or (makes and m.matches(changed[0], FLOAT64))
        ):
            continue
        yield mutant


FLOAT64 = m.Attribute(m.Name("np"), m.Name("float64"))
OPERATORS = {operator_string: one_other_string, operator_arg_removal: other_arguments}


class Visitor(file_mutation.MutationVisitor):
    """mutmut's, which also goes into functions whose decorators are known to bear it."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return not {cst.Module([]).code_for_node(d.decorator) for d in node.decorators} <= KEPT_DECORATORS
        return bool(super()._skip_node_and_children(node))


arranged = file_mutation.function_trampoline_arrangement


def arrange(function: cst.FunctionDef, mutants: Iterable[Any], class_name: str | None) -> Any:
    """The mutants of a decorated function are bare; the decorators stay on what chooses between them."""
    if any(cst.Module([]).code_for_node(d.decorator) not in KEPT_DECORATORS for d in function.decorators):
        return arranged(function, mutants, class_name)  # classmethod, staticmethod: mutmut's own
    empty, nodes, assigned, names = arranged(function.with_changes(decorators=()), mutants, class_name)
    switch = nodes[0].with_changes(decorators=[*function.decorators, *nodes[0].decorators])
    return empty, [switch, *nodes[1:]], assigned, names


submit = ForkServerRunner.submit


def submit_quickest_first(self: ForkServerRunner, mutant_name: str, tests: list[str], *limits: Any) -> None:
    """A mutant is done with the first test that fails."""
    submit(self, mutant_name, sorted(tests, key=lambda test: state().duration_by_test[test]), *limits)


def prepare(module: str) -> None:
    """Tell mutmut what to do for one module."""
    mutation_operators[:] = [(kind, OPERATORS.get(operator, operator)) for kind, operator in mutation_operators]
    file_mutation.MutationVisitor = Visitor
    file_mutation.function_trampoline_arrangement = arrange
    ForkServerRunner.submit = submit_quickest_first
    asked = config()
    asked.only_mutate = [f"edgeformer/{module}"]
    asked.pytest_add_cli_args_test_selection = [f"tests/{test}" for test in MODULES[module]]


def run(module: str) -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    prepare(module)
    cli(["run", "--max-children", "1"], standalone_mode=False)
    source = Path("edgeformer") / module
    data = SourceFileMutationData(path=source)
    data.load()
    rows = [{"mutant": name, "status": status_by_exit_code[code]} for name, code in data.exit_code_by_key.items()]
    for row in rows:
        if row["status"] not in ("killed", "timeout"):
            row["diff"] = get_diff_for_mutant(row["mutant"], path=source)
    FOUND.mkdir(parents=True, exist_ok=True)
    (FOUND / f"{module.replace('/', '.')}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def summary(modules: Sequence[str]) -> Iterator[str]:
    for module in modules:
        path = FOUND / f"{module.replace('/', '.')}.json"
        rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        counts = Counter(row["status"] for row in rows)
        killed = counts["killed"] + counts["timeout"]
        share = f"{killed / len(rows):.1%}" if rows else "not run"
        yield f"| {module} | {len(rows)} | {killed} | {counts['timeout']} | {len(rows) - killed} | {share} |"


def main() -> None:
    """One process per module: mutmut and the modules under test remember too much for a second one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="paths under edgeformer/; left out: all")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    modules = asked.modules or list(MODULES)
    if asked.alone:
        return run(modules[0])
    one_thread = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for module in modules:
        alone = [sys.executable, "-m", "tests.mutants", "--alone", module]
        subprocess.run(alone, cwd=ROOT, env=os.environ | one_thread, check=False)
    print("| module | mutants | killed | of them by time | left | killed |\n| --- | --- | --- | --- | --- | --- |")
    print("\n".join(summary(modules)))
    return None


if __name__ == "__main__":
    main()
