"""Import of foreign ONNX files: sizes of inputs, golden inputs, and refused files."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from edgeformer.artifacts.errors import ArtifactError, DataError, InputError
from edgeformer.artifacts.golden import INPUT, OUTPUT
from edgeformer.artifacts.onnx_outline import Port
from edgeformer.bundle import Bundle
from edgeformer.imports.foreign_graph import GOLDEN_SEQ, Shape, find_axes, parse_range, parse_shape
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx, import_onnx_cached
from edgeformer.inference.verification import DAMAGED
from edgeformer.inference.verify import verify
from edgeformer.tasks.tensors import Axis
from tests.cli.run_cli import edgeformer, run_json
from tests.export import graphs
from tests.export.graphs import FLOAT, INT64, save, save_beside, value

SEQUENCE = [value("x", FLOAT, ["N"])], [helper.make_tensor_sequence_value_info("s", FLOAT, None)]
NON_ZERO = [value("x", graphs.BOOL, [16])], [value("w", INT64, [1, "found"])]
"""Inputs and outputs of graphs."""


def port(name: str, *shape: int | str | None) -> Port:
    return Port(name, "tensor", "float32", shape)


def test_sizes_by_name_and_by_letter() -> None:
    result = find_axes([port("x", "batch", 3, "seq_len"), port("y", "unk", 5)], {"y": ("B", 5)}, {})
    row, length = Axis(size=1, takes="batch", role="batch"), Axis(size=GOLDEN_SEQ, takes="seq", role="seq")
    assert result == {"x": (row, Axis(size=3), length), "y": (row, Axis(size=5))}
    (requested,) = find_axes([port("x", "batch", "sequence")], {"x": (1, 512)}, {}).values()
    assert requested == (Axis(size=1, role="batch"), Axis(size=512, role="seq"))
    shared = find_axes([port("x", "N", "width"), port("y", "width")], {"x": ("B", 7)}, {})
    assert shared["y"] == (Axis(size=7),)


@pytest.mark.parametrize(
    ("ports", "shapes", "message"),
    [
        ([port("x", "?", "?"), port("y", "?")], {"x": (2, 3)}, r"input 'y'.*axis 0 \(\?\)"),
        ([port("x", "width"), port("y", "width")], {"x": (7,), "y": (8,)}, "'width' is 7 in another input"),
        ([port("x", None, None), port("y", 2, "batch", "h")], {}, r"'x'.*'y'.*--shape x=Bx… --shape y=2xBx…"),
    ],
)
def test_unknown_and_conflicting_sizes(ports: list[Port], shapes: dict[str, Shape], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_axes(ports, shapes, {})


def test_parse_shape_and_range() -> None:
    assert parse_shape("x=1x512") == ("x", (1, 512)) and parse_shape("a=b=Bx3xS") == ("a=b", ("B", 3, "S"))
    assert parse_shape("x=7") == ("x", (7,)) and parse_shape("x=") == ("x", ())
    assert parse_range("x=0:9") == ("x", (0, 9)) and parse_range("x=-1.5") == ("x", (-1.5, -1.5))
    for text in ("x", "=3", "x=0x3", "x=-1", "x=1y2", "x=1xb"):
        with pytest.raises(InputError, match="write NAME=SIZE"):
            parse_shape(text)
    for text in ("x", "x=9:0", "x=a", "x=0:inf", "=1:2", "x=1:2:3"):
        with pytest.raises(InputError, match="write NAME=LOW:HIGH"):
            parse_range(text)


def wrapped(tmp_path: Path, graph: onnx.ModelProto, **options: object) -> Bundle:
    import_onnx(save(tmp_path / "theirs", graph), tmp_path / "bundle", OnnxImportOptions(**options))  # type: ignore[arg-type]
    return Bundle.open(tmp_path / "bundle")


@pytest.mark.parametrize(("axis", "is_noted"), [(0, True), (1, False)])
def test_rows_that_change_each_other_are_noted(tmp_path: Path, axis: int, is_noted: bool) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[axis], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    ports = [value("x", FLOAT, ["N", 4])], [value("y", FLOAT, ["N", 4])]
    notes = " ".join(wrapped(tmp_path, graphs.model(nodes, *ports)).manifest.notes)
    assert ("batch: the other rows of a call change 'y'" in notes) == is_noted


class TestWhatItHolds:
    def test_a_net_of_convolutions(self, tmp_path: Path) -> None:
        bundle = wrapped(tmp_path, graphs.convolutions())
        (artifact,) = bundle.artifacts
        assert (bundle.name, bundle.task.name, bundle.manifest.wrapped) == ("net", "tensors", "net.onnx")
        assert (tmp_path / "bundle/onnx/model.onnx").read_bytes() == (tmp_path / "theirs/net.onnx").read_bytes()
        assert (artifact.id, artifact.inputs) == ("onnx-fp32", {"x": "float32[batch, 3, 16, 16]"})
        assert bundle.manifest.proof is None, "that is of texts"
        stored = 8 * 27 + 8 + 8 * 9 + 32 + 4
        assert bundle.manifest.parameters == stored and artifact.sharing is not None
        assert artifact.sharing.weight_bytes == 4 * stored
        golden = bundle.golden()
        assert golden.arrays[f"{INPUT}x"].shape == (8, 1, 3, 16, 16) and len(golden) == 8
        assert np.allclose(golden.arrays[f"{OUTPUT}probabilities"].sum(-1), 1)
        assert artifact.parity is not None and artifact.parity.top1_agreement == 1.0
        assert verify(bundle).exit_code == 0
        for seed, is_same in ((0, True), (1, False)):
            other = wrapped(tmp_path / str(seed), graphs.convolutions(), seed=seed).golden().arrays[f"{INPUT}x"]
            assert np.array_equal(golden.arrays[f"{INPUT}x"], other) == is_same

    def test_recurrent_state_and_scalar_inputs(self, tmp_path: Path) -> None:
        bundle = wrapped(
            tmp_path, graphs.recurrent(), shapes={"x": (5, 1, 4)}, ranges={"rate": (16000, 16000)}
        )  # `batch` of x is that of the states
        golden = bundle.golden().arrays
        assert golden[f"{INPUT}h"].shape == (8, 1, 1, 8) and golden[f"{INPUT}rate"].tolist() == [16000] * 8
        assert golden[f"{OUTPUT}answer"].shape == (8, 5, 1, 8)
        assert verify(bundle).exit_code == 0

    @pytest.mark.parametrize("graph", [graphs.branching(), graphs.looping()], ids=["If", "Loop"])
    def test_subgraphs(self, tmp_path: Path, graph: onnx.ModelProto) -> None:
        bundle = wrapped(tmp_path, graph)
        assert verify(bundle).exit_code == 0
        assert any("If, Loop or Scan" in note for note in bundle.manifest.notes)
        assert bundle.manifest.parameters >= 36, "weights inside of a branch count"

    @pytest.mark.parametrize("is_bool", [False, True])
    def test_token_ids_by_their_table_and_several_outputs(self, tmp_path: Path, is_bool: bool) -> None:
        graph = graphs.embedding(rows=40)
        if is_bool:
            graph.graph.input[1].type.tensor_type.elem_type = graphs.BOOL
        bundle = wrapped(tmp_path, graph)
        golden = bundle.golden().arrays
        ids, mask = golden[f"{INPUT}input_ids"], golden[f"{INPUT}attention_mask"]
        assert ids.min() >= 0 and ids.max() == 39 and mask.all() and (mask.dtype == bool) == is_bool
        assert golden[f"{OUTPUT}largest"].dtype == np.int64
        assert verify(bundle).exit_code == 0

    def test_external_weights_are_copied(self, tmp_path: Path) -> None:
        path = save_beside(tmp_path / "theirs", graphs.convolutions(), "net.weights")
        import_onnx(path, tmp_path / "bundle")
        bundle = Bundle.open(tmp_path / "bundle")
        (artifact,) = bundle.artifacts
        assert artifact.weights_file == "onnx/net.weights"
        assert artifact.size_bytes == path.stat().st_size + (path.parent / "net.weights").stat().st_size
        assert verify(bundle).exit_code == 0
        weights = tmp_path / "bundle/onnx/net.weights"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
        assert verify(Bundle.open(tmp_path / "bundle")).exit_code == DAMAGED

    def test_given_inputs(self, tmp_path: Path) -> None:
        x = np.arange(2 * 3 * 16 * 16, dtype=np.float32).reshape(2, 3, 16, 16)
        np.savez(tmp_path / "one.npz", x=x)
        np.savez(tmp_path / "three.npz", x=np.stack([x, x + 1, x + 2]), unused=np.zeros(3))
        item = wrapped(tmp_path / "1", graphs.convolutions(), inputs=tmp_path / "one.npz").golden()
        assert np.array_equal(item.arrays[f"{INPUT}x"], x[None])
        assert len(wrapped(tmp_path / "3", graphs.convolutions(), inputs=tmp_path / "three.npz").golden()) == 3


def one_node(operator: str, kind: int = FLOAT, domain: str = "", opset: int = 17) -> onnx.ModelProto:
    """x [N] → operator → y [N]."""
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    domains = {domain: 1} if domain else None
    return graphs.model([node], [value("x", kind, ["N"])], [value("y", kind, ["N"])], opset=opset, domains=domains)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("graph", "says"),
        [
            (graphs.convolutions(None), r"axis 0 \(without a name\) is unknown.*--shape x=Bx3x16x16"),
            (graphs.convolutions("unk__7"), r"axis 0 \(unk__7\)"),
            (graphs.recurrent(), r"input 'x'.*axis 0 \(steps\).*--shape x=…xBx4"),
            (one_node("Identity", graphs.STRING), "input 'x' is a tensor of string"),
            (graphs.model(graphs.nodes("s = SequenceConstruct(x)"), *SEQUENCE), "output 's' is a sequence"),
            (one_node("Strange", domain="their.own"), r"their\.own\.Strange \(1\)"),
            (one_node("NoSuchThing"), "NoSuchThing"),
            (one_node("Relu", opset=99), "pset"),
            (one_node("RandomNormalLike"), "different outputs for the same inputs"),
            (
                graphs.model(graphs.nodes("w = NonZero(x)"), *NON_ZERO),
                "output 'w' depends on the input values",
            ),
        ],
    )
    def test_graphs(self, tmp_path: Path, graph: onnx.ModelProto, says: str) -> None:
        with pytest.raises(InputError, match=says):
            wrapped(tmp_path, graph)
        assert not (tmp_path / "bundle").exists()
        assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["net.onnx"], "nothing lies beside their file"

    def test_integers_need_a_range(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"input 'rate' \(int64\).*--range rate=0:"):
            wrapped(tmp_path, graphs.recurrent(), shapes={"x": (5, 1, 4)})

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"shapes": {"y": (1,)}}, "no such input; it has x"),
            ({"shapes": {"x": (1, 3, 16)}}, r"--shape x=1x3x16: the graph takes float32\[batch, 3, 16, 16\]"),
            ({"shapes": {"x": (1, 4, 16, 16)}}, "--shape x=1x4x16x16: the graph takes"),
            ({"ranges": {"y": (0, 1)}}, "no such input; it has x"),
            ({"labels": ("a", "b")}, "a text classifier needs both"),
            ({"data": Path("d.tsv")}, "need a tokenizer and labels"),
            ({"inputs": Path("none.npz")}, "No such file"),
        ],
    )
    def test_options(self, tmp_path: Path, options: dict[str, object], says: str) -> None:
        with pytest.raises(InputError, match=says):
            wrapped(tmp_path, graphs.convolutions(), **options)

    @pytest.mark.parametrize(
        ("arrays", "says"),
        [
            ({"z": np.zeros(3)}, "lacks the array 'x'"),
            ({"x": np.zeros((1, 3, 16, 16), np.complex64)}, "the graph takes float32"),
            ({"x": np.zeros((0, 3, 16, 16), np.float32)}, "is empty"),
            ({"x": np.zeros((1, 3, 8, 16), np.float32)}, "array 'x' 1x3x8x16: the graph takes"),
            ({"x": np.zeros((3, 16), np.float32)}, "array 'x' 16: the graph takes"),
            ({"x": np.array([{}], object)}, "cannot be read"),
        ],
    )
    def test_given_inputs(self, tmp_path: Path, arrays: dict[str, object], says: str) -> None:
        np.savez(tmp_path / "given.npz", **arrays)  # type: ignore[arg-type]
        with pytest.raises((DataError, InputError), match=says):
            wrapped(tmp_path, graphs.convolutions(), inputs=tmp_path / "given.npz")

    @pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "gone.weights", "C:x", "./net.weights"])
    def test_weights_outside_the_folder(self, tmp_path: Path, location: str) -> None:
        path = save_beside(tmp_path / "theirs", graphs.convolutions())
        (tmp_path / "secret").write_bytes(b"\0" * 4096)
        graph = onnx.load(path, load_external_data=False)
        for tensor in graph.graph.initializer:
            for entry in tensor.external_data:
                entry.value = location if entry.key == "location" else entry.value
        path.write_bytes(graph.SerializeToString())
        with pytest.raises(ArtifactError, match=r"reads weights from|weights file .* is missing"):
            import_onnx(path, tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()

    def test_weights_with_the_name_of_the_graph_or_behind_a_link(self, tmp_path: Path) -> None:
        path = save_beside(tmp_path / "theirs", graphs.convolutions(), "model.onnx")
        with pytest.raises(InputError, match=r"its weights file has the name model\.onnx"):
            import_onnx(path, tmp_path / "bundle")
        path = save_beside(tmp_path / "theirs", graphs.convolutions())
        (tmp_path / "theirs/net.weights").rename(tmp_path / "secret")
        (tmp_path / "theirs/net.weights").symlink_to(tmp_path / "secret")
        with pytest.raises(ArtifactError, match="outside of its folder"):
            import_onnx(path, tmp_path / "bundle")

    @pytest.mark.parametrize("content", [b"", b"no graph at all", b"\x3a\xff\xff\xff\xff\x0f"])
    def test_no_graph(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "net.onnx"
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match="not an ONNX graph"):
            import_onnx(path, tmp_path / "bundle")

    def test_existing_folder_needs_replace(self, tmp_path: Path) -> None:
        path = save(tmp_path / "theirs", graphs.convolutions())
        import_onnx(path, tmp_path / "bundle")
        with pytest.raises(InputError, match="--replace"):
            import_onnx(path, tmp_path / "bundle")
        import_onnx(path, tmp_path / "bundle", OnnxImportOptions(seed=1, replace=True))
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/notes.txt").write_text("mine")
        with pytest.raises(InputError, match="no bundle"):
            import_onnx(path, tmp_path / "mine", OnnxImportOptions(replace=True))
        assert (tmp_path / "mine/notes.txt").read_text() == "mine"


def test_one_cached_bundle_for_the_same_file_and_options(tmp_path: Path) -> None:
    path, artifacts = save(tmp_path / "theirs", graphs.convolutions()), tmp_path / "artifacts"
    first = import_onnx_cached(path, artifacts, OnnxImportOptions())
    created = Bundle.open(first).manifest.created
    assert import_onnx_cached(path, artifacts, OnnxImportOptions()) == first
    assert Bundle.open(first).manifest.created == created and first.parent == artifacts / "wrapped"
    assert import_onnx_cached(path, artifacts, OnnxImportOptions(shapes={"x": (2, 3, 16, 16)})) != first
    (first / "onnx/model.onnx").write_bytes(b"damaged")
    assert import_onnx_cached(path, artifacts, OnnxImportOptions()) == first
    assert verify(Bundle.open(first)).exit_code == 0


class TestCommands:
    def test_import_and_commands_that_need_text(self, tmp_path: Path) -> None:
        save(tmp_path, graphs.convolutions())
        refused = edgeformer("verify", "net.onnx", cwd=tmp_path)
        assert refused.code == 2 and "edgeformer import onnx net.onnx -o BUNDLE" in refused.err
        document = run_json("import", "onnx", "net.onnx", "-o", "bundle", cwd=tmp_path)
        assert document["bundle"] == "bundle" and document["artifacts"][0]["status"] == "built"
        for command in (["evaluate", "bundle"], ["predict", "bundle", "a text"], ["generate", "bundle", "a"]):
            refused = edgeformer(*command, cwd=tmp_path)
            assert refused.code == 2 and "graph without a tokenizer" in refused.err, refused.err
