"""The version of the package; kept apart from ``__init__`` so that modules below the API can import it."""

__version__ = "0.1.0"
