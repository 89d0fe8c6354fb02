"""Model families: configuration, torch module, what can be exported of it."""
