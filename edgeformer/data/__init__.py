"""Data pipeline from files to batches: sources, cleaning, splits, tokenizers, encoded sets. Imports no torch."""
