"""Quantitative claims of the papers with measured figures and verdicts: docs/claims.yaml, docs/results/claims.md."""
