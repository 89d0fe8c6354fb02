"""``python -m edgeformer``: the same as the ``edgeformer`` command."""

from edgeformer.cli import main

if __name__ == "__main__":
    main()
