"""Every command line of README and docs: how the tests run it, or why they cannot.

A documented line is run as it stands, with options added that make it take seconds: smaller models, fewer rows, one
artifact. Paths in it (``path/to/sst2``) are made before, in the folder that it runs in.
"""

from __future__ import annotations

from tests.conftest import SMALL, SMALL_LANGUAGE


def _set(*overrides: str) -> tuple[str, ...]:
    return tuple(word for override in overrides for word in ("--set", override))


_TINY = tuple(item for item in SMALL if not item.startswith("name="))
_OF_THE_LINE = ("name=", "data.parts=", "model.loops=", "model.exits=")
_TINY_TEXT = tuple(item for item in SMALL_LANGUAGE if not item.startswith(_OF_THE_LINE))
_ONE_SHAPE = ("--artifact", "onnx-fp16", "--batch", "1", "--seq", "16")
_FEW = ("--max-tokens", "5")

RUN: dict[str, tuple[str, ...]] = {
    "edgeformer train quickstart": ("--max-steps", "2", *_set(*_TINY)),
    "edgeformer train quickstart --set training.epochs=2 --set model.iterations=3": (
        "--max-steps", "2", *_set(*(item for item in _TINY if not item.startswith("training.epochs"))),
    ),
    "edgeformer train recurrent_sst2_fast --data path/to/sst2 --tokenizer path/to/bert-base-uncased/tokenizer.json": (
        "--max-steps", "2", "--set", "model.hidden_size=32", "--set", "model.ffn_size=64",
    ),
    "edgeformer export --fp16": (),
    'edgeformer predict "the staff was friendly but overall the food was not good"': (),
    "edgeformer export --fp16 --trt": (),
    "edgeformer profile --device rtx4050": _ONE_SHAPE,
    'edgeformer generate "The history of the town"': _FEW,
    'edgeformer generate "The history of the town" --exit 4': _FEW,
    'edgeformer generate "The history of the town" --confidence': _FEW,
    "edgeformer verify bundle": (),
    "edgeformer verify bundle --write": (),
    "edgeformer compare before.json after.json": (),
    "edgeformer init letters.jsonl": (),
    "edgeformer train letters.yaml": _set("model.hidden_size=16", "model.ffn_size=16", "training.epochs=1"),
    'edgeformer predict "Frau Käthe Bachmann wohnt seit dem 1.2.1999 in der Lindstraße 7."': (),
    "edgeformer predict --file mails.csv --output spans.jsonl": (),
    "edgeformer evaluate --data held-out.conll": (),
    "edgeformer import crt best_model.pt --tokenizer gpt2/tokenizer.json": (),
}  # fmt: skip
"""Command line → options that are added."""

_MEASURES = "measures for minutes; tests/benchmark runs it on a small bundle"
_IMPORTED = "needs the model; tests/imports/test_encoder_export.py does it with a small one"
_RANKED = "needs the model; tests/inference/test_rank.py does it with small ones"
_WRAPPED = "needs that file; tests/imports/test_onnx.py wraps others"
_OWN = "needs that file; tests/cli/test_own_data.py does it with a messy one"
_MACHINE = "needs that machine; tests/machines runs it with a real SSH server"
_FILES = "needs that file; tests/inference/test_predict_file.py answers others in every format"

NOT_RUN: dict[str, str] = {
    "edgeformer profile --device host --batch 1,8 --seq 16,128 --threads 1,2 --max-latency 10ms": _MEASURES,
    "edgeformer profile quickstart --device host --publish rows.csv": _MEASURES,
    "edgeformer profile quickstart --on pi@raspberrypi --publish rows.csv": _MACHINE,
    "edgeformer profile --device rtx4050 --choose --min-score 0.91 --max-size 20MiB --minimize size": _MEASURES,
    "edgeformer train reviews.yaml --set data.stream=true --set data.rows.validation=5000 --set data.rows.test=5000": (
        "needs a large file; tests/training/test_training_memory.py trains such a recipe on a small one"
    ),
    "edgeformer profile --device raspberry-pi-5": _MEASURES,
    "edgeformer profile --device raspberry-pi-5 --artifact onnx-int8 --max-latency 20ms": _MEASURES,
    "edgeformer profile --device raspberry-pi-5 --artifact onnx-int8 --max-latency 50ms": _MEASURES,
    "edgeformer exits --max-drop 1% --risk 5%": "needs a step artifact; tests/inference/test_exits.py has one",
    'edgeformer predict --confidence auto "a warm, funny and quietly moving film"': "the same",
    "edgeformer gate --against before.json --device host --max-slowdown 5%": "tests/benchmark/test_gate.py runs it",
    "edgeformer calibrate": _MEASURES,
    "edgeformer calibrate --also other-run-001 --also third-run-001": _MEASURES,
    "edgeformer calibrate --validate-only": _MEASURES,
    "edgeformer profile crt_imported-001 --device rtx4050 --allow-leak": _MEASURES,
    "edgeformer import hf path/to/all-MiniLM-L6-v2": _IMPORTED,
    "edgeformer export --int8": "tests/export/test_int8.py runs it",
    "edgeformer init reviews.csv": _OWN,
    "edgeformer init ag_news.csv --text 2,3 --labels World,Sports,Business,Sci/Tech": (
        "needs that file; test_documented_commands.py runs it with a small one"
    ),
    "edgeformer train reviews.yaml": _OWN,
    "edgeformer train reviews.yaml --set data.rows.train=0.1": "needs that file; tests/data/test_splits.py",
    'edgeformer predict "the soup was cold"': _OWN,
    "edgeformer evaluate --data other.csv": _OWN,
    "edgeformer evaluate --data survey.csv --text answer --label mood": _OWN,
    "edgeformer export --fp16 --int8": "takes a quarter of a minute; tests/export/test_int8.py runs it",
    "edgeformer export crt_imported-001 --allow-leak": (
        "takes half a minute; tests/export/test_export_language.py exports a model that leaks"
    ),
    "edgeformer import hf path/to/all-MiniLM-L6-v2 --name minilm --data path/to/sts --target raspberry-pi-5": _IMPORTED,
    "edgeformer export minilm --fp16 --int8 --vocab-trim": _IMPORTED,
    "edgeformer profile minilm": _MEASURES,
    "edgeformer predict --file reviews.csv --output labels.jsonl": _FILES,
    "edgeformer train minilm_sst2": "reads the hub; tests/models/test_pretrained.py trains small ones",
    "edgeformer train linear_distilled_sst2": "needs a finished teacher; tests/training/test_teacher.py has one",
    (
        'edgeformer train minilm_folded_sst2 --set "data.unlabelled=[{kind: file, path: reviews.csv}]" '
        "--set data.unlabelled_unit=sentences"
    ): "needs a finished teacher; tests/training/test_distillation.py trains a fold",
    "edgeformer predict --file - --format csv < reviews.txt": _FILES,
    "edgeformer serve path/to/bundle --artifact onnx-int8": "does not end; tests/inference asks servers",
    "edgeformer serve smollm": "the same",
    "edgeformer serve smollm --artifact gguf-int8-decode": "the same",
    'edgeformer predict minilm --query "How do I reset my password?" --file answers.csv --top 10': _RANKED,
    'edgeformer predict minilm --query "the machine broke after a week" --file titles.csv --top 3': _RANKED,
    "edgeformer predict minilm --file answers.csv --output vectors.parquet": _RANKED,
    "edgeformer predict minilm --file answers.csv --output vectors.npy --vectors int8": _RANKED,
    "edgeformer import hf path/to/ms-marco-MiniLM-L6-v2 --name reranker --data judged.csv": _RANKED,
    "edgeformer export reranker --int8": _RANKED,
    "edgeformer evaluate reranker": _RANKED,
    'edgeformer predict reranker --query "How do I reset my password?" --file answers.csv --top 10': _RANKED,
    "edgeformer profile vad.onnx --device raspberry-pi-5 --shape input=1x512 --shape state=2x1x128 --range sr=16000": (
        "needs that file; tests/benchmark/test_profile_wrapped.py profiles others"
    ),
    "edgeformer import onnx detector.onnx -o detector --shape x=Bx3x320x320 --inputs pictures.npz": _WRAPPED,
    "edgeformer verify detector": _WRAPPED,
    "edgeformer export detector --fp16 --int8 --trt --target rtx4050": (
        "needs that file; tests/export/test_graph_source.py exports others"
    ),
    "edgeformer profile detector --device rtx4050 --choose --min-score 0.999 --minimize size": _MEASURES,
    "edgeformer import onnx sentiment.onnx -o sentiment --tokenizer tokenizer.json --labels bad,good --data dev.tsv": (
        "needs that file; tests/export/test_graph_source.py wraps another classifier"
    ),
    "edgeformer page path/to/bundle -o site --libraries node_modules": (
        "needs packages from npm; tests/web makes pages and opens them"
    ),
    "edgeformer profile --on pi@raspberrypi": _MACHINE,
    "edgeformer profile --on pi@raspberrypi --on jetson --on local --max-latency 20ms": _MACHINE,
    "edgeformer profile --on kitchen-pi": _MACHINE,
    "edgeformer verify --on jetson --write": _MACHINE,
    "edgeformer gate path/to/candidate --against path/to/baseline --on pi@raspberrypi": _MACHINE,
    "edgeformer machines add pi@raspberrypi --name kitchen-pi": _MACHINE,
    "edgeformer machines list": _MACHINE,
    "edgeformer machines pack --for linux-aarch64-cp311": "downloads 200 MB; tests/machines installs from a pack",
    "edgeformer compare pi.json jetson.json browser.json --html devices.html": ("needs those three reports"),
    "edgeformer profile browser.json --device raspberry-pi-5": (
        "needs a report from a browser; tests/web/test_in_browser.py measures one and judges it"
    ),
    "edgeformer plan crt_deep_rtx4050 --device rtx4050": "test_statements.py runs it and reads what it says",
    "edgeformer export crt_mini-001 --fp16 --exit all": "tests/export/test_export_language.py exports a smaller one",
    "edgeformer import hf path/to/SmolLM2-135M": "needs the model; tests/imports/test_language.py imports others",
    "edgeformer import gguf SmolLM2-135M-Instruct.Q4_1.gguf --name smollm": "the same",
    "edgeformer export smollm --int8 --gguf": "the same",
    "edgeformer plan looped_rtx4050 --device rtx4050": "test_statements.py runs it and reads what it says",
    "edgeformer train looped_rtx4050": "takes hours on a card; tests/training trains small ones",
    "edgeformer profile --runtime all": "tests/runtimes/test_llamacpp.py runs it",
    "edgeformer profile --seq 512 --runtime all": "the same",
    "edgeformer import hf HuggingFaceTB/SmolLM2-135M-Instruct --name smollm2": (
        "reads the hub; tests/imports/test_language.py imports small ones"
    ),
    "edgeformer train smollm2_folded": "needs that run; tests/models/test_decoder.py trains a small one",
    "edgeformer train looped_mini": "reads WikiText-2 from the hub; tests/runtimes/test_llamacpp.py has a small one",
    "edgeformer export --int8 --litert": "tests/runtimes/test_litert.py runs it",
    "edgeformer verify --runtime litert": "the same",
    "edgeformer export --int8 --executorch": "tests/runtimes/test_executorch.py runs it",
    "edgeformer verify --runtime executorch": "the same",
    "edgeformer export --int8 --coreml": "tests/runtimes/test_coreml.py converts a module",
    "edgeformer export --fp16 --int8 --gguf": "tests/runtimes/test_llamacpp.py runs it",
    'edgeformer generate "The history of the town" --artifact gguf-int8-decode': "the same",
    "edgeformer train crt_mini": "reads WikiText-2 from the hub; examples/looped_lm.py trains it on a file",
    "edgeformer export --fp16 --int8 --vocab-trim --trt --exit all --target rtx4050": (
        "half a minute and more; tests/export/test_export_everything.py runs it"
    ),
}
"""Command line → why it is parsed only."""

NOT_OURS = {
    "llama-cli": "is llama.cpp's own program; tests/runtimes/test_llamacpp.py runs the library",
    "curl": "asks a server; tests/inference does so over HTTP",
    "docker": "is not everywhere; test_deploy.py reads docs/Dockerfile",
    "cp": "copies the reader's own bundle",
    "make": "installs packages or runs these tests; the target must be in the Makefile",
    "source": "activates an environment",
    "ssh": "needs another machine; tests/machines has an SSH server",
    "ssh-copy-id": "needs another machine",
    "scp": "needs another machine; the test copies the folder",
    "torchrun": "tests/training/test_distributed.py starts two processes with it; replace the host names",
    "accelerate": "starts processes for cards",
    "npm": "installs packages; tests/web installs those that are named, in the same versions",
    "python": (
        "installs packages, or prints a benchmark whose script must be there (tables: test_figures.py); one line of "
        "Python is run by test_api.py; or serves a folder, as tests/web does"
    ),
}
"""First word of other command lines → why they are not run."""

PICTURES = {"#!/bin/bash": "a job for Slurm, which is not here"}
"""First line of a block that is not run → what it is. Blocks of ``text`` are output and drawings."""

DATA = {
    "// build.gradle.kts": "dependencies of an Android app; the page says how it was checked",
    "// Classifier.kt": "a class of an Android app; the page says how it was checked",
    '// inside predict(): ids from the tokenizer; module = Module.load("$bundle/engines/model.pte")': "lines of it",
    "// Classifier.swift": "a class of an iOS app; the page says how it was checked",
    "# a linear model of characters, for most data": "sections of a recipe, as init and search write them",
    "# a head on a frozen encoder": "sections of a recipe, as search writes them",
    "# three files, training rows streamed from disk": "test_documented_commands.py trains with it",
    "# two tables, each as it is": "test_documented_commands.py reads rows with it",
    "# two text columns, and names for numbers": "test_documented_commands.py drafts it",
    "# several labels per text": "test_documented_commands.py reads rows with it",
    "# a CoNLL file with other columns": "test_documented_commands.py reads rows with it",
    "# numbers instead of labels": "test_documented_commands.py reads rows with it",
    "bandwidth_bytes_per_s:": "a fact of a profile; test_documented_commands.py reads it",
    "# in recipes/linear_sst2.yaml": "test_statements.py compares it with that",
    "# in recipes/linear_distilled_sst2.yaml": "test_statements.py compares it with that",
    "# in recipes/minilm_sst2.yaml": "test_statements.py compares it with that",
    "# in recipes/minilm_folded_sst2.yaml": "test_statements.py compares it with that",
    "# .github/workflows/edgeformer.yml": "a workflow; test_ci.py reads it and runs its script",
    "name: my-card": "a whole profile; test_documented_commands.py reads it",
}
"""First line of a block of YAML → what reads it in the tests."""
