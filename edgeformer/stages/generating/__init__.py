"""Writing text with a language model, token by token. torch only to open a run's own weights."""
