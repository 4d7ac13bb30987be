"""``python -m lightning_3d train ...``: the same as ``lightning-3d train ...``."""

import sys

from lightning_3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
