"""Import models that were trained elsewhere: as runs encoders, language models and CRT checkpoints, ONNX as bundles."""
