"""Train a classifier on a CSV with the columns text and label, export it, and judge it for a Raspberry Pi 5."""

import argparse
import csv
from pathlib import Path

import edgeformer

RECIPE = """\
name: {name}
task: classification
data:
  parts: {{train: [{{kind: file, path: "{path}"}}]}}
  split: stratified
  labels: {labels}
  max_length: 64
tokenizer: {{kind: trained}}
model:
  {{kind: encoder, vocab_size: 2000, hidden_size: 64, layers: 2, iterations: 2, heads: 4, ffn_size: 256,
  residual_scale: 0.5}}
training:
  epochs: 10
  batch_size: 32
  optimizer: {{lr: 1.0e-3, weight_decay: 0.05}}
  schedule: {{kind: cosine}}
  early_stopping: {{patience: 3}}
"""

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data", type=Path)
parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
parser.add_argument("--max-steps", type=int)
arguments = parser.parse_args()

with arguments.data.open(encoding="utf-8", newline="") as file:
    labels = sorted({row["label"] for row in csv.DictReader(file)})
recipe = arguments.data.with_suffix(".yaml")
recipe.write_text(RECIPE.format(name=arguments.data.stem, path=arguments.data.resolve(), labels=labels))

run = edgeformer.train(recipe, artifacts=arguments.artifacts, max_steps=arguments.max_steps)
print(f"test accuracy {run.manifest.test.accuracy:.3f}")

bundle = run.export(int8=True)
for artifact in bundle.artifacts:
    print(f"{artifact.id}: {artifact.size_bytes / 2**20:.2f} MiB, {artifact.status}")

report = bundle.profile("raspberry-pi-5", artifacts=("onnx-int8",), batches=(1,), seqs=(64,), max_latency_ms=10.0)
for row in report.rows:
    latency = row.latency_ms  # "measured" on this host, "estimated" for the device
    time = latency.reason if latency.p50 is None else f"{latency.p50:.2f} ms"
    print(f"{row.artifact} on {row.where} ({row.phase}): {latency.status}, {time}")
print(f"verdict: {report.verdict.status}")
