"""What the papers claim in figures, how ours are found, and a verdict on each: docs/claims.yaml, docs/results/claims.md."""
