"""What pinning OpenMP threads buys in CPU training. Usage: python benchmarks/pin_threads.py [ROUNDS]"""

from side_by_side import compare

compare("pinning", ("unpinned", {"OMP_PROC_BIND": "false"}, []), ("pinned", {"OMP_PROC_BIND": "true"}, []))
