"""Sampling of the next token: temperature, top-k, top-p and seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.inference.sampling import Sampling
from edgeformer.tasks.classification import softmax

# A small set of values, so that equal logits are common.
all_logits = arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([-4.0, -1.0, 0.0, 0.5, 1.0, 3.0]))


def candidates(logits, **settings):
    tokens, probabilities = Sampling(**settings).candidates(np.asarray(logits))
    return tokens.tolist(), probabilities


def ranked(probabilities):
    """Token numbers, likeliest first, ties by number."""
    return sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))


@given(all_logits, st.floats(0.1, 3.0))
def test_without_limits_probabilities_are_those_of_the_model(logits, temperature):
    tokens, probabilities = candidates(logits, temperature=temperature)
    assert tokens == list(range(len(logits)))
    assert probabilities == pytest.approx(softmax(logits.astype(np.float64)[None] / temperature)[0])


@given(all_logits, st.integers(1, 40))
def test_top_k_keeps_the_k_likeliest(logits, k):
    tokens, probabilities = candidates(logits, top_k=k)
    expected = sorted(ranked(logits.tolist())[:k])
    assert tokens == expected
    all_shares = softmax(logits[None])[0][expected]
    assert probabilities == pytest.approx(all_shares / all_shares.sum())


@given(all_logits, st.floats(0.01, 1.0), st.none() | st.integers(1, 40))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, p, k):
    order = ranked(logits.tolist())[:k]
    all_shares = softmax(logits[None])[0][order]
    all_shares /= all_shares.sum()
    tokens, probabilities = candidates(logits, top_p=p, top_k=k)
    kept = order[: len(tokens)]
    assert tokens == sorted(kept)
    assert all_shares[: len(tokens)].sum() >= p - 1e-12
    assert len(tokens) == 1 or all_shares[: len(tokens) - 1].sum() < p + 1e-12
    assert probabilities.sum() == pytest.approx(1.0)


def full_sort(logits, p):
    """Reference implementation that sorts every token; its sums decide, to the last bit."""
    shares = np.exp(logits.astype(np.float64) - float(logits.max()))
    shares /= shares.sum()
    order = np.argsort(-shares, kind="stable")
    reached = np.flatnonzero(np.cumsum(shares[order]) >= p)
    return np.sort(order[: int(reached[0]) + 1 if len(reached) else len(order)])


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99, 1 - 1e-12])
@pytest.mark.parametrize("steepness", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many ties"])
def test_top_p_of_a_large_vocabulary_equals_a_full_sort(p, steepness, rounded):
    logits = steepness * np.random.default_rng(5).normal(size=5000)
    logits = (np.round(logits, 1) if rounded else logits).astype(np.float32)
    tokens, probabilities = Sampling(top_p=p).candidates(logits)
    expected = full_sort(logits, p)
    assert np.array_equal(tokens, expected)
    kept = np.exp(logits.astype(np.float64) - float(logits.max()))[expected]
    assert np.array_equal(probabilities, kept / kept.sum())


def test_tokens_are_drawn_with_their_probability():
    probabilities = np.array([0.5, 0.0, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    sampling, generator = Sampling(seed=1), np.random.default_rng(1)
    counts = np.bincount([sampling.pick(logits, generator) for _ in range(20_000)], minlength=4)
    assert counts[1] == 0
    # Four standard deviations of the binomial.
    spread = 4 * np.sqrt(probabilities * (1 - probabilities) / 20_000)
    assert (np.abs(counts / 20_000 - probabilities) <= spread).all()


def test_a_low_temperature_sharpens_without_overflow():
    logits = np.array([1.0, 2.0, -np.inf, 1.9], dtype=np.float32)
    assert candidates(logits, temperature=1e-310)[0] == candidates(logits, temperature=0)[0] == [1]
    _, cold = candidates(logits, temperature=0.1)
    _, warm = candidates(logits, temperature=2.0)
    assert cold.max() > warm.max()
    assert candidates(logits)[0] == [0, 1, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "must be 0"),
        ({"temperature": float("nan")}, "must be 0"),
        ({"top_k": 0}, "--top-k 0: must be at least 1"),
        ({"top_p": 0.0}, "--top-p 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.01}, "must be above 0"),
        ({"seed": -1}, "--seed -1: must be from 0 to 4294967295"),
        ({"seed": 2**32}, "must be from 0"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("logits", [[0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(logits, temperature):
    with pytest.raises(ArtifactError, match="largest logit of the model is"):
        Sampling(temperature=temperature).pick(np.array(logits), np.random.default_rng(0))
