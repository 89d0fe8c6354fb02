"""`python -m benchmarks.studies NAME` makes a study."""

from benchmarks.studies.study import main

raise SystemExit(main())
