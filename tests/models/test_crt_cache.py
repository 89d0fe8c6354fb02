"""Incremental decoding equals the uncached forward pass, whichever token leaves where."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.model import CRT, CachedLoops
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.torch.session import torch_decoder
from tests.models.crt_oracle import small_config

TOKENS = 256


def decoding(model: CRT) -> Decoder[Tensor]:
    return torch_decoder(CachedLoops(model))


def after(decoder: Decoder[Tensor], loop: int) -> Tensor:
    """Logits [B, V] of the newest token after ``loop``."""
    decoder.advance(loop)
    return torch.from_numpy(decoder.row_logits(loop))


@pytest.fixture(scope="module")
def model() -> CRT:
    torch.manual_seed(0)
    return build_crt(small_config(loops=8, exits=(2, 4, 6), embedding_cycles=2, cycles=4)).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 60, (1, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def uncached(model: CRT, ids: Tensor) -> dict[int, Tensor]:
    with torch.inference_mode():
        return {loop: model.head_of(loop)(state) for loop, state in model(ids).items()}


@pytest.mark.parametrize("loop", [2, 4, 6, 8])
def test_256_tokens_one_by_one_at_every_exit(model: CRT, ids: Tensor, uncached: dict[int, Tensor], loop: int) -> None:
    decoder = decoding(model)
    for place in range(TOKENS):
        decoder.read_rows(ids[:, place : place + 1].numpy())
        logits = after(decoder, loop)
        assert torch.allclose(logits, uncached[loop][:, place], atol=1e-5, rtol=0), place
    assert decoder.length == TOKENS


@pytest.mark.parametrize("seed", range(2))
def test_any_sequence_of_exits(model: CRT, ids: Tensor, uncached: dict[int, Tensor], seed: int) -> None:
    """Tokens that left early wait and catch up, so that later ones see what they would see without early exit."""
    choose = random.Random(seed)
    decoder = decoding(model)
    for place in range(TOKENS):
        decoder.read_rows(ids[:, place : place + 1].numpy())
        loop = choose.choices(model.exits, weights=(8, 3, 2, 1))[0]
        logits = after(decoder, loop)
        assert torch.allclose(logits, uncached[loop][:, place], atol=1e-5, rtol=0), (place, loop)


def test_going_on_from_an_exit_that_was_not_sure(model: CRT, ids: Tensor, uncached: dict[int, Tensor]) -> None:
    decoder = decoding(model)
    decoder.read_rows(ids[:, :20].numpy())
    for loop in (2, 4, 6, 8):
        logits = after(decoder, loop)
        assert torch.allclose(logits, uncached[loop][:, 19], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="no token waits in front of loop 8"):
        decoder.advance(8)


@pytest.mark.parametrize("pieces", [(100,), (1, 99), (37, 1, 1, 61), (64, 64), (65, 127, 64)])
def test_many_tokens_at_once(model: CRT, ids: Tensor, uncached: dict[int, Tensor], pieces: tuple[int, ...]) -> None:
    decoder = decoding(model)
    for number, piece in enumerate(pieces):
        decoder.read_rows(ids[:, decoder.length : decoder.length + piece].numpy())
        loop = model.exits[number % 4]
        logits = after(decoder, loop)
        assert torch.allclose(logits, uncached[loop][:, decoder.length - 1], atol=1e-5, rtol=0)


def test_several_texts_at_once(model: CRT) -> None:
    several = torch.randint(0, 60, (3, 40))
    decoder = decoding(model)
    decoder.read_rows(several[:, :30].numpy())
    decoder.advance(4)
    decoder.read_rows(several[:, 30:].numpy())
    logits = after(decoder, 8)
    assert torch.allclose(logits, model.logits(several)[:, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes", [{"trm": "linear"}, {"trm": "conv"}, {"trm": "depthwise"}, {"norm": "rms"}, {"norm": "none"},
                {"norm": "batch"}, {"embedding_cycles": 0}, {"dilations": (3, 1)}, {"exits": ()}]
)  # fmt: skip
def test_every_variant_has_a_cache(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    variant = build_crt(small_config(**changes)).eval()
    text = torch.randint(0, 60, (1, 40))
    decoder = decoding(variant)
    with torch.inference_mode():
        expected = variant.logits(text)[0]
    for place in range(40):
        decoder.read_rows(text[:, place : place + 1].numpy())
        got = after(decoder, 4)[0]
        assert torch.allclose(got, expected[place], atol=1e-5 * float(expected.abs().max().clamp_min(1)), rtol=0)


def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(InputError, match="cached decoding needs a causal model"):
        CachedLoops(build_crt(small_config(causal=False)))


def test_no_further_than_the_position_table(model: CRT, ids: Tensor) -> None:
    decoder = decoding(model)
    decoder.read_rows(ids.numpy())
    with pytest.raises(InputError, match="321 tokens; the model takes at most 320"):
        decoder.read_rows(ids[:, :65].numpy())
    decoder.read_rows(ids[:, :64].numpy())
    assert after(decoder, 2).shape == (1, 60)


def test_nothing_read_yet(model: CRT) -> None:
    with pytest.raises(ValueError, match="read one first"):
        decoding(model).advance(2)


def test_peeking_gives_the_next_tokens_logits_and_leaves_everything_as_it_was(
    model: CRT, ids: Tensor, uncached: dict[int, Tensor]
) -> None:
    decoder = decoding(model)
    for read in (0, 70):  # 70: the buffers of keys and values have just grown
        if read:
            decoder.read_rows(ids[:, :read].numpy())
            decoder.advance(8)
        for _ in range(2):
            found = torch.from_numpy(decoder.peek(ids[:, read : read + 1].numpy(), 8))
            assert torch.allclose(found, uncached[8][:, read], atol=1e-5, rtol=0)
        assert decoder.length == read
    decoder.read_rows(ids[:, 70:71].numpy())
    assert torch.allclose(after(decoder, 8), uncached[8][:, 70], atol=1e-5, rtol=0)
    decoder.close()
    with pytest.raises(ValueError, match="closed"):
        decoder.read([1])
