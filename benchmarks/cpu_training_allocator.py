"""What keeping freed memory buys in CPU training. Usage: python benchmarks/cpu_training_allocator.py [ROUNDS]"""

from side_by_side import compare

PINNED = {"OMP_PROC_BIND": "true"}
compare("keeping freed memory", ("default", PINNED, []), ("kept", PINNED, ["--keep-memory"]))
