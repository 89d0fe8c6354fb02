"""What pinning OpenMP threads buys in CPU training. Usage: python benchmarks/pin_threads.py [ROUNDS]"""

from side_by_side import compare

KEPT = ["--keep-memory"]
compare("pinning", ("unpinned", {"OMP_PROC_BIND": "false"}, KEPT), ("pinned", {"OMP_PROC_BIND": "true"}, KEPT))
