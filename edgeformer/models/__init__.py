"""torch modules: layers, the encoder, and counting their parameters. Configs stay outside the model classes."""
