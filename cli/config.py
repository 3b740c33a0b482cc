"""`pdserve config`"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cli.options import ConfigFile


def config(config: ConfigFile = None) -> None:
    """Prints the settings in effect and their sources."""
    import yaml

    from pdserve.config import dump, load

    settings = yaml.safe_load(dump(load(config, {})))
    from_file = yaml.safe_load(config.read_text(encoding="utf-8")) if config else None
    for section, values in settings.items():
        print(f"# {section}: {', '.join(_sources(section, config, from_file))}")
        print(yaml.safe_dump({section: values}, sort_keys=False))


def _sources(section: str, file: Path | None, content: dict[str, Any] | None) -> list[str]:
    """Where the values of a section come from, each overruled by the next."""
    sources = ["defaults"]
    if content and section in content:
        sources.append(str(file))
    prefix = f"PDSERVE_{section.upper()}"
    sources += sorted(name for name in os.environ if name.upper().split("__")[0] == prefix)
    return sources
