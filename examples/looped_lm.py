"""Train a small looped language model on a text file and compare its exits.

One block is applied up to eight times. The model can answer after loops 2, 4 and 6, which costs less and predicts
worse.
"""

import argparse
from pathlib import Path

import edgeformer
from edgeformer.tasks.early_exit import EarlyExit

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", type=Path, help="plain text, one paragraph per line")
parser.add_argument("--prompt", default="The house")
parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of recipes/crt_mini.yaml")
parser.add_argument("--max-steps", type=int)
arguments = parser.parse_args()

# The last paragraphs of the file validate and test; all others train.
lines = [line for line in arguments.text.read_text(encoding="utf-8").splitlines() if line.strip()]
tenth = max(1, len(lines) // 10)
arguments.artifacts.mkdir(parents=True, exist_ok=True)
parts = {"train": lines[: -2 * tenth], "validation": lines[-2 * tenth : -tenth], "test": lines[-tenth:]}
for name, paragraphs in parts.items():
    (arguments.artifacts / f"{name}.txt").write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
sources = ", ".join(f'{name}: [{{kind: file, path: "{arguments.artifacts.resolve()}/{name}.txt"}}]' for name in parts)

overrides = [f"data.parts={{{sources}}}", *arguments.set]
run = edgeformer.train("crt_mini", overrides=overrides, artifacts=arguments.artifacts, max_steps=arguments.max_steps)

bundle = run.export(exits="all")
for row in bundle.evaluate().rows:
    print(f"{row.artifact}, exit {row.exit}: perplexity {row.perplexity:.1f}")

generation = bundle.generate(arguments.prompt, max_tokens=20, early=EarlyExit(start=0.6, floor=0.5, decay=0.9))
print(arguments.prompt + generation.text)
