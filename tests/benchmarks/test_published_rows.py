"""Published rows become milliseconds of a call, and transformers have the operations that are known of them."""

import pytest

from benchmarks.published.rows import _measurement, load, operators
from benchmarks.published.transformers import parse_architecture
from edgeformer.estimate.operators import count_nodes, total

BERT = "|word(30522) embeddings with LN; 12 post-LN encoder layers, hidden 768, 12 heads x 64, FFN 3072 GELU"
LLAMA = "|32 layers, hidden 4096, 32 heads, 8 KV heads x 128, SwiGLU FFN 14336, vocab 128256 untied"
ROW = {
    "profile": "t4", "device": "Tesla T4", "runtime": "TensorRT 8", "precision": "FP16", "batch": "8", "threads": "",
    "input": "sequence 128", "statistic": "mean latency per batch", "value": "4", "unit": "ms", "confidence": "high",
    "note": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "batch", "size", "past", "operations", "tolerance"),
    [
        # 2 × 85.05 M weights × 128 tokens, and 12 layers × 4 × 128² × 768 between activations.
        (BERT, 1, 128, 0, 22.4e9, 0.01),
        (BERT, 8, 384, 0, 8 * (2 * 85.05e6 * 384 + 12 * 4 * 384**2 * 768), 0.01),
        # 7.5 G weights meet one token, which also meets the keys of 64 others.
        (LLAMA, 1, 1, 64, 2 * 7.505e9, 0.01),
    ],
)
def test_operations_of_transformers(model, batch, size, past, operations, tolerance):
    nodes = operators(model, batch, size, past)
    assert total(count_nodes(nodes)).operations == pytest.approx(operations, rel=tolerance)


def test_a_description_of_another_architecture_is_no_transformer() -> None:
    assert parse_architecture("decoder MoE: 27 layers, d=2048, 16 heads, 64 routed top-6, expert FFN 1408") is None
    assert parse_architecture("ResNet-18 (1.82 GMAC, 11.7M params)") is None
    image = parse_architecture(
        "ViT-Base/32 at 384x384: conv 32x32/32 patch embed, d=768, 12 layers, 12 heads, FFN 3072"
    )
    assert image is not None and (image.patch, image.layers, image.is_decoder) == (32, 12, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("call", 8, 128, 4.0)),
        ({"unit": "images/s", "value": "200", "input": "224x224x3", "statistic": "throughput"}, ("call", 8, 224, 40.0)),
        ({"unit": "tokens/s", "value": "50", "batch": "1", "input": "tg128", "statistic": "generation throughput"},
         ("decode", 1, 1, 20.0)),
        ({"unit": "tokens/s", "value": "1000", "batch": "1", "input": "pp512", "statistic": "prompt throughput"},
         ("prefill", 1, 512, 512.0)),
        ({"input": "sequence 128, padding tokens removed before GEMMs"}, "its input is not known exactly"),
        ({"statistic": "offline throughput", "unit": "samples/s"}, "not the time of one call"),
        ({"note": "clocks throttled"}, "its source doubts it"),
        ({"precision": "ternary"}, "an unknown precision"),
    ],
)  # fmt: skip
def test_rows_become_times_of_a_call(changes: dict[str, str], expected: tuple[object, ...] | str) -> None:
    row = _measurement({**ROW, **changes}, BERT, "a source")
    if isinstance(expected, str):
        assert row == expected
    else:
        assert (row.phase, row.batch, row.size, row.ms) == expected and row.runtime == "tensorrt"


def test_the_table_is_whole_and_has_no_row_twice() -> None:
    rows, left_out = load()
    assert len(rows) + sum(left_out.values()) == 5368 and len(rows) > 4000
    assert all(row.ms > 0 and row.source and row.batch > 0 for row in rows)
    assert len(set(rows)) == len(rows)
