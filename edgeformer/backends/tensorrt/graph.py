"""An engine of a decode or step graph: what is kept of earlier tokens stays on the card from one call to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.backends.feeding import KEPT
from edgeformer.backends.session import Array
from edgeformer.backends.tensorrt.session import TensorRTSession
from edgeformer.backends.tensorrt.state import Package
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine.cuda_driver import Cuda, DeviceMemory

_KEPT_ON = "present"
"""How the names of outputs begin that are inputs of the next call."""

_LEAST_BYTES = 1024


class OnCard:
    """An output that was left on the card, to go into the next call in place of an array.

    Its memory is given back to its session when nobody holds it any more.
    """

    def __init__(self, session: TensorRTGraph, memory: DeviceMemory, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.memory, self.shape, self.dtype = memory, shape, dtype
        self._session = session

    def __del__(self) -> None:
        self._session.take_back(self.memory)


class TensorRTGraph(TensorRTSession):
    """An engine whose ``past…`` inputs are its ``present…`` outputs of the call before.

    Those outputs are :class:`OnCard`, all others arrays. A first call takes :meth:`empty` ones. A cache is read from
    one block of memory and written, one token longer, to another: blocks grow by doubling, and are used again.

    Args:
        path: the .engine file.
        runtime: the TensorRT that runs it.
        artifact: its entry in the manifest, or the one of the step artifact that it is a part of.
        max_positions: longest text that the model takes; None: not known.
        repeated_shapes: as of :class:`TensorRTSession`; an engine with caches is opened alike with and without.

    Raises:
        ArtifactError: the file is missing, damaged, or TensorRT refuses it.
        EdgeformerError: the GPU or its driver fails, or has too little memory.
    """

    def __init__(
        self,
        path: Path,
        runtime: Package,
        artifact: ArtifactManifest,
        max_positions: int | None = None,
        *,
        repeated_shapes: bool = False,
    ) -> None:
        self.max_positions = max_positions
        self._free: dict[int, list[DeviceMemory]] = {}
        self._blocks: list[DeviceMemory] = []
        self._next: dict[str, DeviceMemory] = {}
        # Its own names hold: the manifest's are those of one part of several.
        unnamed = artifact.model_copy(update={"inputs": {}, "outputs": {}})
        super().__init__(path, runtime, unnamed, repeated_shapes=repeated_shapes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the engine's inputs."""
        return tuple(one.name for one in self._inputs)

    def most_tokens(self) -> int | None:
        """What the engine was built for. See :meth:`Session.most_tokens`."""
        largest = [one.largest for one in self._inputs if not one.name.startswith(KEPT)]
        return min((sizes[1] for sizes in largest if len(sizes) > 1), default=None)

    def empty(self, name: str, rows: int) -> Array:
        """What a ``past…`` input holds at the start of ``rows`` texts: zeros, and nothing along a dynamic axis."""
        one = next(one for one in self._inputs if one.name == name)
        sizes = zip(one.smallest[1:], one.largest[1:], strict=True)
        return np.zeros((rows, *(low if low == high else 0 for low, high in sizes)), one.dtype)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """As :meth:`Session.run`; ``present…`` outputs are :class:`OnCard`."""
        try:
            return super().run(inputs)
        finally:
            self._return_unused()

    def device_ms(self, inputs: Mapping[str, Array]) -> float:
        """As :meth:`Session.device_ms`; nothing is kept of the call."""
        try:
            return super().device_ms(inputs)
        finally:
            self._return_unused()

    def memory_by_name(self) -> dict[str, int]:
        """As :meth:`Session.memory_by_name`, with what is kept of earlier tokens."""
        return {**super().memory_by_name(), "kept of earlier tokens": sum(block.size for block in self._blocks)}

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.make_current()
            for block in self._blocks:
                block.free()
            self._blocks, self._free, self._next = [], {}, {}
        super().close()

    def take_back(self, memory: DeviceMemory) -> None:
        """Memory of an output that nobody needs any more, for a later one; of a closed session it is freed already."""
        if any(memory is block for block in self._blocks):
            self._free.setdefault(memory.size, []).append(memory)

    def _put(self, cuda: Cuda, own: str, array: Any) -> Any:
        if isinstance(array, OnCard):
            self._context.set_tensor_address(own, array.memory.address)
            return array
        kept = super()._put(cuda, own, array)
        if own.startswith(KEPT):  # the call before may have read it elsewhere
            self._context.set_tensor_address(own, self._buffers[own].address)
        return kept

    def _make_room(self, cuda: Cuda, own: str, size: int) -> None:
        if own.startswith(_KEPT_ON):
            block = self._next[own] = self._block(cuda, size)
            self._context.set_tensor_address(own, block.address)
        else:
            super()._make_room(cuda, own, size)

    def _fetch(self, cuda: Cuda, own: str, shape: tuple[int, ...]) -> Array:
        if own not in self._next:
            return super()._fetch(cuda, own, shape)
        kept: Any = OnCard(self, self._next.pop(own), shape, self._outputs[own])
        return kept  # type: ignore[no-any-return]

    def _block(self, cuda: Cuda, size: int) -> DeviceMemory:
        """Memory of at least ``size`` bytes that nobody holds."""
        wanted = max(_LEAST_BYTES, 1 << (size - 1).bit_length()) if size else _LEAST_BYTES
        if free := self._free.get(wanted):
            return free.pop()
        block = DeviceMemory(cuda, wanted)
        self._blocks.append(block)
        return block

    def _return_unused(self) -> None:
        for own in list(self._next):
            self.take_back(self._next.pop(own))
