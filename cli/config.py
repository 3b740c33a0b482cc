"""`pdserve config`"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.options import ConfigFile

if TYPE_CHECKING:
    from pydantic import BaseModel


def config(config: ConfigFile = None) -> None:
    """Prints the settings in effect, what they mean and where they come from."""
    import yaml

    from pdserve.config import Settings, dump, load

    settings = yaml.safe_load(dump(load(config, {})))
    # What the engine that is not used would be set to is of no interest.
    del settings["worker"]["sim" if settings["worker"]["engine"] == "vllm" else "vllm"]
    from_file = yaml.safe_load(config.read_text(encoding="utf-8")) if config else None
    print("# In a file for --config, or as PDSERVE_SECTION__FIELD: PDSERVE_WORKER__LEASE_S=10\n")
    for section, values in settings.items():
        print(f"# {section}: {', '.join(_sources(section, config, from_file))}")
        print("\n".join(_explained({section: values}, Settings)), end="\n\n")


def _explained(values: dict[str, Any], model: type[BaseModel], indent: str = "") -> Iterator[str]:
    """The lines of these fields of a model as YAML, each with its description."""
    import yaml
    from pydantic import BaseModel

    for name, value in values.items():
        field = model.model_fields[name]
        note = f"  # {field.description}" if field.description else ""
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield f"{indent}{name}:{note}"
            yield from _explained(value, section, f"{indent}  ")
            continue
        first, *more = yaml.safe_dump({name: value}, sort_keys=False).splitlines()
        yield f"{indent}{first}{note}"
        yield from (f"{indent}{line}" for line in more)


def _sources(section: str, file: Path | None, content: dict[str, Any] | None) -> list[str]:
    """Where the values of a section come from, each overruled by the next."""
    sources = ["defaults"]
    if content and section in content:
        sources.append(str(file))
    prefix = f"PDSERVE_{section.upper()}"
    sources += sorted(name for name in os.environ if name.upper().split("__")[0] == prefix)
    return sources
