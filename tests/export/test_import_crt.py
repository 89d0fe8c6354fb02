"""Import of checkpoints of the public CRT code, in Python and on the command line."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from edgeformer.artifacts.data_warnings import LEAKS
from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.manifest import RunManifest
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import train_language_tokenizer
from edgeformer.export import import_run
from edgeformer.export.import_run import ImportOptions, import_crt
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.models import load_recipe
from edgeformer.models.card import model_card
from edgeformer.models.weights import load_model
from edgeformer.run import locate, read_run
from edgeformer.tasks.language_modeling import LanguageRecipe
from tests.cli.run_cli import edgeformer
from tests.models.crt_oracle import Oracle, public_weights, small_config

VOCABULARY = 300
CONFIG = small_config(vocab_size=VOCABULARY, heads="separate", causal=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_language_tokenizer(VOCABULARY, list(PARAGRAPHS)).save(str(path))
    return path


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return public_weights(CONFIG)


def imported(tmp_path: Path, content: Any, tokenizer: Path, **options: Any) -> Path:
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    return import_crt(path, ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer, **options))


def test_logits_of_the_run_equal_the_plain_equations(
    tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path
) -> None:
    """Acceptance: random weights in the public layout, an oracle written from the equations, 1e-5 at every exit."""
    run = imported(tmp_path, weights, tokenizer)
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert card == model_card(read_run(run), load_recipe(str(run / "recipe.yaml")))
    assert "imported from checkpoint.pt" in card
    model = load_model(run)
    ids = torch.randint(0, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(1))
    expected = Oracle(weights).logits(ids)
    assert list(expected) == [1, 3, 4]
    with torch.inference_mode():
        for loop, logits in expected.items():
            assert torch.allclose(model.logits(ids, loop).double(), logits, atol=1e-5, rtol=0), loop


def test_run_fields(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    run = imported(tmp_path, {"model_state_dict": weights, "epoch": 9}, tokenizer, name="theirs")
    manifest = read_run(run)
    assert run == tmp_path / "artifacts" / "theirs" and manifest.run == "theirs"
    assert manifest.status == "finished" and manifest.task == "language-modeling"
    assert manifest.parameters == sum(tensor.numel() for tensor in weights.values())
    assert manifest.leaks and manifest.causality is not None and manifest.causality.leaks
    assert manifest.causality.reach > 15
    assert "imported from checkpoint.pt (sha256 " in str(manifest.reason)
    assert manifest.validation is None and manifest.tests == {}
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert isinstance(recipe, LanguageRecipe)
    assert not recipe.model.causal and not recipe.allow_leak
    assert recipe.fingerprint() == manifest.recipe_sha256
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["leaks"] is True and config["model_type"] == "edgeformer-crt"
    names = {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "golden_inputs.npz",
        "README.md",
    }
    assert {path.name for path in (run / "model").iterdir()} == names
    assert [path.name for path in run.parent.iterdir()] == ["theirs"]  # nothing temporary is left


@pytest.mark.parametrize("name", ["theirs", None])
def test_concurrent_run_of_the_same_name_stays(
    tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = tmp_path / "artifacts" / (name or "crt_imported-001")

    def card(manifest: RunManifest, recipe: Recipe) -> str:
        """A second import finishes while this one writes its model."""
        faster.mkdir(exist_ok=True)
        (faster / "run.json").write_text("theirs", encoding="utf-8")
        return model_card(manifest, recipe)

    monkeypatch.setattr(import_run, "model_card", card)
    if name is not None:
        with pytest.raises(InputError, match="exists already; choose another name"):
            imported(tmp_path, weights, tokenizer, name=name)
    else:
        run = imported(tmp_path, weights, tokenizer)
        assert run.name == read_run(run).run == "crt_imported-002"
    assert (faster / "run.json").read_text(encoding="utf-8") == "theirs"
    assert not list(faster.parent.glob(".*"))


def test_golden_inputs_are_the_built_in_text(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    run = imported(tmp_path, weights, tokenizer)
    with np.load(run / "model" / "golden_inputs.npz") as arrays:
        ids, targets = arrays["input_ids"], arrays["targets"]
    assert ids.shape == targets.shape == (8, 64) and ids.dtype == np.int64
    assert (ids[:, 1:] == targets[:, :-1]).all()
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(tokenizer)).decode(ids[0].tolist())
    assert PARAGRAPHS[0].startswith(text) and text.startswith("A river begins as rain")
    assert "built-in English text" in (run / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0]


def test_golden_inputs_from_own_text(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.txt", "validation.txt"):
        (data / name).write_text("A paragraph of the user's own, which is long enough to be kept.\n", encoding="utf-8")
    run = imported(tmp_path, weights, tokenizer, data=data)
    from tokenizers import Tokenizer

    with np.load(run / "model" / "golden_inputs.npz") as arrays:
        text = Tokenizer.from_file(str(tokenizer)).decode(arrays["input_ids"][0].tolist())
    assert text.startswith("A paragraph of the user's own")
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert str(data) in recipe.to_yaml()


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("key", [None, "model", "model_state_dict"])
def test_every_wrapping(
    tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path, key: str | None, prefix: str
) -> None:
    renamed = {prefix + name: tensor for name, tensor in weights.items()}
    run = imported(tmp_path, {key: renamed, "optimizer": {"lr": 0.1}} if key else renamed, tokenizer)
    assert read_run(run).parameters == sum(tensor.numel() for tensor in weights.values())


def test_safetensors(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    options = ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer)
    assert read_run(import_crt(tmp_path / "model.safetensors", options)).leaks


def test_runs_are_numbered_and_never_replaced(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    names = [imported(tmp_path, weights, tokenizer).name for _ in range(2)]
    assert names == ["crt_imported-001", "crt_imported-002"]
    with pytest.raises(InputError, match=r"--name crt_imported-002: .* exists already"):
        imported(tmp_path, weights, tokenizer, name="crt_imported-002")


def test_cannot_generate(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    run = imported(tmp_path, weights, tokenizer)
    with pytest.raises(InputError, match="leaks future tokens, so it cannot write"):
        generate(locate(str(run), run.parent), "A river", GenerateOptions())


class _Calls:
    """Pickled as a call of a function with one argument."""

    def __init__(self, function: Any, argument: int) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return self.call


class _RunsCode:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


class TestRefused:
    """Nothing of it is written, and the message names the file."""

    def refusal(self, path: Path, tokenizer: Path, **options: Any) -> str:
        artifacts = path.parent / "artifacts"
        with pytest.raises(InputError) as caught:
            import_crt(path, ImportOptions(artifacts, tokenizer=tokenizer, **options))
        assert not artifacts.exists()
        return str(caught.value)

    def test_code_in_the_file_is_not_run(self, tmp_path: Path, tokenizer: Path) -> None:
        path, proof = tmp_path / "evil.pt", tmp_path / "proof"
        torch.save({"model": _RunsCode(f"touch {proof}")}, path)
        message = self.refusal(path, tokenizer)
        assert "evil.pt: holds Python objects" in message and "torch.save(model.state_dict()" in message
        path.write_bytes(pickle.dumps(_RunsCode(f"touch {proof}")))
        assert "evil.pt" in self.refusal(path, tokenizer)
        assert not proof.exists()

    @pytest.mark.parametrize("name", ["bomb.pt", "bomb.bin", "bomb.safetensors"])
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_no_kind_of_file_runs_code(self, tmp_path: Path, tokenizer: Path, name: str, wrapped: bool) -> None:
        path, proof = tmp_path / name, tmp_path / "proof"
        bomb = _RunsCode(f"touch {proof}")
        if wrapped:
            torch.save({"model": {"tokens.weight": bomb}}, path)
        else:
            path.write_bytes(pickle.dumps(bomb))
        started = time.process_time()
        assert name in self.refusal(path, tokenizer)
        assert time.process_time() - started < 5
        assert not proof.exists()
        if name != "bomb.safetensors":  # the bomb is a live one
            pickle.loads(path.read_bytes()) if not wrapped else torch.load(path, weights_only=False)
            assert proof.exists()

    @pytest.mark.parametrize("allocated", [bytearray, torch.Tensor])
    @pytest.mark.parametrize("legacy", [False, True])
    def test_claimed_memory_is_not_allocated(
        self, tmp_path: Path, tokenizer: Path, allocated: Any, legacy: bool
    ) -> None:
        """torch's restricted reader calls both with any number."""
        path = tmp_path / "greedy.pt"
        greedy = {"tokens.weight": _Calls(allocated, 6 * 2**30)}
        torch.save(greedy, path, _use_new_zipfile_serialization=not legacy)
        old = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert "greedy.pt" in self.refusal(path, tokenizer)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - old < 2**20  # KiB

    def test_repeated_view_is_refused(self, tmp_path: Path, tokenizer: Path) -> None:
        path = tmp_path / "view.pt"
        torch.save({"tokens.weight": torch.zeros(1).expand(2**20, 2**20)}, path)
        assert path.stat().st_size < 2000
        assert "far more than the file" in self.refusal(path, tokenizer)

    def test_packed_archive(self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
        plain, path = tmp_path / "plain.pt", tmp_path / "packed.pt"
        torch.save(weights, plain)
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for member in old.infolist():
                new.writestr(member.filename, old.read(member))
        assert "packed archive" in self.refusal(path, tokenizer)

    def test_megabytes_of_objects(self, tmp_path: Path, tokenizer: Path) -> None:
        path = tmp_path / "objects.pt"
        torch.save({"history": [[] for _ in range(10**6)] + [0.1] * 400_000}, path)
        assert "of Python objects" in self.refusal(path, tokenizer)

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
    def test_truncated(self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path, share: float) -> None:
        path = tmp_path / "half.pt"
        torch.save(weights, path)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        assert "half.pt: " in self.refusal(path, tokenizer)

    def test_truncated_safetensors(self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
        path = tmp_path / "half.safetensors"
        save_file(weights, path)
        path.write_bytes(path.read_bytes()[:5000])
        assert "half.safetensors: cannot be read as safetensors" in self.refusal(path, tokenizer)

    @pytest.mark.parametrize("content", [b"plain text\n", b"PK\x03\x04 no zip", b"\x80\x02]", bytes(range(256)) * 20])
    def test_another_kind_of_file(self, tmp_path: Path, tokenizer: Path, content: bytes) -> None:
        path = tmp_path / "other.pt"
        path.write_bytes(content)
        assert "other.pt: " in self.refusal(path, tokenizer)

    def test_missing_file_and_folder(self, tmp_path: Path, tokenizer: Path) -> None:
        assert "no such checkpoint file" in self.refusal(tmp_path / "nothing.pt", tokenizer)
        (tmp_path / "folder").mkdir()
        assert "is a folder, not a checkpoint file" in self.refusal(tmp_path / "folder", tokenizer)

    def test_tensors_that_do_not_fit_are_named(
        self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path
    ) -> None:
        del weights["norm2.bias"]
        weights["extra"] = torch.zeros(2)
        weights["k_proj.weight"] = torch.zeros(2, 2)
        torch.save(weights, tmp_path / "odd.pt")
        message = self.refusal(tmp_path / "odd.pt", tokenizer)
        for line in ("missing norm2.bias [32]", "unexpected extra [2]", "k_proj.weight is [2, 2], not [32, 32]"):
            assert line in message

    def test_nan_and_infinite_weights_are_refused(
        self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path
    ) -> None:
        weights["norm1.weight"][3] = float("nan")
        torch.save(weights, tmp_path / "nan.pt")
        assert "infinite values or NaN in norm1.weight" in self.refusal(tmp_path / "nan.pt", tokenizer)

    def test_sparse_tensors(self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
        weights["norm1.weight"] = weights["norm1.weight"].to_sparse()
        torch.save(weights, tmp_path / "sparse.pt")
        assert "sparse, quantised or empty tensors" in self.refusal(tmp_path / "sparse.pt", tokenizer)

    def test_weights_without_effect(self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
        torch.save({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, tmp_path / "zero.pt")
        assert "cannot be probed for leaks" in self.refusal(tmp_path / "zero.pt", tokenizer)

    def test_tokenizer_of_another_size(self, tmp_path: Path, tokenizer: Path) -> None:
        torch.save(public_weights(small_config(vocab_size=301, heads="separate")), tmp_path / "large.pt")
        artifacts = tmp_path / "artifacts"
        with pytest.raises(DataError, match="has 300 tokens, the model 301"):
            import_crt(tmp_path / "large.pt", ImportOptions(artifacts, tokenizer=tokenizer))
        assert not artifacts.exists()

    @pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", ""])
    def test_name_that_is_no_folder_name(
        self, tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path, name: str
    ) -> None:
        torch.save(weights, tmp_path / "good.pt")
        assert "--name" in self.refusal(tmp_path / "good.pt", tokenizer, name=name)

    def test_our_own_weights_are_not_the_public_layout(self, tmp_path: Path, tokenizer: Path) -> None:
        save_file(
            {"tokens.weight": torch.zeros(300, 12), "head.weight": torch.zeros(300, 32)}, tmp_path / "our.safetensors"
        )
        with pytest.raises(ArtifactError, match=r"is no CRT checkpoint: lm_head\.weight is missing"):
            import_crt(tmp_path / "our.safetensors", ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({"model": public_weights(small_config(vocab_size=300))}, tmp_path / "theirs.pt")
    train_language_tokenizer(300, list(PARAGRAPHS)).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_import_list_and_refuse_to_generate(folder: Path) -> None:
    outcome = edgeformer("import", "crt", "theirs.pt", "--tokenizer", "tokenizer.json", "--json", cwd=folder)
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["run"] == "crt_imported-001" and document["status"] == "finished" and document["leaks"] is True
    assert document["causality"]["leaks"] is True
    card = (folder / "artifacts" / "crt_imported-001" / "model" / "README.md").read_text(encoding="utf-8")
    assert LEAKS in card and "None yet." in card and "imported from theirs.pt" in card
    listed = json.loads(edgeformer("list", "runs", "--json", cwd=folder).out)["runs"]
    assert [(run["run"], run["leaks"]) for run in listed] == [("crt_imported-001", True)]
    refused = edgeformer("generate", "crt_imported-001", "A river", cwd=folder)
    assert refused.code == 2 and "leaks future tokens, so it cannot write" in " ".join(refused.err.split())


def test_table_reports_the_leak(folder: Path) -> None:
    outcome = edgeformer("import", "crt", "theirs.pt", "--tokenizer", "tokenizer.json", "--name", "mine", cwd=folder)
    text = " ".join(outcome.out.split())
    assert outcome.code == 0 and LEAKS in text and "edgeformer export --allow-leak" in text


@pytest.mark.parametrize("name", ["missing.pt", "tokenizer.json"])
def test_bad_file(folder: Path, name: str) -> None:
    outcome = edgeformer("import", "crt", name, "--tokenizer", "tokenizer.json", cwd=folder)
    assert outcome.code == 2 and name in outcome.err and "Traceback" not in outcome.err
    assert not (folder / "artifacts").exists()
