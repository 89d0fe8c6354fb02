"""What the files mean: recipes, device profiles, manifests, reports, errors. Never torch, never a runtime."""
