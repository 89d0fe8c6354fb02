"""What the files mean: recipes, device profiles, manifests, reports, and the error tree. Never torch, never a runtime."""
