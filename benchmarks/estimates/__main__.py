"""Write docs/estimator.md from the newest record in benchmarks/results; `make results` runs it.

python -m benchmarks.estimates
"""

from __future__ import annotations

from benchmarks.estimates.page import PAGE, page
from edgeformer.formats.files import write_text

if __name__ == "__main__":
    write_text(PAGE, page())
