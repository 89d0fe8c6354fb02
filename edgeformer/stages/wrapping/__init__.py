"""wrap: an ONNX file that somebody else made becomes a bundle. Without torch, and without the package onnx."""
