"""Types of the arrays that tasks read and write; docstrings give their shapes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Bools = NDArray[np.bool_]
Floats = NDArray[np.floating]
Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
RowNumbers = NDArray[np.integer]
Batch = dict[str, Int64s]
