"""Write the pages on estimates and the record in the package from the newest measurements in benchmarks/results.

`make results` runs it.

python -m benchmarks.estimates
"""

from __future__ import annotations

from benchmarks.estimates.page import EXPLANATION, PAGE, SHIPPED, explanation, page, shipped_record
from edgeformer.artifacts.files import write_json, write_text

if __name__ == "__main__":
    write_text(PAGE, page())
    write_text(EXPLANATION, explanation())
    write_json(SHIPPED, shipped_record())
