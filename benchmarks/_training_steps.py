"""Child of side_by_side.py: trains the light recurrent model on 64 × 12 tokens and prints its step times as JSON."""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import nn

from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import BuildTarget
from edgeformer.training.optimizer import build_optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()
recipe = load_recipe("recurrent_sst2_fast")
torch.manual_seed(0)
model, _ = model_spec_of(recipe).adapter.build(recipe, BuildTarget())
optimizer = build_optimizer(model, recipe.training.optimizer)
ids = torch.randint(1000, 30_000, (64, 12))
labels = torch.randint(0, 2, (64,))
times = []
for _ in range(arguments.steps + 5):
    started = time.perf_counter()
    nn.functional.cross_entropy(model(ids), labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    times.append(1000 * (time.perf_counter() - started))
print(json.dumps(times[5:]))
