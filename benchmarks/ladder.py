"""The models from a quarter of a megabyte to 90: accuracy, bytes and time of a call, in one table.

    python -m benchmarks.ladder collect FILE RUN_FOLDER… [--graphs RUN_FOLDER…]
    python -m benchmarks.ladder time FILE NAME=RUN_FOLDER…
    python -m benchmarks.ladder table FILE EARLIER… --study STUDY…
    python -m benchmarks.ladder figure OUT.png FILE EARLIER… --study STUDY…

collect: exports each run in INT8 and INT4, scores all artifacts on its dev and test sets, and times calls of 1×16 and
1×64 on this host. Runs after --graphs are exported and timed only. FILE keeps earlier runs.
time: measures the times and bytes of NAME, a run of FILE, again, with an exported run that has the same graph.
Runs whose names differ in ``-seedN`` alone are the same model. A run that --max-steps ended is called -stopped.
EARLIER: runs of other pages, as sst2_results.py collected them. STUDY: committed tables, whose scores replace theirs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tabulate import tabulate

from benchmarks.sst2_results import accuracies, by_model, collect, read, spread
from benchmarks.studies.figures import Label, place_labels
from edgeformer.models import read_run_recipe
from edgeformer.run import read_run
from edgeformer.system.host import describe_host, now

ARTIFACTS = ("onnx-fp32", "onnx-int8", "onnx-int4")
LENGTHS = (16, 64)
MODELS = {
    "linear_sst2": "linear",
    "linear_distilled_sst2": "linear, distilled",
    "recurrent_sst2_fast-glue-dev": "light",
    "recurrent_wide_sst2_fast-glue-dev": "wider",
    "baseline_sst2_fast-glue-dev": "baseline",
    "recurrent_distilled_sst2": "light, distilled",
    "folded-teacher-norms-3-epochs": "MiniLM, folded",
    "minilm_sst2-search": "MiniLM of `search`",
    "minilm_sst2": "MiniLM",
}
"""Name of a run without its seed → the model, in the order of the table."""
SAME_GRAPH = {
    "recurrent_sst2_fast-glue-dev": "recurrent_distilled_sst2-twice",
    "recurrent_distilled_sst2": "recurrent_distilled_sst2-twice",
    "recurrent_wide_sst2_fast-glue-dev": "recurrent_wide_sst2_fast-stopped",
    "baseline_sst2_fast-glue-dev": "baseline_sst2_fast-stopped",
    "folded-teacher-norms-3-epochs": "minilm_folded_sst2-stopped",
    "minilm_sst2": "minilm_sst2-stopped",
}
"""A model that was not exported here → the run whose graph differs in nothing but the numbers: its bytes and times."""
STUDIED = {
    "recurrent_sst2_fast-glue-dev": ("distilled", "light"),
    "recurrent_wide_sst2_fast-glue-dev": ("table6", "wider-honest"),
    "baseline_sst2_fast-glue-dev": ("table6", "baseline-honest"),
    "folded-teacher-norms-3-epochs": ("distilled", "folded"),
    "minilm_sst2": ("distilled", "teacher"),
}
"""A model whose scores are those of a study's row."""


def edgeformer(*arguments: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    command = [sys.executable, "-m", "edgeformer", *arguments, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if process.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return dict(json.loads(process.stdout))


def measure(folder: Path, *, is_scored: bool) -> dict[str, Any]:
    """Export, time and maybe score a run; its record is that of sst2_results.py and more."""
    recipe: Any = read_run_recipe(folder)
    edgeformer("export", str(folder), "--int8", "--int4", "--keep-going", "--replace")
    if is_scored:
        for split in ("validation" if recipe.data.split == "sst-test" else "glue-dev", "sst-test"):
            edgeformer("evaluate", str(folder), "--artifact", "all", "--split", split)
    times = measure_times(folder)
    (record,) = collect([folder])
    teacher = getattr(recipe.training, "teacher", None)
    return {
        **record,
        "run": re.sub(r"-\d{3}$", "", folder.name) + ("-stopped" if read_run(folder).reason else ""),
        "seed": recipe.seed,
        "teacher": None if teacher is None else Path(teacher).name,
        "distillation": None if teacher is None else recipe.training.distillation.model_dump(),
        "times": times,
    }


def measure_times(folder: Path) -> list[dict[str, Any]]:
    """Return the medians of an exported run's artifacts on this host."""
    timed = (
        "profile",
        str(folder),
        "--device",
        "host",
        "--batch",
        "1",
        "--seq",
        ",".join(map(str, LENGTHS)),
        "--runtime",
        "onnxruntime",
    )
    return [
        {
            "artifact": row["artifact"],
            "seq": row["seq"],
            "ms": row["latency_ms"]["p50"],
            "stable": row["latency_ms"]["stable"],
        }
        for row in edgeformer(*timed)["rows"]
        if row["phase"] == "steady" and row["where"] == "host" and row["latency_ms"]["p50"] is not None
    ]


@dataclass(frozen=True)
class Step:
    """A model of the ladder: its runs, and the artifacts and times of its graph."""

    title: str
    parameters: int
    sizes: dict[str, int]  # artifact → bytes
    times: dict[tuple[str, int], dict[str, Any]]  # artifact and tokens → row
    accuracy: dict[str, str]  # set → text; sst-test also for INT8
    both: tuple[float, float] | None  # accuracy on sst-test in FP32 and INT8, of the runs that have both
    seeds: int

    def points(self) -> list[tuple[str, float, float, bool]]:
        """Return artifact, milliseconds at the longest of LENGTHS, accuracy on sst-test, whether the time is stable.

        FP32 and INT8 where the same runs have both scores, else FP32 alone with the mean over all seeds.
        """
        scores = self.both or (float(self.accuracy["sst-test"].split()[0]),)
        rows = [(artifact, self.times.get((artifact, LENGTHS[-1]))) for artifact in ARTIFACTS[: len(scores)]]
        return [
            (artifact, row["ms"], score, row["stable"])
            for (artifact, row), score in zip(rows, scores, strict=True)
            if row is not None
        ]


def steps(records: list[dict[str, Any]], earlier: list[dict[str, Any]], studies: list[dict[str, Any]]) -> list[Step]:
    """Return the models in the order of the table."""
    studied = {(study["study"], row["run"], row["at"]): row["cells"] for study in studies for row in study["rows"]}
    measured, published = by_model(records), by_model(earlier)
    ladder = []
    for name, title in MODELS.items():
        runs = measured.get(name) or published.get(name) or []
        graphs = measured.get(SAME_GRAPH.get(name, name), [])[:1]
        if not (runs or graphs):
            continue
        built = [item for graph in graphs for item in graph["artifacts"] if item["status"] == "built"]
        times = {(row["artifact"], row["seq"]): row for graph in graphs for row in graph.get("times", ())}
        accuracy = {
            "glue-dev": spread([(run["tests"].get("glue-dev") or run["validation"])["accuracy"] for run in runs]),
            "sst-test": spread(accuracies(runs, "torch", "sst-test")),
            "sst-test, INT8": spread(accuracies(runs, "onnx-int8", "sst-test")),
        }
        pairs = [tuple(accuracies([run], artifact, "sst-test") for artifact in ARTIFACTS[:2]) for run in runs]
        pairs = [pair for pair in pairs if all(pair)]
        both = (mean(pair[0][0] for pair in pairs), mean(pair[1][0] for pair in pairs)) if pairs else None
        seeds = len(runs)
        if name in STUDIED:
            study, row = STUDIED[name]
            cells = {split: studied[study, row, split] for split in ("glue-dev", "sst-test")}
            accuracy |= {split: _said(cell["accuracy"]) for split, cell in cells.items()}
            seeds = cells["sst-test"]["accuracy"]["n"]
        sizes = {item["id"]: item["size_bytes"] for item in built}
        parameters = (runs or graphs)[0]["parameters"]
        ladder.append(Step(title, parameters, sizes, times, accuracy, both, seeds))
    return ladder


def _said(cell: dict[str, Any]) -> str:
    return f"{cell['mean']:.4f}" + (f" ± {cell['sd']:.4f}" if cell["sd"] is not None else "")


def table(ladder: list[Step]) -> str:
    """Markdown: a line per model."""
    rows = []
    for step in ladder:
        times = [step.times.get(("onnx-int8", length)) for length in LENGTHS]
        rows.append([
            step.title, f"{step.parameters:,}", step.seeds, *step.accuracy.values(),
            *(f"{step.sizes[artifact] / 1e6:.2f}" if artifact in step.sizes else "–" for artifact in ARTIFACTS),
            *("–" if row is None else f"{'' if row['stable'] else '≤ '}{row['ms']:.3f}" for row in times),
        ])  # fmt: skip
    header = ["model", "parameters", "seeds", *ladder[0].accuracy]
    header += [f"{name.removeprefix('onnx-').upper()}, MB" for name in ARTIFACTS]
    header += [f"INT8, ms 1×{length}" for length in LENGTHS]
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def figure(ladder: list[Step], path: Path) -> None:
    """Accuracy on sst-test against the time of a call, in FP32 and INT8; the area is the file's size."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    displayed, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    labels: list[Label] = []
    for number, step in enumerate(ladder):
        points, colour = step.points(), f"C{number}"
        axes.plot([ms for _, ms, _, _ in points], [score for _, _, score, _ in points], color=colour, alpha=0.5)
        for artifact, ms, score, is_stable in points:
            size, face = step.sizes[artifact] / 1e6, colour if artifact == "onnx-fp32" else "white"
            area = 12 + 5 * size  # in square points; 12, so that the smallest are seen
            look: dict[str, Any] = {"edgecolor": "black" if face == colour else colour, "alpha": 0.7, "zorder": 2}
            axes.scatter(ms, score, s=area, facecolor=face, linestyle="-" if is_stable else ":", **look)
            name = step.title if face == colour else "INT8"
            labels.append((f"{name}, {size:.1f} MB", (ms, score), area**0.5 / 2))
    keys = {"FP32": ("grey", "-"), "INT8": ("white", "-"), "time not stable while measured": ("white", ":")}
    for text, (face, line) in keys.items():
        axes.scatter([], [], s=80, facecolor=face, edgecolor="black", linestyle=line, label=text)
    axes.plot([], [], color="grey", label="the same runs (else mean over all seeds)")
    axes.set(xscale="log", xlabel=f"milliseconds of a call with one text of {LENGTHS[-1]} tokens (logarithmic)")
    axes.set_ylabel("accuracy on sst-test (axis does not start at 0)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.25, 0.12)
    axes.grid(alpha=0.3)
    displayed.legend(loc="outside lower center", ncols=4, fontsize=8, title="area: size of the file", title_fontsize=8)
    displayed.draw_without_rendering()  # so that positions are known
    place_labels(axes, labels)
    displayed.savefig(path, dpi=120)
    plt.close(displayed)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting, timing, printing, drawing = (
        commands.add_parser(name) for name in ("collect", "time", "table", "figure")
    )
    drawing.add_argument("picture", type=Path)
    for command in (collecting, timing, printing, drawing):
        command.add_argument("file", type=Path)
    timing.add_argument("runs", nargs="+", metavar="NAME=RUN_FOLDER")
    collecting.add_argument("--graphs", nargs="*", default=(), type=Path)
    collecting.add_argument("runs", nargs="*", type=Path)
    for command in (printing, drawing):
        command.add_argument("earlier", nargs="+")
        command.add_argument("--study", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    if arguments.command in ("table", "figure"):
        document = json.loads(arguments.file.read_text(encoding="utf-8"))
        studies = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.study]
        ladder = steps(document["runs"], read(arguments.earlier), studies)
        if arguments.command == "table":
            print(table(ladder))
        else:
            figure(ladder, arguments.picture)
        return
    if arguments.command == "time":
        document = json.loads(arguments.file.read_text(encoding="utf-8"))
        by_name = {record["run"]: record for record in document["runs"]}
        for name, _, folder in (run.partition("=") for run in arguments.runs):
            (exported,) = collect([Path(folder)])
            artifacts = {item["id"]: item for item in exported["artifacts"]}
            kept = [item for item in by_name[name]["artifacts"] if item["id"] not in artifacts]
            times = {"times": measure_times(Path(folder)), "artifacts": [*kept, *artifacts.values()]}
            by_name[name].update({**times, "timed": {"measured": now(), "host": describe_host()}})
        arguments.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return
    records = [measure(run, is_scored=True) for run in arguments.runs]
    records += [measure(run, is_scored=False) for run in arguments.graphs]
    earlier = json.loads(arguments.file.read_text(encoding="utf-8"))["runs"] if arguments.file.is_file() else []
    names = {record["run"] for record in records}
    records = [*(record for record in earlier if record["run"] not in names), *records]
    document = {"measured": now(), "host": describe_host(), "runs": records}
    arguments.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
