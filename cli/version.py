"""`pdserve version`"""

from __future__ import annotations

import pdserve


def version() -> None:
    """Prints the version."""
    print(f"pdserve {pdserve.__version__}")
