"""How an engine is run and timed, with a stand-in for TensorRT and for the card: its memory lies in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.tensorrt import session as tensorrt_session
from edgeformer.runtimes.tensorrt.session import TensorRTSession


class FakeCuda:
    """A stream that does everything at once, and a clock that only the engine moves."""

    stream = 7

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.blocks: dict[int, np.ndarray[Any, Any]] = {}

    def make_current(self) -> None: ...

    def synchronise(self) -> None: ...

    def close(self) -> None:
        assert not self.blocks, "all memory was given back"

    def upload(self, array: np.ndarray[Any, Any], memory: FakeMemory) -> None:
        self.now_ms += 10.0  # copies must not count as the engine's
        self.blocks[memory.address][: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def download(self, memory: FakeMemory, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self.blocks[memory.address][:size].tobytes(), dtype).reshape(shape)

    def timed_ms(self, work: Callable[[], object]) -> float:
        started_ms = self.now_ms
        work()
        return self.now_ms - started_ms


class FakeMemory:
    def __init__(self, cuda: FakeCuda, size: int) -> None:
        self.cuda, self.size, self.address = cuda, size, 1000 + len(cuda.blocks)
        cuda.blocks[self.address] = np.zeros(size, np.uint8)

    def free(self) -> None:
        del self.cuda.blocks[self.address]


class FakeEngine:
    """logits [B, 2] = the sum of each row's ids, twice. Takes 1.5 ms; fails for the id 99."""

    num_io_tensors = 2
    device_memory_size_v2 = 4096

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.shape, self.places = cuda, (0, 0), dict[str, int]()

    def create_execution_context(self) -> FakeEngine:
        return self

    def get_tensor_name(self, index: int) -> str:
        return ("input_ids", "logits")[index]

    def get_tensor_dtype(self, name: str) -> str:
        return "int64" if name == "input_ids" else "float32"

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "input_ids" else "out"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, int]]:
        return [(1, 1), (1, 8), (4, 16)]

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        self.shape = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> None:
        self.places[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        return (self.shape[0], 2)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == FakeCuda.stream
        self.cuda.now_ms += 1.5
        ids = np.frombuffer(self.cuda.blocks[self.places[self.get_tensor_name(0)]].tobytes(), np.int64)
        rows = ids[: self.shape[0] * self.shape[1]].reshape(self.shape)
        sums = np.repeat(rows.sum(1, keepdims=True), 2, axis=1).astype(np.float32)
        self.cuda.blocks[self.places[self.get_tensor_name(1)]][: sums.nbytes] = np.frombuffer(sums.tobytes(), np.uint8)
        return 99 not in rows


class TorchEngine(FakeEngine):
    """The same, with torch-tensorrt's names."""

    def get_tensor_name(self, index: int) -> str:
        return ("input_ids", "output0")[index]


class Unnamed(FakeEngine):
    """The same, where even the input has another name."""

    def get_tensor_name(self, index: int) -> str:
        return ("x", "output0")[index]

    def get_tensor_dtype(self, name: str) -> str:
        return "int64" if name == "x" else "float32"

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name == "x" else "out"


@pytest.fixture(params=[FakeEngine, TorchEngine, Unnamed])
def session(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRTSession:
    cuda = FakeCuda()
    engine = request.param(cuda)
    trt = SimpleNamespace(
        Runtime=lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine),
        TensorIOMode=SimpleNamespace(INPUT="in"),
        nptype=np.dtype,
    )
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    log = SimpleNamespace(clear=lambda: None, last_error=lambda: "the stand-in refuses")
    monkeypatch.setattr(tensorrt_session, "tensorrt_log", lambda module: log)
    monkeypatch.setattr(tensorrt_session, "Cuda", lambda: cuda)
    monkeypatch.setattr(tensorrt_session, "DeviceMemory", FakeMemory)
    (tmp_path / "model.engine").write_bytes(b"plan")
    artifact = ArtifactManifest(
        id="engine",
        file="model.engine",
        format="tensorrt",
        precision="fp16",
        status="built",
        inputs={"input_ids": "int64[batch, sequence]"},
        outputs={"logits": "float32[batch, 2]"},
    )
    return TensorRTSession(tmp_path / "model.engine", artifact)


def text(*rows: list[int]) -> Mapping[str, np.ndarray[Any, Any]]:
    return {"input_ids": np.array(rows, dtype=np.int64)}


def test_inputs_go_in_and_outputs_come_back(session: TensorRTSession) -> None:
    assert session.run(text([1, 2, 3], [4, 5, 6]))["logits"].tolist() == [[6, 6], [15, 15]]
    assert session.run(text([7]))["logits"].tolist() == [[7, 7]]
    with pytest.raises(InputError, match=r"must be int64\[1 to 4, 1 to 16\]"):
        session.run(text([1] * 17))
    session.close()


def test_the_cards_own_time_holds_no_copies(session: TensorRTSession) -> None:
    assert session.device_ms(text([1, 2, 3])) == pytest.approx(1.5)
    with pytest.raises(EdgeformerError, match="fails to run"):
        session.device_ms(text([99]))
    session.close()
    with pytest.raises(EdgeformerError, match="closed"):
        session.device_ms(text([1]))


def test_memory_is_named_by_what_it_is_for(session: TensorRTSession) -> None:
    session.run(text([1, 2, 3], [4, 5, 6]))
    assert session.memory_by_name() == {"activations (TensorRT)": 4096, "inputs and outputs": 2 * 3 * 8 + 2 * 2 * 4}
    session.close()
