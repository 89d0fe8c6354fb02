"""Make a bundle of an ONNX file, add INT8, and judge both for a Raspberry Pi 5.

Sizes that the graph leaves open need --shape INPUT=SIZExSIZE; integer inputs need --range INPUT=LOW:HIGH.
"""

import argparse
from pathlib import Path

import edgeformer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", type=Path)
parser.add_argument("--out", type=Path, default=Path("wrapped"))
parser.add_argument("--shape", action="append", default=[], metavar="INPUT=SIZExSIZE")
parser.add_argument("--range", action="append", default=[], metavar="INPUT=LOW:HIGH")
arguments = parser.parse_args()

shapes = {name: tuple(sizes.split("x")) for name, sizes in (text.split("=") for text in arguments.shape)}
shapes = {name: tuple(int(size) if size.isdecimal() else size for size in sizes) for name, sizes in shapes.items()}
ranges = {name: tuple(map(int, bounds.split(":"))) for name, bounds in (text.split("=") for text in arguments.range)}

bundle = edgeformer.import_onnx(arguments.model, arguments.out, shapes=shapes, ranges=ranges)
bundle = bundle.export(int8=True)
verification = bundle.verify()
print("verified" if verification.exit_code == 0 else [check.reason for check in verification.artifacts])

report = bundle.profile("raspberry-pi-5", artifacts=("onnx-int8",), batches=(1,), max_latency_ms=10.0)
for row in report.rows:
    latency = row.latency_ms  # "measured" on this host, "estimated" for the device
    time = latency.reason if latency.p50 is None else f"{latency.p50:.2f} ms"
    print(f"{row.artifact} on {row.where} ({row.phase}): {latency.status}, {time}")
print(f"verdict: {report.verdict.status}")
