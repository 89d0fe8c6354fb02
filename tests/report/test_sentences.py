"""Templates of notes: every call names one of them and gives all of its facts."""

import ast
from pathlib import Path
from string import Formatter

import edgeformer
from edgeformer.report.sentences import NOTES


def test_every_note_has_a_template_with_its_facts() -> None:
    used: set[str] = set()
    for path in Path(edgeformer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "note" or not node.args:
                continue
            parts = [node.args[0]]
            if isinstance(parts[0], ast.IfExp):
                parts = [parts[0].body, parts[0].orelse]
            for part in parts:
                if not isinstance(part, ast.Constant) or part.value not in NOTES:
                    continue
                used.add(part.value)
                needed = {name for _, name, _, _ in Formatter().parse(NOTES[part.value]) if name}
                assert needed <= {keyword.arg for keyword in node.keywords}, (path, node.lineno)
    computed = {"no budget", "memory budget"}  # request.py names these by a variable
    assert used | computed == NOTES.keys()
