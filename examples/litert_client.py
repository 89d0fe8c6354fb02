"""Classify texts with the .tflite file of a bundle. Needs numpy, tokenizers and ai-edge-litert, and no edgeformer.

Do the same in an Android app: docs/guides/phones.md has this program in Kotlin.
"""

import argparse
import json
import re
from pathlib import Path

import numpy
from ai_edge_litert.interpreter import Interpreter
from tokenizers import Tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("bundle", type=Path, help="folder that edgeformer export --litert wrote")
parser.add_argument("texts", nargs="+")
parser.add_argument("--artifact", default="litert-fp32")
arguments = parser.parse_args()


def read(name: str) -> dict:
    return json.loads((arguments.bundle / name).read_text(encoding="utf-8"))


config, limits, manifest = read("config.json"), read("tokenizer_config.json"), read("bundle.json")
(entry,) = [artifact for artifact in manifest["artifacts"] if artifact["id"] == arguments.artifact]
# "int64[batch, 16|32|64]": the lengths that the file takes
lengths = sorted(map(int, re.findall(r"\d+", entry["inputs"]["input_ids"].partition("[")[2])))
tokenizer = Tokenizer.from_file(str(arguments.bundle / "tokenizer.json"))
tokenizer.enable_truncation(min(limits["model_max_length"], lengths[-1]))
tokenizer.no_padding()
interpreter = Interpreter(str(arguments.bundle / entry["file"]), num_threads=1)

for text in arguments.texts:
    ids = tokenizer.encode(text).ids
    length = next(length for length in lengths if length >= len(ids))
    padding = length - len(ids)
    inputs = {
        "input_ids": ids + [config["pad_token_id"]] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
        **({"token_type_ids": [0] * length} if "token_type_ids" in entry["inputs"] else {}),
    }
    run = interpreter.get_signature_runner(f"1x{length}")  # rows × tokens
    logits = run(**{name: numpy.array([values], dtype="int32") for name, values in inputs.items()})["logits"][0]
    thresholds = config.get("thresholds")  # multi-label models only: label → smallest probability
    exponentials = numpy.exp(logits - (0 if thresholds else logits.max()))
    probabilities = exponentials / (exponentials + 1 if thresholds else exponentials.sum())
    ranked = [config["id2label"][str(index)] for index in probabilities.argsort()[::-1]]
    above = [label for label in ranked if thresholds and probabilities[config["label2id"][label]] >= thresholds[label]]
    labels = above if thresholds else ranked[:1]
    print(json.dumps({"label": ", ".join(labels), "probability": float(probabilities.max()), "text": text}))
