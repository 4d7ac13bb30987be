"""Puts the names ``3d``, ``tp``, ``pp``, ``zero1``, ``zero2``, ``zero3`` into Lightning's registry of strategies."""

import lightning_3d_autoload


def register() -> None:
    """Make ``Trainer(strategy="3d")`` known, now or as soon as Lightning is imported; a second call changes nothing.

    With the package installed this has happened at ``import torch`` already; this call serves where that is switched
    off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) or where the package is used from a folder.
    """
    lightning_3d_autoload.install()
