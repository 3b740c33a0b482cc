"""The dashboard: one page without data, and the data that it asks for every two seconds."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from importlib.resources import files

from fastapi import FastAPI, Request
from starlette.responses import Response

from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.ports import Ops

_PAGE = (files(__package__) / "dashboard.html").read_text(encoding="utf-8")


def add_dashboard(app: FastAPI, require_admin: Callable[[Request], None], ops: Ops) -> None:
    """The page needs no key: it asks for one where its data does. `require_admin` raises
    RejectedError for anybody else."""
    # Nothing but what is in the file runs, whatever gets into the page, and it talks to us alone.
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash('script')}",
            f"style-src {_hash('style')}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "content-security-policy": policy,
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    @app.get("/dashboard")
    async def page(request: Request) -> Response:
        return Response(_PAGE, headers=headers | request_id_header(request))

    @app.get("/dashboard/data")
    async def data(request: Request) -> Response:
        require_admin(request)
        return json_response(await ops.dashboard(), request_id_header(request))


def _hash(tag: str) -> str:
    """Of the page's one element of that name, as a content security policy has it."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", _PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
