"""benchmarks/gpu: every row of the checklist runs, at tiny sizes on the CPU, and its figures can be gone on with."""

from __future__ import annotations

import json
import lzma
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import estimates, facts, levers, out_of_memory, six_gigabytes
from benchmarks.gpu import pack as packing
from benchmarks.gpu import session as sessions
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import DONE, FAILED, RESULTS, UNFINISHED, Column, Options, Row, Session, perform
from benchmarks.results_page.gpu import NONE, gpu, table
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.synthetic import SENTENCES
from edgeformer.models import load_recipe
from tests.docs.document import ROOT


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Of a dry run at a commit that nothing has changed since."""
    monkeypatch.setattr(sessions, "code_version", lambda: "0.1.0+0123456789")
    return Options(True, tmp_path / "results", tmp_path / "work", None)


def written(options: Options, row: Row) -> dict[str, object]:
    """The one file of a row."""
    (path,) = (options.out / "dry-run").glob(f"*-{row.topic}.json")
    document: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.topic)
@pytest.mark.slow
def test_every_row_runs_on_a_cpu(row: Row, options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    if row.topic == "estimates":  # as if it was exported before, which takes half of all these tests' time
        exported = options.work / row.topic / load_recipe(estimates.MODELS["light"]).name
        shutil.copytree(ROOT / "tests" / "old_format" / "classifier-v1", exported)
    assert perform(row, options) == DONE, capsys.readouterr().out
    document = written(options, row)
    cases = document["cases"]
    assert isinstance(cases, dict) and cases and document["complete"] is True
    assert document["dry_run"] is True and document["commit"] == "0.1.0+0123456789" and document["versions"]["torch"]  # type: ignore[index]
    displayed = table(row.columns, cases)
    assert [name for name, case in cases.items() if "figures" not in case] == []
    if row.topic == "out-of-memory":
        summary = document["summary"]
        assert isinstance(summary, dict) and len(summary) == 2 * len(out_of_memory.PHASES)
        assert all(case["survived"] and case["noise"] == 0.0 for case in summary.values())
    assert displayed.count("\n") == len(cases) + 1 and len(displayed.splitlines()[0].split("|")) == len(row.columns) + 3


def test_a_peak_of_tensors_is_compared_with_a_prediction_of_tensors(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that needs exactly what was predicted is off by nothing, however large the reserve is."""

    def some_steps(session: Session, recipe: Recipe, *_: object) -> dict[str, object]:
        planned = session.figures("plan --device rtx4050")
        assert planned is not None and planned["breakdown"]["reserve"] > 64 * 2**20
        peaks = {"reserved_peak_bytes": planned["peak_bytes"]}
        peaks["measured_peak_bytes"] = planned["peak_bytes"] - planned["breakdown"]["reserve"]
        return {**peaks, "batch_size": recipe.training.batch_size}

    monkeypatch.setattr(six_gigabytes, "some_steps", some_steps)
    row = next(row for row in ROWS if row.topic == "six-gigabytes")
    assert perform(row, options) == DONE
    assert written(options, row)["summary"] == {
        "prediction_off": 0.0, "within": True, "ran_out_of_memory": False, "with_reserve_off": 0.0,
    }  # fmt: skip


def test_every_lever_is_moved_by_the_recipe_and_by_nothing_else(options: Options) -> None:
    session, moved = Session(next(row for row in ROWS if row.topic == "levers"), options), dict[str, list[str]]()
    for name, lever in levers.LEVERS.items():
        recipe = levers.recipe_for(session, lever.recipe, levers.settings(lever))
        moved.setdefault(recipe.to_yaml(), []).append(name)
    same = [names for names in moved.values() if len(names) > 1]
    # Math attention is no key: nobody would ask for it. A dry run's recipes are in fp32 already.
    assert same == [["as the recipe is", "attention: math", "fp32"], ["encoder", "encoder, fp32"]]


def test_the_rows_are_those_of_the_checklist_in_its_order() -> None:
    assert [row.number for row in ROWS] == list(range(1, 13))
    assert len({row.topic for row in ROWS}) == len(ROWS)
    for row in ROWS:
        source = Path(sessions.__file__).parent / f"{row.module}.py"
        assert "raise SystemExit(main(ROW))" in source.read_text(encoding="utf-8")


def made(measure: object, number: int = 1) -> Row:
    """A row that measures nothing real."""
    return Row(number, f"topic-{number}", "is it?", "yes", measure, (Column("value", "value"),), "none")  # type: ignore[arg-type]


def test_what_is_known_is_not_measured_again_and_what_failed_is(options: Options) -> None:
    arguments: list[str] = []

    def measure(session: Session) -> None:
        def case(name: str) -> dict[str, object]:
            arguments.append(name)
            if arguments == ["good", "bad"]:
                raise InputError("no such thing")
            return {"value": 1.0}

        session.case("good", lambda: case("good"))
        session.case("bad", lambda: case("bad"))

    row = made(measure)
    assert perform(row, options) == FAILED
    assert written(options, row)["cases"]["bad"]["failed"] == "InputError: no such thing"  # type: ignore[index]
    assert perform(row, options) == DONE
    assert arguments == ["good", "bad", "bad"]
    assert perform(row, replace(options, again=True)) == DONE and arguments[3:] == ["good", "bad"]


def test_a_row_that_is_stopped_keeps_its_cases_and_goes_on(options: Options) -> None:
    stopped = [True]

    def measure(session: Session) -> None:
        session.case("first", lambda: {"value": 1})

        def second() -> dict[str, object]:
            if stopped:
                stopped.clear()
                raise InterruptedRun("interrupted; go on")
            return {"value": 2}

        session.case("second", second)

    row = made(measure)
    assert perform(row, options) == UNFINISHED
    document = written(options, row)
    assert document["complete"] is False and document["left"] == ["second"] and [*document["cases"]] == ["first"]  # type: ignore[misc]
    assert perform(row, options) == DONE and written(options, row)["complete"] is True


def test_time_that_is_up_ends_a_case(options: Options) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread only")

    def forever() -> dict[str, object]:
        while True:
            time.sleep(0.01)

    row = made(lambda session: session.case("endless", forever))
    assert perform(row, replace(options, minutes=0.003)) == UNFINISHED
    assert written(options, row)["left"] == ["endless"]


def test_a_changed_checkout_is_measured_from_the_start(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[int] = []
    row = made(lambda session: session.case("one", lambda: arguments.append(1) or {"value": 1}))
    monkeypatch.setattr(sessions, "code_version", lambda: "0.1.0+0123456789-dirty")
    perform(row, options)
    perform(row, options)
    assert len(arguments) == 2


def test_the_runner_goes_on_after_a_failure_and_passes_over_what_is_known(options: Options) -> None:
    rows = [made(lambda session: None, number) for number in (1, 2, 3)]
    perform(rows[1], options)
    begun: list[int] = []

    def start(row: Row, options: Options, minutes: float) -> int:
        begun.append(row.number)
        return FAILED if row.number == 1 else UNFINISHED

    messages = runner.check(rows, replace(options, minutes=9.0), start)
    assert (
        begun == [1, 3]
        and messages[1] == "failed"
        and messages[2].startswith("known of this commit")
        and "time" in messages[3]
    )
    assert runner.check(rows[:1], replace(options, minutes=0.1), start) == {1: "out of time: not begun"}


def test_figures_of_a_dry_run_are_no_results(options: Options, tmp_path: Path) -> None:
    assert gpu(tmp_path) == NONE.rstrip()
    perform(replace(ROWS[0], measure=lambda session: None), options)
    with pytest.raises(InputError, match="dry run"):
        gpu(options.out)
    with pytest.raises(SystemExit, match="dry run"):
        runner.main(["--dry-run", "--out", str(RESULTS)])


def test_a_committed_file_becomes_a_section(tmp_path: Path) -> None:
    row = ROWS[0]
    case = {"figures": {"measured_peak_bytes": 5_000_000_000, "tokens_per_s": 1234.5}, "seconds": 1.0, "card": None}
    document = {"topic": row.topic, "gpu": "NVIDIA Card", "dry_run": False, "complete": False, "left": ["more"]}
    document |= {"began": "2027-01-02T03:04:05Z", "versions": {"torch": "2.11.0"}, "commit": "abc"}
    cases = {"train": case, "broken": {"failed": "OutOfMemoryError: no | memory"}}
    folder = tmp_path / "nvidia-card"
    folder.mkdir()
    text = json.dumps({**document, "cases": cases, "summary": {"prediction_off": 0.0512, "within": True}})
    (folder / f"2027-01-02-{row.topic}.json").write_text(text, encoding="utf-8")
    displayed = gpu(tmp_path)
    assert (
        "NVIDIA Card" in displayed
        and "5,000,000,000" in displayed
        and "1,234" in displayed
        and "Not finished" in displayed
    )
    assert r"no \| memory" in displayed and "- prediction off: 0.0512" in displayed


def test_what_a_card_was_measured_to_do_becomes_verified_facts_of_its_profile(tmp_path: Path) -> None:
    path, profile = tmp_path / "figures.json", tmp_path / "h100.yaml"
    shutil.copyfile(ROOT / "profiles" / "h100.yaml", profile)
    start = load_profile(str(profile))
    floor = {"copied_bytes_per_s": 2.987654e12, "fp32_operations_per_s": 5.1e13, "fp16_operations_per_s": 7.1239e14}
    document = {"gpu": "NVIDIA H100 80GB HBM3", "dry_run": False, "began": "2027-01-02T03:04:05Z", "commit": "abc"}
    document |= {"versions": {"torch": "2.11.0"}, "cases": {"floor": {"figures": {**floor, "launch_us": 2.25}}}}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert facts.main([str(path), str(profile)]) == 0
    end = load_profile(str(profile))
    results = (end.bandwidth_bytes_per_s, end.peaks.fp32, end.peaks.fp16_fp32_accumulate, end.launch_overhead_us)
    assert [fact.value for fact in results if fact is not None] == [2.988e12, 5.1e13, 7.124e14, 2.25]
    assert all(fact is not None and fact.verified and "2027-01-02 on NVIDIA H100" in fact.source for fact in results)
    assert end.peaks.int8 == start.peaks.int8 and end.budgets == start.budgets and end.power == start.power
    assert "# As the driver reports it" in profile.read_text(encoding="utf-8")
    text = profile.read_text(encoding="utf-8")
    assert facts.main([str(path), str(profile)]) == 0 and profile.read_text(encoding="utf-8") == text
    path.write_text(json.dumps({**document, "gpu": "NVIDIA H200"}), encoding="utf-8")
    assert facts.main([str(path), str(profile)]) == 2
    with pytest.raises(InputError, match="dry run"):
        facts.verified({**document, "dry_run": True}, text)
    with pytest.raises(InputError, match="no place for launch_overhead_us"):
        facts.verified(document, text.replace("launch_overhead_us", "other"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Files of the names that are packed, with next to nothing in them."""
    for name in packing.DATA:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(SENTENCES[0], encoding="utf-8")
    return tmp_path / "data"


def test_what_is_packed_is_under_the_limit_or_nothing_is(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "brought"
    size = packing.pack(target, data, None, (), "3.12", 1 << 20)
    manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["size_bytes"] == size and sorted(manifest["files"]) == sorted(
        f"data/{name}" for name in packing.DATA
    )
    with pytest.raises(InputError, match="may be brought; the largest file"):
        packing.pack(target, data, None, (), "3.12", 10)
    assert (target / "manifest.json").is_file()  # what was there before stays
    (data / "sst2" / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"--data: no sst2/dev\.tsv"):
        packing.pack(target, data, None, (), "3.12", 1 << 20)


def test_a_packed_model_keeps_the_rows_that_its_texts_use(data: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SENTENCES[0].split()[:2], "never"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    source, target = tmp_path / "model", tmp_path / "packed"
    source.mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        packing.copy_model(source, target, [])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "config.json").write_text("{}", encoding="utf-8")
    table = torch.full((len(words), 4), 0.5)
    save_file({"embeddings.word_embeddings.weight": table, "other": torch.ones(3)}, source / packing.WEIGHTS)
    packing.copy_model(source, target, [data / "sst2" / "dev.tsv"])
    results = load(lzma.decompress((target / "model.safetensors.xz").read_bytes()))
    kept = results["embeddings.word_embeddings.weight"]
    assert kept.dtype == torch.float16 and kept[:-1].eq(0.5).all() and kept[-1].eq(0).all()
    assert results["other"].eq(1).all() and (target / "tokenizer.json").is_file()
