"""The four stages. They never import each other: they meet on disk, in runs and bundles."""
