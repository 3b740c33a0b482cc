"""How every failure of the command looks: one line on standard error, and exit code 1. Without a
verb there is the help instead."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from pdserve.errors import ConfigError, PdserveError
from pdserve.models import ModelError


class CliError(Exception):
    """What the user must know, in one line."""


_TOLD = (CliError, ConfigError, ModelError, PdserveError, TyperException)
"""Their message says all; of any other exception the type is shown too."""


class OneLineErrors(TyperGroup):
    """The group of all verbs. PDSERVE_DEBUG=1 shows the traceback instead of the line."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except Abort:
            code = 130
        except Exception as error:
            if os.environ.get("PDSERVE_DEBUG") == "1":
                raise
            if _is_help(error):
                print(error)
            else:
                print(f"pdserve: error: {one_line(error)}", file=sys.stderr)
            code = 1
        sys.exit(code)


def _is_help(error: Exception) -> bool:
    """Whether a group was called without a verb: its help is raised then."""
    context = getattr(error, "ctx", None)
    return context is not None and str(error) == context.get_help()


def one_line(error: Exception) -> str:
    """The error in one line."""
    from pydantic import ValidationError

    from pdserve.section import in_words

    if isinstance(error, TyperException):
        if isinstance(error.__cause__, ValidationError):  # of a flag, by pydantic in typer
            error.message = in_words(error.__cause__)
        text = error.format_message()
    elif isinstance(error, _TOLD):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())
