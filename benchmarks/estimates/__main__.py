"""Write docs/estimator.md and the record that the package ships from the newest measurements in benchmarks/results.

`make results` runs it.

python -m benchmarks.estimates
"""

from __future__ import annotations

from benchmarks.estimates.page import PAGE, SHIPPED, page, shipped_record
from edgeformer.artifacts.files import write_json, write_text

if __name__ == "__main__":
    write_text(PAGE, page())
    write_json(SHIPPED, shipped_record())
