"""The reference: a product and a copy, timed beside every measurement, which tell the machine's speed at that moment.

Processors change their speed within minutes: clocks, heat, a neighbour on the same hardware, a virtual machine that was
moved. What is compared over longer than a moment is compared as a multiple of the reference.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from edgeformer.backends import default_provider
from edgeformer.formats.device import Response, Speed
from edgeformer.stages.profiling.estimating.chains import matmul_chain

# 67 million operations and 4 MiB read and written: half a millisecond each on one core of 2020's desktops.
_ROWS, _WIDTH, _COPIED = 128, 512, 1 << 20
# Each of the two, for so long: a few calls say more of themselves than of the machine.
_PROBE_S, _FEWEST_CALLS = 0.01, 3

UNMOVED = Response()
"""Times as they were taken, whatever the speed."""


class Reference:
    """The product and the copy, opened once; :meth:`speed` takes twenty milliseconds.

    One thread computes, however many the measured artifact has: so a speed means the same everywhere, and threads of
    another session, which look out for work for a while after a call, are not in its way.
    """

    def __init__(self) -> None:
        from edgeformer.backends.onnxruntime.session import OnnxSession

        with tempfile.TemporaryDirectory(prefix="edgeformer-reference-") as folder:
            file = Path(folder) / "reference.onnx"
            file.write_bytes(matmul_chain(_WIDTH, 1))
            self._session = OnnxSession(file, default_provider("cpu"), 1)
        self._fed = {"x": np.random.default_rng(0).normal(size=(_ROWS, _WIDTH)).astype(np.float32)}
        self._source, self._target = np.ones(_COPIED, np.float32), np.zeros(_COPIED, np.float32)
        self.speed()

    def speed(self) -> Speed:
        """The median of some calls of each, in microseconds."""
        product_us = self._median_us(lambda: self._session.run(self._fed))
        return Speed(product_us=product_us, copy_us=self._median_us(lambda: np.copyto(self._target, self._source)))

    def close(self) -> None:
        """Give the memory back."""
        self._session.close()

    def _median_us(self, call: Callable[[], object]) -> float:
        times: list[int] = []
        ending = time.perf_counter() + _PROBE_S
        while time.perf_counter() < ending or len(times) < _FEWEST_CALLS:
            began = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - began)
        return max(1.0, median(times)) / 1000


def slowness(speed: Speed, reference: Speed, response: Response) -> float:
    """How many times longer a call takes at ``speed`` than at ``reference``.

    Args:
        speed: at some moment.
        reference: at another one.
        response: of calls to the two parts of a speed.
    """
    product, copy = speed.product_us / reference.product_us, speed.copy_us / reference.copy_us
    return float(product**response.of_product * copy**response.of_copy)


def typical(speeds: Sequence[Speed]) -> Speed:
    """The median of each part. Raises ValueError where there is none."""
    if not speeds:
        raise ValueError("no speed was measured")
    return Speed(
        product_us=median(speed.product_us for speed in speeds), copy_us=median(speed.copy_us for speed in speeds)
    )


def between(before: Speed, after: Speed) -> Speed:
    """What held while something was measured between the two: their geometric mean."""
    return Speed(
        product_us=math.sqrt(before.product_us * after.product_us), copy_us=math.sqrt(before.copy_us * after.copy_us)
    )


# Of one group the best cut explains at most about 64 % of the variance (normal) or 75 % (uniform).
_EXPLAINED, _LEAST_GAP, _LEAST_SHARE, _FEWEST = 0.85, 1.08, 0.1, 10


def two_speeds(speeds: Sequence[Speed]) -> tuple[Speed, Speed] | None:
    """The fast and the slow one, where a machine has two; None: it has one, or too little was seen.

    The cut with the largest variance between two groups (Otsu 1979) must explain nearly all of it, their medians must
    lie 8 % apart, and each must hold a tenth of the probes.

    Args:
        speeds: of many moments, in any order.
    """
    if len(speeds) < _FEWEST:
        return None
    ordered = sorted(speeds, key=lambda speed: speed.product_us)
    logs = np.log([speed.product_us for speed in ordered])
    whole = float(np.square(logs - logs.mean()).sum())
    least = max(2, math.ceil(_LEAST_SHARE * len(ordered)))
    cuts = {
        cut: sum(float(np.square(part - part.mean()).sum()) for part in (logs[:cut], logs[cut:]))
        for cut in range(least, len(ordered) - least + 1)
    }
    if not cuts or whole <= 0:
        return None
    cut = min(cuts, key=lambda place: cuts[place])
    fast, slow = typical(ordered[:cut]), typical(ordered[cut:])
    if 1 - cuts[cut] / whole < _EXPLAINED or slow.product_us < _LEAST_GAP * fast.product_us:
        return None
    return fast, slow
