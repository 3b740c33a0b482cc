"""What operators ask over HTTP: health, metrics, version, the state of the fleet."""

from __future__ import annotations

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import pdserve
from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.intake import Intake
from coordinator.facade.ports import Ops
from pdserve.errors import ErrorReason, RejectedError


def add_ops(app: FastAPI, intake: Intake, ops: Ops) -> None:
    """Health and version need no key, metrics any, the fleet an admin's."""

    @app.get("/health/live")
    async def live(request: Request) -> Response:
        return json_response({"status": "ok"}, request_id_header(request))

    @app.get("/health/ready")
    async def ready(request: Request) -> Response:
        is_ready, state = ops.ready()
        return json_response(state, request_id_header(request), status=200 if is_ready else 503)

    @app.get("/version")
    async def version(request: Request) -> Response:
        return json_response({"version": pdserve.__version__}, request_id_header(request))

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        intake.authenticate(request.headers.get("authorization"))
        headers = {**request_id_header(request), "content-type": CONTENT_TYPE_LATEST}
        return Response(ops.metrics(), headers=headers)

    @app.get("/fleet")
    async def fleet(request: Request) -> Response:
        if not intake.authenticate(request.headers.get("authorization")).admin:
            raise RejectedError(ErrorReason.PERMISSION_DENIED, "this needs an admin key")
        return json_response(ops.fleet(), request_id_header(request))
