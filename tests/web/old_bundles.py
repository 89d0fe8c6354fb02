"""Small bundles that are there without training: a classifier with exits, INT8 and a trimmed vocabulary; a language
model whose weights lie beside its graphs."""

from __future__ import annotations

from pathlib import Path

_OLD = Path(__file__).resolve().parents[1] / "old_format"
CLASSIFIER, LANGUAGE = _OLD / "classifier-v1" / "bundle", _OLD / "language-v1" / "bundle"
