"""Sets as users bring them: what `edgeformer search` recommends, beside ten lines of scikit-learn and frozen MiniLM.

    python -m benchmarks.own_data measure FOLDER --json FILE [--sets sms,gnad] [--systems search,words] [--device NAME]
    python -m benchmarks.own_data table|rungs FILE
    python -m benchmarks.own_data figure OUT.png FILE

measure: writes each set as a training and a test file into FOLDER, and adds the results to FILE; what FILE has is not
measured again. Every system learns from the training file alone; edgeformer keeps a tenth of it for validation and gets
the test file for its one score. ``search`` has no source, ``search --source minilm`` the encoder of the extra minilm,
``init`` trains the recipe that init drafts. Baselines: logistic regression and linear SVM on TF-IDF of words and word
pairs, or of words and characters, and logistic regression on the vectors of all-MiniLM-L6-v2. SetFit joins where it is
installed. FILE has labels and answers as numbers in the order of ``names``.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline, make_union
from sklearn.svm import LinearSVC
from tabulate import tabulate

from edgeformer.system.host import describe_host, now

OWN = Path(__file__).resolve().parents[2] / "shared" / "data" / "own"
SETFIT_STEPS = 300
Rows = list[tuple[str, str]]


def read(name: str, text: tuple[int, ...], label: int, **options: Any) -> Rows:
    """Read texts, joined from several columns, and labels of a file of the folder ``own``."""
    header, encoding = options.pop("header", True), options.pop("encoding", "utf-8")
    with (OWN / name).open(encoding=encoding, newline="") as file:
        lines = list(csv.reader(file, **options))[1 if header else 0 :]
    return [(" ".join(line[column] for column in text), line[label]) for line in lines if line]


def halves(rows: Rows) -> tuple[Rows, Rows]:
    """Split into 80 % for training and 20 % for the test, stratified by label."""
    train, test = train_test_split(rows, test_size=0.2, random_state=0, stratify=[label for _, label in rows])
    return train, test


SETS: dict[str, Callable[[], tuple[Rows, Rows]]] = {
    "sms": lambda: halves(read("sms_spam_cp1252.csv", (1,), 0, encoding="cp1252")),
    "banking77": lambda: (read("banking77_train.csv", (0,), 1), read("banking77_test.csv", (0,), 1)),
    "emotion": lambda: (read("tweet_emotion_train.csv", (0,), 1), read("tweet_emotion_test.csv", (0,), 1)),
    "agnews": lambda: halves(read("ag_news_7600_no_header.csv", (1, 2), 0, header=False)),
    "gnad": lambda: halves(read("gnad_1028_single_quotes.csv", (1,), 0, header=False, delimiter=";", quotechar="'")),
}


def command(*arguments: str, folder: Path) -> Any:
    """Run an edgeformer command in a folder and return its JSON."""
    process = subprocess.run(
        [sys.executable, "-m", "edgeformer", *arguments, "--json"], cwd=folder, stdout=subprocess.PIPE, check=False
    )
    if process.returncode not in (0, 3):
        raise SystemExit(f"edgeformer {' '.join(arguments)} ended with exit code {process.returncode}")
    return json.loads(process.stdout)


def answer_test(folder: Path, run: str, artifact: str) -> list[str]:
    """Return the label of every test text, by an artifact of a run."""
    options = ("--file", "test.csv", "--text", "text", "--artifact", artifact, "--output", "answers.csv")
    subprocess.run([sys.executable, "-m", "edgeformer", "predict", run, *options], cwd=folder, check=True)
    with (folder / "answers.csv").open(encoding="utf-8", newline="") as file:
        return [row["label"] for row in csv.DictReader(file)]


def search(folder: Path, *options: str) -> dict[str, Any]:
    """Search, and answer the test file by the recommended artifact."""
    name = "with-source" if "--source" in options else "no-source"
    started = time.monotonic()
    result = command("search", "train.csv", "--test", "test.csv", "--name", name, *options, folder=folder)
    minutes = (time.monotonic() - started) / 60
    picked = result["search"]["candidates"][result["search"]["pick"]]
    model, _, artifact = picked["artifact"].partition("/")
    rungs = [
        {key: entry[key] for key in ("name", "status", "reason", "score", "predicted_low_s", "predicted_high_s",
                                     "train_s", "deploy_s")}
        for entry in result["models"]
    ]  # fmt: skip
    return {
        "model": picked["artifact"], "bytes": picked["size_bytes"], "ms": picked["latency_ms"], "minutes": minutes,
        "rungs": rungs, "answers": answer_test(folder, f"{name}-{model}", artifact),
    }  # fmt: skip


def drafted(folder: Path) -> dict[str, Any]:
    """Train and export the recipe that init drafts."""
    started = time.monotonic()
    draft = command("init", "train.csv", "--test", "test.csv", "--force", folder=folder)
    run = command("train", draft["recipe"], folder=folder)["run"]
    minutes = (time.monotonic() - started) / 60
    exported = command("export", run, "--int8", "--keep-going", folder=folder)["artifacts"]
    artifact = next(entry for entry in reversed(exported) if entry["status"] == "built")
    answers = answer_test(folder, run, artifact["id"])
    return {"model": run, "bytes": artifact["size_bytes"], "minutes": minutes, "answers": answers}


def fitted(train: Rows, test: Rows, vectors: Any, classifier: Any) -> dict[str, Any]:
    """Fit a scikit-learn pipeline and answer the test texts; its size is that of its coefficients in FP32."""
    started = time.monotonic()
    pipeline = make_pipeline(vectors, classifier).fit(*map(list, zip(*train, strict=True)))
    minutes = (time.monotonic() - started) / 60
    started = time.monotonic()
    answers = [str(label) for label in pipeline.predict([text for text, _ in test])]
    ms = 1000 * (time.monotonic() - started) / len(test)
    return {"bytes": 4 * int(pipeline[-1].coef_.size), "ms": ms, "minutes": minutes, "answers": answers}


def words() -> Any:
    """Words and word pairs."""
    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)


def words_and_characters() -> Any:
    """Words, word pairs, and one to five characters within words."""
    characters = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 5), sublinear_tf=True, min_df=2)
    return make_union(words(), characters)


def minilm(train: Rows, test: Rows) -> dict[str, Any]:
    """Logistic regression on the vectors of all-MiniLM-L6-v2."""
    from sentence_transformers import SentenceTransformer

    from edgeformer.data.source_folder import SourceFolder

    started = time.monotonic()
    encoder = SentenceTransformer(str(SourceFolder.open("minilm").root), device="cpu")
    vectors = encoder.encode([text for text, _ in train])
    classifier = LogisticRegression(C=10, max_iter=2000).fit(vectors, [label for _, label in train])
    minutes = (time.monotonic() - started) / 60
    answers = [str(label) for label in classifier.predict(encoder.encode([text for text, _ in test]))]
    return {"bytes": 4 * sum(p.numel() for p in encoder.parameters()), "minutes": minutes, "answers": answers}


def setfit(train: Rows, test: Rows) -> dict[str, Any]:
    """SetFit on all-MiniLM-L6-v2, for SETFIT_STEPS batches of 16 pairs, because n texts have n² pairs."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    from edgeformer.data.source_folder import SourceFolder

    started = time.monotonic()
    model = SetFitModel.from_pretrained(str(SourceFolder.open("minilm").root))
    data = Dataset.from_list([{"text": text, "label": label} for text, label in train])
    Trainer(model=model, args=TrainingArguments(max_steps=SETFIT_STEPS), train_dataset=data).train()
    minutes = (time.monotonic() - started) / 60
    return {"minutes": minutes, "answers": [str(label) for label in model.predict([text for text, _ in test])]}


SYSTEMS: dict[str, Callable[[Path, Rows, Rows], dict[str, Any]]] = {
    "init": lambda folder, train, test: drafted(folder),
    "search": lambda folder, train, test: search(folder, "--no-source"),
    "search --source minilm": lambda folder, train, test: search(folder, "--source", "minilm"),
    "words, LR": lambda _, train, test: fitted(train, test, words(), LogisticRegression(C=10, max_iter=2000)),
    "words, SVM": lambda _, train, test: fitted(train, test, words(), LinearSVC()),
    "words + characters, LR": lambda _, train, test: fitted(
        train, test, words_and_characters(), LogisticRegression(C=10, max_iter=2000)
    ),
    "words + characters, SVM": lambda _, train, test: fitted(train, test, words_and_characters(), LinearSVC()),
    "frozen MiniLM, LR": lambda _, train, test: minilm(train, test),
    **({"SetFit": lambda _, train, test: setfit(train, test)} if find_spec("setfit") else {}),
}


def measure(folder: Path, file: Path, sets: list[str], systems: list[str]) -> None:
    """Measure every system on every set, and save after each."""
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"sets": {}}
    record |= {"date": now(), "host": describe_host()}
    for name in sets:
        train, test = SETS[name]()
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for part, rows in (("train.csv", train), ("test.csv", test)):
            with (place / part).open("w", encoding="utf-8", newline="") as target:
                csv.writer(target).writerows([("text", "label"), *rows])
        names = sorted({label for _, label in test})
        labels = [names.index(label) for _, label in test]
        entry = {"train": len(train), "names": names, "labels": labels, "systems": {}}
        results = record["sets"].setdefault(name, entry)["systems"]
        for system in (system for system in systems if system not in results):
            result = SYSTEMS[system](place, train, test)
            result["answers"] = [names.index(label) if label in names else -1 for label in result["answers"]]
            results[system] = {**result, "measured": now(), "cpu": describe_host()["cpu"]}
            hits = np.mean([a == b for a, b in zip(result["answers"], labels, strict=True)])
            print(f"{name}, {system}: {hits:.4f}, {result['minutes']:.1f} min", flush=True)
            file.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")


def figures(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row per set and system: accuracy, macro F1, bytes, ms, minutes, and p against the best baseline."""
    for name, entry in record["sets"].items():
        labels = np.array(entry["labels"])
        right = {system: np.array(result["answers"]) == labels for system, result in entry["systems"].items()}
        baselines = [system for system in right if system != "init" and not system.startswith("search")]
        best = max(baselines, key=lambda system: right[system].mean(), default=None)
        for system, result in entry["systems"].items():
            row = {
                "set": name, "system": system, "accuracy": float(right[system].mean()),
                "f1": float(f1_score(labels, result["answers"], average="macro")),
                **{key: result.get(key) for key in ("model", "bytes", "ms", "minutes")},
                "error": float(np.sqrt(right[system].mean() * (1 - right[system].mean()) / len(labels))),
                "is_best": system == best, "p": None,
            }  # fmt: skip
            if best is not None and system not in baselines:
                wins, losses = int((right[system] & ~right[best]).sum()), int((right[best] & ~right[system]).sum())
                row["p"] = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
            yield row


def table(record: dict[str, Any]) -> str:
    """Return the results as a Markdown table; the best baseline of each set is bold."""
    rows = []
    for row in figures(record):
        score = f"{row['accuracy']:.3f}"
        rows.append([
            row["set"], row["system"], row["model"] or "", f"**{score}**" if row["is_best"] else score,
            f"{row['f1']:.3f}", "" if row["p"] is None else f"{row['p']:.2g}",
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f}", f"{row['minutes']:.1f}",
        ])  # fmt: skip
    headers = ["set", "system", "recommended", "accuracy", "macro F1", "p", "MB", "minutes"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def rungs(record: dict[str, Any]) -> str:
    """Return predicted and real training times of the models that searches trained."""
    rows, ratios = [], []
    for name, entry in record["sets"].items():
        for system, result in entry["systems"].items():
            for rung in result.get("rungs", []):
                if rung["train_s"] is not None and rung["predicted_low_s"] is not None:
                    predicted = float(np.sqrt(rung["predicted_low_s"] * rung["predicted_high_s"]))
                    ratios.append(max(predicted / rung["train_s"], rung["train_s"] / predicted))
                    rows.append([name, system, rung["name"], f"{rung['score']:.3f}", f"{predicted / 60:.1f}",
                                 f"{rung['train_s'] / 60:.1f}"])  # fmt: skip
    headers = ["set", "search", "model", "validation score", "predicted minutes", "real minutes"]
    text = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    return f"{text}\n\nMedian factor between predicted and real minutes: {np.median(ratios):.2f}"


def figure(out: Path, record: dict[str, Any]) -> None:
    """Draw score against bytes, one panel per set."""
    import matplotlib.pyplot as plt

    names = [*record["sets"]]
    _, panels = plt.subplots(1, len(names), figsize=(3.2 * len(names), 3.6), squeeze=False, layout="constrained")
    for panel, name in zip(panels[0], names, strict=True):
        for number, row in enumerate(row for row in figures(record) if row["set"] == name and row["bytes"]):
            own = row["system"].startswith(("search", "init"))
            panel.errorbar(row["bytes"] / 1e6, row["accuracy"], row["error"], fmt="o" if own else "s",
                           color=f"C{number % 10}", label=row["system"])  # fmt: skip
        panel.set(xscale="log", title=name, xlabel="MB")
    panels[0][0].set_ylabel("accuracy on test rows, ± standard error")
    panels[0][-1].legend(fontsize=6)
    plt.savefig(out, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "table", "rungs", "figure"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="separated by semicolons")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        measure(arguments.paths[0], arguments.json, arguments.sets.split(","), arguments.systems.split(";"))
        return
    record = json.loads(arguments.paths[-1].read_text(encoding="utf-8"))
    if arguments.action == "figure":
        figure(arguments.paths[0], record)
    else:
        print({"table": table, "rungs": rungs}[arguments.action](record))


if __name__ == "__main__":
    main()
