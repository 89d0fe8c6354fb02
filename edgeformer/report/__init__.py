"""Tables, plots and documents from manifests and reports. Nothing is measured here."""
