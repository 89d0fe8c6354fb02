"""File formats of edgeformer: models of every file, reading and writing."""
