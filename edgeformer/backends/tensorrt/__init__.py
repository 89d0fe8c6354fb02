"""TensorRT, TensorRT for RTX, and torch-tensorrt."""
