"""Experiments over HTTP: started, told and stopped by an admin alone."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from coordinator.facade.body import rejected
from coordinator.facade.http_errors import json_response, request_id_header
from coordinator.facade.http_wire import read_json_body
from coordinator.facade.ports import Ops

MAX_BODY_BYTES = 64 * 1024


def add_experiments(app: FastAPI, require_admin: Callable[[Request], None], ops: Ops) -> None:
    """`require_admin` raises RejectedError for anybody else."""

    @app.get("/experiments")
    async def experiments(request: Request) -> Response:
        require_admin(request)
        return json_response({"experiments": ops.experiments()}, request_id_header(request))

    @app.get("/experiments/{model:path}")
    async def experiment(request: Request, model: str) -> Response:
        require_admin(request)
        return json_response(ops.experiment(model), request_id_header(request))

    # Not POST: that a page in a browser on this machine may send unasked, where no keys are set.
    @app.put("/experiments/{model:path}")
    async def start(request: Request, model: str) -> Response:
        require_admin(request)
        data = await read_json_body(request.headers, request.receive, MAX_BODY_BYTES)
        try:
            asked = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise rejected(f"the body is not valid JSON: {error}") from None
        if not isinstance(asked, dict):
            raise rejected("the body must be an object")
        return json_response(ops.start_experiment(model, asked), request_id_header(request))

    @app.delete("/experiments/{model:path}")
    async def stop(request: Request, model: str) -> Response:
        require_admin(request)
        return json_response(ops.stop_experiment(model), request_id_header(request))
