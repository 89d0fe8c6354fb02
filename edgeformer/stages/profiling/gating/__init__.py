"""The gate: a bundle against the one it shall replace, measured in turns in one run."""
