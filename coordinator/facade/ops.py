"""What operators ask over HTTP: health, metrics, version, the state of the fleet."""

from __future__ import annotations

import math

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import pdserve
from coordinator.facade.dashboard import add_dashboard
from coordinator.facade.experiments_http import add_experiments
from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.intake import Intake
from coordinator.facade.ports import Ops
from pdserve.errors import ErrorReason, RejectedError

MAX_DRAIN_S = 24 * 3600.0
LATEST_S = 9e12
"""Seconds; no ledger has a later entry."""
_INDEX = {
    "name": "pdserve",
    "version": pdserve.__version__,
    "models": "/v1/models",
    "api": "/openapi.json",
    "dashboard": "/dashboard",
    "ready": "/health/ready",
    "metrics": "/metrics",
}
"""Where to go on, for whoever opens the bare address."""


def add_ops(app: FastAPI, intake: Intake, ops: Ops) -> None:
    """Health and version need no key, metrics any; fleet, experiments and usage an admin's."""

    @app.get("/")
    async def index(request: Request) -> Response:
        return json_response(_INDEX, request_id_header(request))

    @app.get("/health/live")
    async def live(request: Request) -> Response:
        return json_response({"status": "ok"}, request_id_header(request))

    @app.get("/health", summary="Ready, under the name that vLLM's server has for it")
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

    _add_fleet(app, intake, ops)


def _add_fleet(app: FastAPI, intake: Intake, ops: Ops) -> None:
    def require_admin(request: Request) -> None:
        if not intake.authenticate(request.headers.get("authorization")).admin:
            raise RejectedError(ErrorReason.PERMISSION_DENIED, "this needs an admin key")

    @app.get("/fleet")
    async def fleet(request: Request) -> Response:
        require_admin(request)
        return json_response(ops.fleet(), request_id_header(request))

    @app.get("/fleet/requests")
    async def requests(request: Request) -> Response:
        require_admin(request)
        return json_response(ops.requests(), request_id_header(request))

    @app.get("/fleet/requests/{asked_id:path}")
    async def one_request(request: Request, asked_id: str) -> Response:
        require_admin(request)
        return json_response(ops.request(asked_id), request_id_header(request))

    # Not POST: that a page in a browser on this machine may send unasked, where no keys are set.
    @app.put("/fleet/workers/{worker_id:path}/drain")
    async def drain(request: Request, worker_id: str, deadline_s: str = "30") -> Response:
        require_admin(request)
        state = await ops.drain(worker_id, _seconds(deadline_s))
        return json_response(state, request_id_header(request))

    add_experiments(app, require_admin, ops)

    @app.get("/usage")
    async def usage(
        request: Request, by: str = "tenant", since: str = "0", until: str = "inf"
    ) -> Response:
        require_admin(request)
        told = await ops.usage(by, _moment(since, "since"), _moment(until, "until"))
        return json_response(told, request_id_header(request))

    add_dashboard(app, require_admin, ops)


def _moment(text: str, param: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        raise RejectedError(
            ErrorReason.INVALID_ARGUMENT,
            f"{param} must be in seconds since 1970",
            param=param,
        )
    return min(max(seconds, 0.0), LATEST_S)


def _seconds(deadline_s: str) -> float:
    try:
        seconds = float(deadline_s)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DRAIN_S:
        raise RejectedError(
            ErrorReason.INVALID_ARGUMENT,
            f"deadline_s must be 0 to {MAX_DRAIN_S:.0f} seconds",
            param="deadline_s",
        )
    return seconds
