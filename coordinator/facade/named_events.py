"""Server-sent events that have a name, as both Responses and Messages do."""

from __future__ import annotations

from typing import Any

import orjson


def named_event(kind: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
