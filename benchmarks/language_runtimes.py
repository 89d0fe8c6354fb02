"""Language models in llama.cpp, ONNX Runtime, OpenVINO and torch: equal text, bytes, tokens per second, memory.

    python -m benchmarks.language_runtimes parity FILE RUN…           # acceptance 1; trained or imported decoders
    python -m benchmarks.language_runtimes speed FILE RUN             # acceptance 2; an imported SmolLM2
    python -m benchmarks.language_runtimes search FILE RUN            # what `profile --choose` picks of an exported run
    python -m benchmarks.language_runtimes loops FILE                 # acceptance 3; random weights
    python -m benchmarks.language_runtimes folds FILE RUN             # a model like an imported SmolLM2, and its folds
    python -m benchmarks.language_runtimes table FILE NAME            # bytes, greedy, speed, where, loops …

FILE is one JSON with a key per command; a command that was interrupted goes on with what is missing. Delete a key to
measure it again. Every variant is a process that stays open; variants of one comparison take turns in every round,
and ratios are those of one round. pp512 reads a prompt in one call, tg128 writes 128 tokens one by one, as in
llama-bench.
--work: folder for graphs and GGUF files (gigabytes).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tabulate import tabulate

from benchmarks.ways import Way, environment, serve
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now

POSITIONS, PROMPT, WRITTEN, TIE = 1000, 16, 50, 0.02
"""Greedy positions that are compared, of prompts of so many tokens and so many written ones; a gap below is a tie."""
LOOPS = (1, 2, 4, 8)
SIZES: dict[str, Any] = {"kind": "decoder", "vocab_size": 8192, "max_positions": 1024, "exits": ()}
BYTES_SHAPE = {"hidden_size": 1024, "layers": 5, "heads": 16, "kv_heads": 4, "ffn_size": 2816}
SHAPES: dict[str, dict[str, int]] = {
    "inside": {"hidden_size": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 768},
    "between": {"hidden_size": 768, "layers": 2, "heads": 12, "kv_heads": 4, "ffn_size": 2048},
    "outside": BYTES_SHAPE,
}
"""Name → looped block: with 8 loops the stacked model is inside the cache, only the block is, or neither."""
FOLDS = (1, 2, 3)
"""Iterations of the folds, of which 1 is the whole model."""
SPEED = {
    "llama.cpp Q8_0": ("llamacpp", "int8.gguf"),
    "ONNX Runtime INT8": ("onnxruntime", "int8.onnx"),
    "OpenVINO INT8": ("openvino-cpu", "int8.onnx"),
    "llama.cpp Q4_0": ("llamacpp", "int4.gguf"),
    "ONNX Runtime INT4": ("onnxruntime", "int4.onnx"),
    "llama.cpp F16": ("llamacpp", "fp16.gguf"),
    "ONNX Runtime FP32": ("onnxruntime", "fp32.onnx"),
    "OpenVINO FP32": ("openvino-cpu", "fp32.onnx"),
    "OpenVINO bf16": ("openvino-cpu-bf16", "fp32.onnx"),
    "torch FP32": ("torch", ""),
}
"""Variant → runtime or provider, and file."""
RIVALS = {"ONNX Runtime INT8": "llama.cpp Q8_0", "ONNX Runtime INT4": "llama.cpp Q4_0"}
TARGETS = {"tg": 0.9, "pp": 0.8}


# The child: one opened model that computes on request.


def child(runtime: str, file: str, threads: int) -> Callable[[Any], Any]:
    """Open a model; a request (kind, tokens) is answered by the seconds that it took, ``memory`` by bytes."""
    from edgeformer.runtimes.decoder import Decoder, FullDepthEngine

    process = psutil.Process()
    make: Callable[[], Any]
    if runtime == "torch":
        import torch

        from edgeformer.run import Run

        torch.set_num_threads(threads)
        run = Run.open(Path(file))
        before, make = process.memory_info().rss, lambda: run.decoder("torch-cpu")
    elif runtime == "llamacpp":
        from edgeformer.runtimes.llamacpp.library import library
        from edgeformer.runtimes.llamacpp.session import LlamaEngine, LlamaSession

        library()
        before = process.memory_info().rss
        llama = LlamaSession(Path(file), threads, 1024)
        make = lambda: Decoder(LlamaEngine(llama, 1))  # noqa: E731
    else:
        session: Any
        if runtime == "onnxruntime":
            from edgeformer.runtimes.onnxruntime.session import OnnxSession

            before = process.memory_info().rss
            session = OnnxSession(Path(file), threads=threads, in_turns=True)
        else:
            from edgeformer.runtimes.openvino.session import OpenVINOSession, core

            core()
            before = process.memory_info().rss
            session = OpenVINOSession(Path(file), runtime, threads)
        make = lambda: Decoder(FullDepthEngine(session, 1))  # noqa: E731
    ids = np.random.default_rng(0).integers(0, 8000, 1024).tolist()

    def write(count: int) -> None:
        decoder = make()
        for token in ids[:count]:
            decoder.read([token])
            decoder.advance(decoder.loops)
            decoder.logits(decoder.loops)

    def answer(request: tuple[str, int]) -> float:
        kind, count = request
        if kind == "memory":
            return process.memory_info().rss - before
        decoder = make() if kind == "pp" else None
        start = time.perf_counter()
        if decoder is None:
            write(count)
        else:
            decoder.read(ids[:count])
            decoder.advance(decoder.loops)
            decoder.logits(decoder.loops)
        return time.perf_counter() - start

    write(4)
    return answer


# Files.


def decoder_of(**sizes: Any) -> Any:
    """Return a decoder with random weights, the same in every process."""
    import torch

    from edgeformer.models.decoder import DecoderConfig
    from edgeformer.models.decoder.model import DecoderModel

    torch.manual_seed(0)
    return DecoderModel(DecoderConfig(**{**SIZES, **sizes})).eval()


def write_files(folder: Path, model: Any, names: Sequence[str], bundle: Path | None = None) -> None:
    """Write missing files: fp32.onnx, int8.onnx and int4.onnx decode graphs, fp16.gguf, int8.gguf and int4.gguf."""
    import onnx_ir

    from edgeformer.export.quantize import quantize_blocks
    from edgeformer.models.decoder.adapter import ADAPTER
    from edgeformer.runtimes.llamacpp.builder import write_gguf

    folder.mkdir(parents=True, exist_ok=True)
    absent = [name for name in names if not (folder / name).is_file()]
    graph = (
        ADAPTER.trace(model, ("input_ids",), steps=False).decode if any(n.endswith("onnx") for n in absent) else None
    )
    for name in absent:
        precision, _, kind = name.partition(".")
        temporary = folder / f"new-{name}"
        if kind == "gguf":
            write_gguf(temporary, bundle or tokenizer_folder(folder), model.gguf_contents(), precision)  # type: ignore[arg-type]
        else:
            assert graph is not None
            written = graph if precision == "fp32" else quantize_blocks(graph, 8 if precision == "int8" else 4)
            onnx_ir.save(written, temporary)
        temporary.rename(folder / name)


def tokenizer_folder(folder: Path) -> Path:
    """Return a folder with the tokenizer of a random model: bytes, and one merge, because llama.cpp needs one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if not (folder / "config.json").is_file():
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, [("t", "h")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "config.json").write_text('{"boundary_token_id": 0}')
    return folder


# Commands.


def measure_resident(path: Path) -> int:
    """Return the memory that the weights of a GGUF file take in a process of their own, its mapped pages included."""
    script = f"from benchmarks.{Path(__file__).stem} import print_resident; print_resident()"
    return int(subprocess.check_output([sys.executable, "-c", script, str(path)]))


def print_resident() -> None:
    """Print what :func:`measure_resident` returns: of a second load, because the first one allocates more."""
    from edgeformer.runtimes.llamacpp.library import library

    before = after = 0
    for _ in range(2):
        before = psutil.Process().memory_info().rss
        model = library().llama_model_load_from_file(sys.argv[1].encode(), library().llama_model_default_params())
        after = psutil.Process().memory_info().rss
        if not model:
            sys.exit(f"{sys.argv[1]}: llama.cpp cannot open it")
        library().llama_model_free(model)
    print(after - before)


def measure_parity(document: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Bytes and memory by loops, and the greedy tokens of llama.cpp and torch."""
    rows = document.setdefault("bytes", [])
    for loops in LOOPS:
        if all(row["loops"] != loops for row in rows):
            folder = options.work / f"bytes-{loops}"
            write_files(folder, decoder_of(**BYTES_SHAPE, iterations=loops), ["fp16.gguf"])
            size = (folder / "fp16.gguf").stat().st_size
            resident = measure_resident(folder / "fp16.gguf")
            rows.append({"loops": loops, "bytes": size, "resident_bytes": resident})
            save()
    greedy = document.setdefault("greedy", [])
    for run in options.runs:
        if all(row["run"] != run.name for row in greedy):
            greedy.append(greedy_record(run, options.work / run.name, options.positions))
            save()


def greedy_record(folder: Path, work: Path, positions: int) -> dict[str, Any]:
    """Compare torch's greedy tokens with those of llama.cpp behind the same tokens, in F16."""
    from edgeformer.data.encoding import PlainText
    from edgeformer.data.synthetic import PARAGRAPHS
    from edgeformer.models.weights import load_model
    from edgeformer.run import Run
    from edgeformer.runtimes.llamacpp.library import Llama

    run = Run.open(folder)
    model: Any = load_model(folder)
    write_files(work, model, ["fp16.gguf"], folder / "model")
    plain = PlainText(run.reader().tokenizer)
    text = [token for paragraph in PARAGRAPHS for token in plain.encode(paragraph).ids]
    llama = Llama(work / "fp16.gguf", 1, 512)
    compared = equal = ties = 0
    worst = 0.0
    for start in range(0, positions // WRITTEN * 3, 3):
        ids = [plain.boundary, *(text[(start + place) % len(text)] for place in range(PROMPT))]
        decoder, logits = run.decoder("torch-cpu"), []
        unread = ids
        for _ in range(WRITTEN):
            decoder.read(unread)
            decoder.advance(decoder.loops)
            logits.append(decoder.logits(decoder.loops))
            unread = [int(logits[-1].argmax())]
            ids = [*ids, *unread]
        llama.truncate(0)
        theirs = llama.read(ids[:-1], every=True)[-WRITTEN:]
        for torch_logits, llama_logits in zip(logits, theirs, strict=True):
            second, first = np.sort(torch_logits)[-2:]
            if first - second < TIE:
                ties += 1
                continue
            compared += 1
            equal += int(torch_logits.argmax() == llama_logits.argmax())
            worst = max(worst, float(np.abs(log_softmax(torch_logits) - log_softmax(llama_logits)).max()))
    llama.close()
    return {
        "run": folder.name, "loops": model.loops, "positions": compared, "ties": ties, "equal": equal,
        "largest_logprob_difference": worst,
    }  # fmt: skip


def log_softmax(logits: Any) -> Any:
    """Return log-probabilities [V]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def measure_speed(document: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Time every variant in turns, per number of threads, and the operators of our quantised graphs."""
    from edgeformer.models.weights import load_model

    (folder,) = options.runs
    work = options.work / folder.name
    files = sorted({file for _, file in SPEED.values() if file})
    write_files(work, load_model(folder), files, folder / "model")
    speed = document.setdefault(
        "speed", {"run": folder.name, "pp": options.prompt, "tg": options.tokens, "threads": {}}
    )
    speed["bytes"] = {name: (work / file).stat().st_size for name, (_, file) in SPEED.items() if file}
    for threads in options.threads:
        if str(threads) in speed["threads"]:
            continue
        with ExitStack() as stack:
            ways = {
                name: open_way(name, runtime, work / file if file else folder, threads, stack)
                for name, (runtime, file) in SPEED.items()
            }
            seconds: dict[str, dict[str, list[float]]] = {name: {"pp": [], "tg": []} for name in ways}
            for _ in range(options.rounds):
                for kind, count in (("pp", options.prompt), ("tg", options.tokens)):
                    for name, way in ways.items():
                        if not way.reason:
                            seconds[name][kind].append(way.ask((kind, count)))
            speed["threads"][str(threads)] = {
                name: seconds[name] if not way.reason else {"unavailable": way.reason} for name, way in ways.items()
            }
        save()
    where = document.setdefault("where", {})
    for name in RIVALS:
        if name not in where:
            where[name] = operators(work / SPEED[name][1], options.tokens // 2)
            save()


def open_way(name: str, runtime: str, file: Path, threads: int, stack: ExitStack) -> Way:
    """Start the child of a variant."""
    command = [sys.executable, "-m", "benchmarks.language_runtimes", "child", runtime, str(file), str(threads)]
    return Way(name, command, environment(threads, torch_alone=runtime == "torch"), stack)


def operators(path: Path, past: int, calls: int = 40) -> dict[str, float]:
    """Return operator → microseconds per token, behind ``past`` tokens, by ONNX Runtime's profiler with one thread."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.enable_profiling = 1, True
    settings.profile_file_prefix = str(path.with_suffix(".profile"))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    feed = {
        value.name: np.array([[5]]) if value.name == "input_ids"
        else np.zeros((1, value.shape[1], past, value.shape[3]), np.float32)
        for value in session.get_inputs()
    }  # fmt: skip
    for _ in range(calls):
        session.run(None, feed)
    record = Path(session.end_profiling())
    spent = Counter[str]()
    for event in json.loads(record.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
        elif event["name"] == "model_run":
            spent["whole call"] += event["dur"]
    record.unlink()
    return {name: spent_us / calls for name, spent_us in spent.most_common(8)}


def measure_search(document: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Let `profile --choose` choose among the artifacts and runtimes of an exported run."""
    (folder,) = options.runs
    command = [sys.executable, "-m", "edgeformer", "profile", str(folder), "--device", "host", "--choose", "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if process.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    search = json.loads(process.stdout)["search"]
    keys = ("artifact", "provider", "score", "latency_ms", "size_bytes", "feasible", "reason")
    candidates = [{key: candidate[key] for key in keys} for candidate in search["candidates"]]
    pick = None if search["pick"] is None else candidates[search["pick"]]
    document["search"] = {"run": folder.name, "pick": pick, "reason": search["reason"], "candidates": candidates}
    save()


def measure_loops(document: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Time a looped model beside a stacked one of equal depth and width, and take their memory."""
    rows = document.setdefault("loops", [])
    levels = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    document["last_level_cache"] = levels[-1].read_text().strip() if levels else None
    for shape, loops, runtime in [(s, n, r) for s in SHAPES for n in LOOPS for r in ("llamacpp", "onnxruntime")]:
        if any((row["shape"], row["loops"], row["runtime"]) == (shape, loops, runtime) for row in rows):
            continue
        sizes, name = SHAPES[shape], "int8.gguf" if runtime == "llamacpp" else "int8.onnx"
        models = {
            "looped": {**sizes, "iterations": loops},
            "stacked": {**sizes, "iterations": 1, "layers": sizes["layers"] * loops},
        }
        row: dict[str, Any] = {"shape": shape, "loops": loops, "runtime": runtime}
        with ExitStack() as stack:
            ways = {}
            for kind, changes in models.items():
                folder = options.work / f"{shape}-{kind}-{loops}"
                write_files(folder, decoder_of(**changes), [name])
                ways[kind] = open_way(kind, runtime, folder / name, options.threads[0], stack)
                if ways[kind].reason:
                    raise SystemExit(f"{folder / name}: {ways[kind].reason}")
                row[kind] = {"bytes": (folder / name).stat().st_size, "seconds": []}
            for _ in range(options.rounds):
                for kind, way in ways.items():
                    row[kind]["seconds"].append(way.ask(("tg", options.tokens)))
            for kind, way in ways.items():
                row[kind]["memory_bytes"] = way.ask(("memory", 0))
        for kind in models:  # gigabytes
            (options.work / f"{shape}-{kind}-{loops}" / name).unlink()
        rows.append({**row, "tokens": options.tokens, "threads": options.threads[0]})
        save()


def measure_folds(document: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Time a model of the run's sizes and its folds, with random weights in eight bits, all in turns."""
    from edgeformer.models import read_run_recipe

    (folder,) = options.runs
    sizes = read_run_recipe(folder).model.model_dump()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ways = []
        for iterations in FOLDS:
            work = options.work / f"fold-{iterations}"
            layers = sizes["layers"] // iterations
            model = decoder_of(**{**sizes, "layers": layers, "iterations": iterations, "fold": None})
            write_files(work, model, ["int8.gguf", "int8.onnx"], folder / "model")
            for runtime, name in (("llamacpp", "int8.gguf"), ("onnxruntime", "int8.onnx")):
                ways.append(open_way(f"{name} × {iterations}", runtime, work / name, options.threads[0], stack))
                if ways[-1].reason:
                    raise SystemExit(f"{work / name}: {ways[-1].reason}")
                rows.append({"layers": layers, "iterations": iterations, "runtime": runtime,
                             "bytes": (work / name).stat().st_size, "pp": [], "tg": []})  # fmt: skip
        for _ in range(options.rounds):
            for kind, count in (("pp", options.prompt), ("tg", options.tokens)):
                for row, way in zip(rows, ways, strict=True):
                    row[kind].append(way.ask((kind, count)))
    document["folds"] = {"run": folder.name, "threads": options.threads[0], "pp": options.prompt, "tg": options.tokens,
                         "rows": rows}  # fmt: skip
    save()


# Tables.

RUNTIMES = {"llamacpp": "llama.cpp Q8_0", "onnxruntime": "ONNX Runtime INT8"}


def ratio_text(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """``1.07 (1.02–1.12)``: how many times as fast, median and quartiles over rounds."""
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return f"{statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})"


def table(document: dict[str, Any], name: str) -> str:
    """Markdown."""
    header: list[str] = []
    rows: list[list[Any]] = []
    if name == "bytes":
        header = ["loops", "file, bytes", "weights in memory / file"]
        rows = [[r["loops"], f"{r['bytes']:,}", f"{r['resident_bytes'] / r['bytes']:.3f}"] for r in document["bytes"]]
    elif name == "greedy":
        header = ["model", "loops", "positions", "ties left out", "equal", "largest difference in log-probability"]
        for r in document["greedy"]:
            share = f"{r['equal'] / r['positions']:.2%}"
            rows.append([r["run"], r["loops"], f"{r['positions']:,}", r["ties"], share,
                         f"{r['largest_logprob_difference']:.3f}"])  # fmt: skip
    elif name == "speed":
        speed = document["speed"]
        header = ["variant", "MB", "threads", f"pp{speed['pp']}", "/ llama.cpp", f"tg{speed['tg']}", "/ llama.cpp"]
        for threads, variants in speed["threads"].items():
            for variant, seconds in variants.items():
                if "unavailable" in seconds:
                    continue
                size = f"{speed['bytes'][variant] / 1e6:.0f}" if variant in speed["bytes"] else "–"
                row = [variant, size, threads]
                for kind in ("pp", "tg"):
                    rival = variants.get(RIVALS.get(variant, ""))
                    row.append(f"{speed[kind] / statistics.median(seconds[kind]):.1f}")
                    row.append(ratio_text(seconds[kind], rival[kind]) if rival else "")
                rows.append(row)
    elif name == "where":
        header = ["variant", "operator", "ms per token", "share"]
        for variant, spent in document["where"].items():
            whole = spent["whole call"]
            rows += [[variant, operator, f"{us / 1000:.2f}", f"{us / whole:.0%}"] for operator, us in spent.items()]
    elif name == "folds":
        folds = document["folds"]
        header = ["layers", "runtime", "MB", f"pp{folds['pp']}", "/ whole", f"tg{folds['tg']}", "/ whole"]
        whole = {r["runtime"]: r for r in folds["rows"] if r["iterations"] == 1}
        for r in folds["rows"]:
            row = [f"{r['layers']} × {r['iterations']}", RUNTIMES[r["runtime"]], f"{r['bytes'] / 1e6:.0f}"]
            for kind in ("pp", "tg"):
                row.append(f"{folds[kind] / statistics.median(r[kind]):.1f}")
                row.append("" if r["iterations"] == 1 else ratio_text(r[kind], whole[r["runtime"]][kind]))
            rows.append(row)
    elif name == "search":
        header = ["artifact", "runtime", "ms", "MB", "refused because"]
        names = {"CPUExecutionProvider": "ONNX Runtime", "openvino-cpu": "OpenVINO", "torch-cpu": "torch",
                 "openvino-cpu-bf16": "OpenVINO, bf16"}  # fmt: skip
        for r in sorted(document["search"]["candidates"], key=lambda r: (not r["feasible"], r["latency_ms"])):
            picked = "**" if r == document["search"]["pick"] else ""
            rows.append([f"{picked}{r['artifact']}{picked}", names.get(r["provider"], r["provider"]),
                         f"{r['latency_ms']:.1f}", f"{r['size_bytes'] / 1e6:.0f}", r["reason"] or ""])  # fmt: skip
    else:
        header = ["weights", "runtime", "loops", "looped, tokens/s", "stacked, tokens/s", "looped / stacked",
                  "files, MB", "memory, MB"]  # fmt: skip
        for r in document["loops"]:
            looped, stacked = r["looped"], r["stacked"]
            rates = [f"{r['tokens'] / statistics.median(side['seconds']):.1f}" for side in (looped, stacked)]
            pairs = [f"{looped[key] / 1e6:.0f} / {stacked[key] / 1e6:.0f}" for key in ("bytes", "memory_bytes")]
            ratio = ratio_text(looped["seconds"], stacked["seconds"])
            rows.append([r["shape"], RUNTIMES[r["runtime"]], r["loops"], *rates, ratio, *pairs])
    text = tabulate(rows, header, tablefmt="github", disable_numparse=True)
    return f"{text}\n\n> {document['search']['reason']}" if name == "search" else text


def main() -> None:
    """Command line."""
    if sys.argv[1:2] == ["child"]:
        runtime, file, threads = sys.argv[2:]
        serve(runtime, lambda: child(runtime, file, int(threads)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Any] = {
        "parity": measure_parity, "speed": measure_speed, "search": measure_search, "loops": measure_loops,
        "folds": measure_folds,
    }  # fmt: skip
    parser.add_argument("command", choices=[*commands, "table"])
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN or NAME")
    parser.add_argument("--work", type=Path, default=Path("artifacts/language-runtimes"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=lambda text: [*map(int, text.split(","))], default=[1, 2])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--positions", type=int, default=POSITIONS)
    options = parser.parse_args()
    options.work = options.work.resolve()
    document: dict[str, Any] = json.loads(options.file.read_text(encoding="utf-8")) if options.file.is_file() else {}
    if options.command == "table":
        print(table(document, str(options.runs[0])))
        return

    def save() -> None:
        document.update(measured=now(), host=describe_host(), versions=library_versions(), code_version=code_version())
        document.setdefault("load", {})[options.command] = psutil.getloadavg()[0]
        temporary = options.file.with_suffix(".new")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(options.file)

    commands[options.command](document, save, options)


if __name__ == "__main__":
    main()
