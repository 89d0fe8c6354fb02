"""Parts that several model kinds share: layers, causal attention, losses of language models, tracing to ONNX."""
