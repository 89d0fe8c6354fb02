"""Models and own weights of runs on a card: the same answers as on the CPU, in half formats, compiled, with a cache."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.recipes import in_format
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.inference.generate import GenerateOptions, generate
from edgeformer.inference.predict import open_predictor, predict
from edgeformer.inference.sampling import Sampling
from edgeformer.models.encoder import EncoderConfig
from edgeformer.models.encoder.model import EncoderClassifier
from edgeformer.run import Location, find_bundle, locate

pytestmark = pytest.mark.gpu

IDS = torch.arange(48).view(3, 16) * 7 % 500
MASK = torch.ones_like(IDS)
MASK[1, 9:] = 0


@pytest.fixture
def encoder() -> EncoderClassifier:
    torch.manual_seed(0)
    config = EncoderConfig(
        kind="encoder", vocab_size=500, hidden_size=64, layers=2, iterations=2, heads=2, ffn_size=128,
        residual_scale=0.5, dropout=0.0, max_positions=64,
    )  # fmt: skip
    return EncoderClassifier(config, classes=2).eval()


@torch.inference_mode()
@pytest.mark.parametrize(("format_", "tolerance"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 5e-2)])
def test_an_encoder_answers_as_on_the_cpu(encoder: EncoderClassifier, format_: str, tolerance: float) -> None:
    exact = encoder(IDS, MASK)
    actual = in_format(encoder.cuda(), format_)(IDS.cuda(), MASK.cuda()).cpu()
    assert actual.dtype == torch.float32 and torch.allclose(actual, exact, atol=tolerance * float(exact.std()) + 1e-5)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch 2.11 itself uses it
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # not enabled on purpose
def test_torch_compile_keeps_the_answers(encoder: EncoderClassifier) -> None:
    pytest.importorskip("triton")
    encoder.cuda()
    exact = encoder(IDS.cuda(), MASK.cuda())
    encoder.compile(dynamic=False)
    assert torch.allclose(encoder(IDS.cuda(), MASK.cuda()), exact, atol=1e-4)


def at(run: Path) -> Location:
    return locate(str(run), run.parent)


def test_a_classifier_is_scored_and_answers_on_the_card_as_on_the_cpu(finished_run: Path) -> None:
    fast = evaluate(at(finished_run), EvaluateOptions("torch")).rows[0]
    by_cpu = evaluate(at(finished_run), EvaluateOptions("torch", runtime="torch-cpu")).rows[0]
    assert (fast.provider, by_cpu.provider) == ("torch-cuda", "torch-cpu")
    assert fast.loss == pytest.approx(by_cpu.loss, rel=1e-4)
    assert fast.accuracy == pytest.approx(by_cpu.accuracy, abs=0.01)
    texts = ["a warm and funny film", "dull", "neither good nor bad"]
    usual = predict(at(finished_run), texts, "torch")[1]
    slow = predict(at(finished_run), texts, "torch", runtime="torch-cpu")[1]
    with open_predictor(at(finished_run), "torch") as model:
        assert model.notes() == ("torch: the weights of the run, computed by torch-cuda",)
    labels = [[answer.as_dict()["label"] for answer in answers] for answers in (usual, slow)]
    assert labels[0] == labels[1]


def test_a_language_model_is_scored_and_writes_on_the_card(finished_language_run: Path) -> None:
    where = at(finished_language_run)
    assert find_bundle(finished_language_run) is None
    providers = (None, "torch-cpu")
    usual, slow = (evaluate(where, EvaluateOptions("torch", runtime=name)).rows[0] for name in providers)
    assert usual.perplexity is not None and math.isfinite(usual.perplexity)
    assert usual.perplexity == pytest.approx(slow.perplexity, rel=1e-3)
    options = GenerateOptions(12, Sampling(temperature=0.0), artifact="torch")
    written = generate(where, "The film", options)
    assert written.provider == "torch-cuda"
    by_cpu = generate(where, "The film", replace(options, runtime="torch-cpu"))
    assert by_cpu.provider == "torch-cpu" and written.tokens[:4] == by_cpu.tokens[:4]
