"""`python -m benchmarks studies NAME` makes a study."""

from benchmarks.studies.study import main

if __name__ == "__main__":
    raise SystemExit(main())
