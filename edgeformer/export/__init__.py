"""Export runs and imported graphs as bundles; import models that were trained elsewhere."""
