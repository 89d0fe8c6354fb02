"""The gate: compare a candidate bundle with its baseline, measured in turns in one run."""
