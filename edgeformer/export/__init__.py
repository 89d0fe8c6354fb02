"""Export runs and imported graphs as bundles."""
