"""Train, export and honestly benchmark small weight-shared transformers for edge devices."""

__version__ = "0.1.0"
