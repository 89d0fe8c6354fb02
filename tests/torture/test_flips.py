"""Random flipped bits in every file of two bundles: what uses the file says so, what does not works as before."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.install import installed
from tests.torture.flipped_bytes import classifier, flipped, language_model, outcome

pytestmark = pytest.mark.torture
FLIPS = 300


def test_random_flips(tmp_path: Path) -> None:
    choose, counted = random.Random(0), Counter[str]()
    bundles = {classifier(tmp_path): ("onnx-fp32", "predict")}
    bundles[language_model(tmp_path)] = ("onnx-fp32-decode", "generate")
    files = [(b, f) for b in bundles for f in sorted(b.rglob("*")) if f.is_file() and f.name != "bundle.json"]
    with installed("reference_runtime"):
        for number in range(FLIPS):
            bundle, path = files[number % len(files)]
            artifact, use = bundles[bundle]
            name = path.relative_to(bundle).as_posix()
            with flipped(path, choose.randrange(path.stat().st_size), choose.randrange(8)):
                code, message = outcome("verify", bundle, artifact)
                assert code == 2 and name in message, (name, code, message)
                code, message = outcome(use, bundle, artifact)
                assert (code == 2 and name in message) or (code, message) == (0, ""), (name, code, message)
                counted[f"{use}: {'refused' if code else 'does not use the file'}"] += 1
    print(f"{FLIPS} flips, all found by verify; {dict(counted)}")
