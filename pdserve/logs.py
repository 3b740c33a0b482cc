"""Logs of every process: to standard error, as JSON lines or, on a terminal, for people."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

from pdserve.config import LogConfig

_SECRETS = frozenset({"authorization", "key", "api_key", "fleet_key", "password", "token"})


def configure(config: LogConfig, **fields: str) -> None:
    """Sets structlog and the standard library's logging up; `fields` go into every line.

    Standard output stays free: it is for what a process tells its parent.
    """
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        _adder(fields),
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _hide_secrets,
    ]
    last: list[Processor] = (
        # Without rich's tracebacks: they show the values of variables, keys among them.
        [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=config.level, force=True)


def _adder(fields: Mapping[str, str]) -> Processor:
    def add(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return add


def _hide_secrets(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    # Nobody should log one; this is for the day when somebody does.
    for name in _SECRETS.intersection(event):
        event[name] = "***"
    return event
