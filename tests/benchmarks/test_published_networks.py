"""The listed public networks have the parameters and the multiply-accumulates that their authors published."""

import pytest

from benchmarks.published.networks import list_network, networks, normalised
from edgeformer.estimate.operators import count_nodes

PARAMETERS, GMAC = 0.02, 0.05  # the published figures are rounded, and some count normalisation
TRANSPOSED = 0.1  # a transposed convolution is listed as a convolution of its output
ROWS = {row["network"]: row for row in networks().values()}
CHECKED = [name for name, row in ROWS.items() if row["published_parameters"]]


@pytest.mark.parametrize("name", CHECKED)
def test_sizes_are_the_published_ones(name: str) -> None:
    row = ROWS[name]
    assert int(row["parameters"]) / 1e6 == pytest.approx(float(row["published_parameters"]), rel=PARAMETERS)
    nodes = list_network(name, 1, int(row["side"]))
    operations = sum(work.operations for work in count_nodes(nodes) if is_product(work))
    if row["published_gmac"]:
        tolerance = TRANSPOSED if name.endswith("-seg") else GMAC
        assert operations / 2e9 == pytest.approx(float(row["published_gmac"]), rel=tolerance)
    if (pair := list_network(name, 2, int(row["side"]))) is not None:
        assert sum(work.operations for work in count_nodes(pair) if is_product(work)) == 2 * operations


def is_product(work: object) -> bool:
    return bool(getattr(work, "is_product", False) or getattr(work, "trust", "") in ("convolution", "narrow"))


def test_every_network_is_checked_against_what_was_published() -> None:
    # MLPerf states neither figure for its RetinaNet; the same modules listed the published one with ResNet-50.
    assert {*ROWS} - {*CHECKED} == {"retinanetresnext50"}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ResNet-50 (4.1 GMAC, 25.6M params)", "ResNet-50 v1.5"), ("ResNet50", "ResNet-50 v1.5"),
        ("ResNet-50 v1.5", "ResNet-50 v1.5"), ("ResNet50 v1", "ResNet-50 v1"), ("MobileNetV1 1.0", "MobileNetV1"),
        ("MobileNet v2", "MobileNetV2"), ("mobilenetv2_100", "MobileNetV2"), ("VGG-16", "VGG-16"),
        ("MobileNetV3_large_x1_0", "MobileNetV3-Large"), ("SqueezeNet 1.1", "SqueezeNet v1.1"),
        ("SqueezeNet", "SqueezeNet 1.0"), ("DenseNet 121", "densenet121"), ("SSD Mobilenet v2", "SSD MobileNetV2"),
    ],
)  # fmt: skip
def test_spellings_of_one_network(spelling: str, name: str) -> None:
    assert networks()[normalised(spelling)]["network"] == name


@pytest.mark.parametrize("model", ["BERT-base SQuAD", "resnet50 training step", "ResNet-50 v2", ""])
def test_other_models_are_not_listed(model: str) -> None:
    assert list_network(model, 1, 224) is None
