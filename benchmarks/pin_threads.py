"""What pinning OpenMP threads buys in CPU training."""

import argparse

from side_by_side import compare

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=5, metavar="ROUNDS")
    variants = ("unpinned", {"OMP_PROC_BIND": "false"}, []), ("pinned", {"OMP_PROC_BIND": "true"}, [])
    compare("pinning", *variants, parser.parse_args().rounds)
