# Everything runs in .venv, which these targets make themselves: they need git, make and python3, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EDGEFORMER := $(BIN)/edgeformer

MINUTES ?= 9

.PHONY: demo test test-slow bench study results gpu-check torture mutants lint style types docs wheel clean

# A recipe becomes a run, a run a bundle, a bundle a report: meant to stay under 90 s on two cores after the installation.
demo: $(VENV)/.train
	$(EDGEFORMER) train quickstart
	$(EDGEFORMER) export --fp16
	$(EDGEFORMER) predict "the staff was friendly but overall the food was not good"
	$(EDGEFORMER) profile --device rtx4050

test: $(VENV)/.dev
	$(BIN)/python -m pytest

# Tests that take long and guard something rare; make test leaves them out.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# What claims of speed rest on, in half an hour, on a machine that does nothing else. Further arguments in BENCH:
# make bench BENCH="--data ~/sst2 --tokenizer ~/bert/tokenizer.json --model ~/minilm"
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks bench $(BENCH)

# A table or figure of the papers, from training to figures: make study NAME=table6 STUDY="--data ~/data --jobs 2"
study: $(VENV)/.train
	$(BIN)/python -m benchmarks studies $(NAME) $(STUDY)

# docs/results/, docs/explanation/estimating.md and the verdicts in docs/claims.yaml from the JSON in benchmarks/results.
results: $(VENV)/.dev
	$(BIN)/python -m benchmarks results_page
	$(BIN)/python -m benchmarks estimates
	$(BIN)/python -m benchmarks claims

# What is asked of an NVIDIA card, in the order of worth, as far as MINUTES go; the same command goes on where it stopped.
gpu-check: $(VENV)/.train
	$(BIN)/python -m benchmarks gpu --minutes $(MINUTES)

# Kills before every change on the disk and at random moments, flipped bits, thousands of hostile files: hours, not in CI.
torture: $(VENV)/.dev
	$(BIN)/python -m pytest -m torture -n 0 -s

# One line changed at a time in what decides numbers, verdicts and files: does a test notice? docs/explanation/reliability.md has
# what was found. Hours, not in CI; MODULES="artifacts/units.py artifacts/files.py" does these alone.
mutants: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet "mutmut==3.8.1"
	$(BIN)/python -m tests.mutants $(MODULES)

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

# The documentation site, in site/. Broken links and anchors fail.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# dist/edgeformer-VERSION-py3-none-any.whl, for devices without the clone; recipes and profiles are inside.
wheel: | $(VENV)/bin/python
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[train]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[train,rtx,openvino,litert,executorch,coreml,dev]"
	touch $@ $(VENV)/.train

$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@
