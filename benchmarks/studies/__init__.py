"""Studies: several runs that make one table or figure of the papers. `python -m benchmarks.studies NAME` makes one."""
