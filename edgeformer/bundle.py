"""Bundle: a portable folder of artifacts with tokenizer, labels and a manifest."""

from __future__ import annotations

from pathlib import Path

from edgeformer.formats.manifest import BundleManifest
from edgeformer.formats.workspace import BUNDLE_FILE, read_manifest
from edgeformer.tasks import all_tasks


def read_bundle(folder: Path) -> BundleManifest:
    """The manifest of the bundle in ``folder``. Raises ArtifactError."""
    all_tasks()  # a manifest's scores are recognised by the tasks that are loaded
    return read_manifest(BundleManifest, folder / BUNDLE_FILE)
