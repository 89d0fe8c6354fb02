"""From files to batches: cleaning, sources, splits, tokenizers, encoded sets. Without torch."""
