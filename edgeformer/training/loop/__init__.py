"""Training itself: the loop with its steps, checkpoints and processes, and the fit of models that take no steps."""
