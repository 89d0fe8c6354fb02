"""Import of checkpoints of the public CRT code, in Python and on the command line."""

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
from tokenizers import Tokenizer
from torch import Tensor

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.data.synthetic import PARAGRAPHS
from edgeformer.data.tokenization import train_language_tokenizer
from edgeformer.imports import crt
from edgeformer.imports.crt import import_crt
from edgeformer.imports.run import ImportOptions
from edgeformer.models import load_recipe
from edgeformer.models.card import model_card
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.tasks.language_modeling import LanguageRecipe
from tests.cli.run_cli import edgeformer, run_json
from tests.models.crt_oracle import Oracle, public_weights, small_config

VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_language_tokenizer(VOCABULARY, list(PARAGRAPHS)).save(str(path))
    return path


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return public_weights(small_config(vocab_size=VOCABULARY, heads="separate", causal=False))


def imported(tmp_path: Path, content: Any, tokenizer: Path, **options: Any) -> Path:
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    return import_crt(path, ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer, **options))


def golden_text(run: Path) -> str:
    with np.load(run / "model" / "golden_inputs.npz") as arrays:
        ids, targets = arrays["input_ids"], arrays["targets"]
    assert ids.shape == targets.shape == (8, 64) and ids.dtype == np.int64
    assert (ids[:, 1:] == targets[:, :-1]).all()
    text: str = Tokenizer.from_file(str(run / "model" / "tokenizer.json")).decode(ids[0].tolist())
    return text


def test_logits_of_the_run_equal_the_plain_equations(tmp_path, weights, tokenizer):
    """Acceptance: random weights in the public layout, an oracle written from the equations, 1e-5 at every exit."""
    save_file(weights, tmp_path / "model.safetensors")
    run = import_crt(tmp_path / "model.safetensors", ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer))
    model = load_model(run)
    ids = torch.randint(0, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(1))
    expected = Oracle(weights).logits(ids)
    assert list(expected) == [1, 3, 4]
    with torch.inference_mode():
        for loop, logits in expected.items():
            assert torch.allclose(model.logits(ids, loop).double(), logits, atol=1e-5, rtol=0), loop
    assert PARAGRAPHS[0].startswith(golden_text(run)) and golden_text(run).startswith("A river begins as rain")
    assert "built-in English text" in (run / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0]


def test_run_fields(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()}
    run = imported(tmp_path, {"model_state_dict": prefixed, "epoch": 9}, tokenizer, name="theirs")
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
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "golden_inputs.npz")
    assert {path.name for path in (run / "model").iterdir()} == {*names, "README.md"}
    assert (run / "model" / "README.md").read_text(encoding="utf-8") == model_card(manifest, recipe)
    assert [path.name for path in run.parent.iterdir()] == ["theirs"]  # nothing temporary is left
    with pytest.raises(InputError, match=r"--name theirs: .* already exists"):
        imported(tmp_path, weights, tokenizer, name="theirs")


def test_golden_inputs_from_own_text(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.txt", "validation.txt"):
        (data / name).write_text("A paragraph of the user's own, which is long enough to be kept.\n", encoding="utf-8")
    run = imported(tmp_path, weights, tokenizer, data=data)
    assert golden_text(run).startswith("A paragraph of the user's own")
    assert str(data) in load_recipe(str(run / "recipe.yaml")).to_yaml()


class _Calls:
    """Pickled as a call of a function with one argument."""

    def __init__(self, function: Any, argument: object) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Any, tuple[object]]:
        return self.call


def refusal(path: Path, tokenizer: Path, **options: Any) -> str:
    """Import a file that is refused: nothing is written, and the message names it."""
    artifacts = path.parent / "artifacts"
    with pytest.raises(InputError) as caught:
        import_crt(path, ImportOptions(artifacts, tokenizer=tokenizer, **options))
    assert not artifacts.exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["bomb.pt", "bomb.bin", "bomb.safetensors"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_no_kind_of_file_runs_code(tmp_path: Path, tokenizer: Path, name: str, wrapped: bool) -> None:
    path, proof = tmp_path / name, tmp_path / "proof"
    bomb = _Calls(os.system, f"touch {proof}")
    if wrapped:
        torch.save({"model": {"tokens.weight": bomb}}, path)
    else:
        path.write_bytes(pickle.dumps(bomb))
    started = time.process_time()
    message = refusal(path, tokenizer)
    assert name in message and time.process_time() - started < 5
    assert not proof.exists()
    if name != "bomb.safetensors":  # the bomb is a live one
        if wrapped:
            assert f"{name}: holds Python objects" in message and "torch.save(model.state_dict()" in message
        pickle.loads(path.read_bytes()) if not wrapped else torch.load(path, weights_only=False)
        assert proof.exists()


@pytest.mark.parametrize("allocated", [bytearray, torch.Tensor])
@pytest.mark.parametrize("legacy", [False, True])
def test_claimed_memory_is_not_allocated(tmp_path: Path, tokenizer: Path, allocated: Any, legacy: bool) -> None:
    """torch's restricted reader calls both with any number."""
    path = tmp_path / "greedy.pt"
    torch.save({"tokens.weight": _Calls(allocated, 6 * 2**30)}, path, _use_new_zipfile_serialization=not legacy)
    old = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "greedy.pt" in refusal(path, tokenizer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - old < 2**20  # KiB


def test_archives_that_unpack_or_hold_many_objects(tmp_path: Path, tokenizer: Path) -> None:
    objects, packed = tmp_path / "objects.pt", tmp_path / "packed.pt"
    torch.save({"history": "x" * (crt.MAX_PICKLE_BYTES + 1)}, objects)
    assert "holds 4 MiB of Python objects" in refusal(objects, tokenizer)
    with zipfile.ZipFile(objects) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    assert "compressed archive" in refusal(packed, tokenizer)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.99])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_truncated(tmp_path: Path, weights: dict[str, Tensor], tokenizer: Path, share: float, suffix: str) -> None:
    path = tmp_path / f"half.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    message = refusal(path, tokenizer)
    assert "half." in message and (suffix == "pt" or "cannot be read as safetensors" in message)


@pytest.mark.parametrize("content", [b"plain text\n", b"PK\x03\x04 no zip", b"\x80\x02]", bytes(range(256)) * 20, None])
def test_another_kind_of_file(tmp_path: Path, tokenizer: Path, content: bytes | None) -> None:
    path = tmp_path / "other.pt"
    path.mkdir() if content is None else path.write_bytes(content)
    message = refusal(path, tokenizer)
    assert "other.pt: " in message and ("is a folder" in message or content is not None)
    assert "does not exist; give a checkpoint file" in refusal(tmp_path / "nothing.pt", tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"norm1.weight": w["norm1.weight"] * torch.nan}, "infinite values or NaN in norm1.weight"),
        (lambda w: w | {"norm1.weight": w["norm1.weight"].to_sparse()}, "sparse, quantized or meta tensors"),
        (lambda w: {name: torch.zeros_like(t) for name, t in w.items()}, "the causality probe cannot judge"),
        (lambda w: {"tokens.weight": torch.zeros(1).expand(2**20, 2**20)}, "far more than the file"),
        (lambda w: {"tokens.weight": torch.zeros(300, 12)}, "not a CRT checkpoint: lm_head.weight is missing"),
    ],
    ids=["nan", "sparse", "zero", "view", "ours"],
)
def test_unusable_weights(tmp_path, weights, tokenizer, change, message):
    torch.save(change(weights), tmp_path / "odd.pt")
    assert message in refusal(tmp_path / "odd.pt", tokenizer)


def test_tokenizer_of_another_size(tmp_path: Path, tokenizer: Path) -> None:
    torch.save(public_weights(small_config(vocab_size=301, heads="separate")), tmp_path / "large.pt")
    with pytest.raises(DataError, match="has 300 tokens, but the model has 301"):
        import_crt(tmp_path / "large.pt", ImportOptions(tmp_path / "artifacts", tokenizer=tokenizer))
    assert not (tmp_path / "artifacts").exists()


def test_import_list_and_refuse_to_generate(tmp_path: Path, tokenizer: Path) -> None:
    torch.save({"model": public_weights(small_config(vocab_size=VOCABULARY))}, tmp_path / "theirs.pt")
    command = ("import", "crt", "theirs.pt", "--tokenizer", str(tokenizer))
    document = run_json(*command, cwd=tmp_path)
    assert document["run"] == "crt_imported-001" and document["status"] == "finished" and document["leaks"] is True
    assert document["causality"]["leaks"] is True
    card = (tmp_path / "artifacts" / "crt_imported-001" / "model" / "README.md").read_text(encoding="utf-8")
    assert LEAKS in card and "None yet." in card and "imported from theirs.pt" in card
    shown = edgeformer(*command, "--name", "mine", cwd=tmp_path)
    text = " ".join(shown.out.split())
    assert shown.code == 0 and LEAKS in text and "edgeformer export --allow-leak" in text
    listed = run_json("list", "runs", cwd=tmp_path)["runs"]
    assert sorted((run["run"], run["leaks"]) for run in listed) == [("crt_imported-001", True), ("mine", True)]
    refused = edgeformer("generate", "crt_imported-001", "A river", cwd=tmp_path)
    assert refused.code == 2 and "leaks future tokens, so it cannot write" in " ".join(refused.err.split())
    missing = edgeformer("import", "crt", "missing.pt", "--tokenizer", str(tokenizer), cwd=tmp_path)
    assert missing.code == 2 and "missing.pt" in missing.err and "Traceback" not in missing.err
