"""Real machines over SSH: install edgeformer there, send bundles, run commands, bring the results back."""
