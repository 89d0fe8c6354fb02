"""From a run to a bundle."""
