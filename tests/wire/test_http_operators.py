"""Models, health, metrics, and who may see what."""

from __future__ import annotations

import httpx
import pytest

from coordinator.facade.ops import LATEST_S
from coordinator.gateway.keys import KeyRing, new_key
from coordinator.policy.ticket import Priority
from pdserve.config import ModelConfig
from tests.support.fake_dispatch import MODEL, served
from tests.support.http_facade import (
    CHAT,
    CHAT_PATH,
    HttpFacade,
    assert_error,
    http_facade,
)

DRAIN_PATH = "/fleet/workers/d%2F1/drain"
ADMINS_ALONE = (
    ("GET", "/fleet"),
    ("GET", "/fleet/requests"),
    ("GET", "/fleet/requests/r1"),
    ("GET", "/dashboard/data"),
    ("GET", "/usage"),
    ("PUT", DRAIN_PATH),
    ("GET", "/experiments"),
    ("GET", "/experiments/tiny"),
    ("PUT", "/experiments/tiny"),
    ("DELETE", "/experiments/tiny"),
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models(facade: HttpFacade) -> None:
    listed = (await facade.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    card = listed["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 1000)
    assert (await facade.client.get(f"/v1/models/{MODEL}")).json() == card


async def test_what_operators_ask(facade: HttpFacade) -> None:
    assert (await facade.client.get("/health/live")).status_code == 200
    for status in (200, 503):
        facade.ops.is_ready = status == 200
        for path in ("/health/ready", "/health"):
            ready = await facade.client.get(path)
            assert (ready.status_code, ready.json()) == (status, facade.ops.state)
    metrics = await facade.client.get("/metrics")
    assert metrics.text == "pdserve_requests_total 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert (await facade.client.get("/version")).json()["version"]
    assert (await facade.client.get("/fleet")).json() == {"workers": []}


async def test_the_bare_address_says_where_to_go_on(facade: HttpFacade) -> None:
    told = (await facade.client.get("/")).json()
    paths = [path for path in told.values() if path.startswith("/")]
    assert {"/v1/models", "/dashboard"} <= set(paths)
    for path in paths:
        assert (await facade.client.get(path)).status_code == 200, path
    missing = await facade.client.get("/docs")
    assert_error(missing, 404, "not_found", None)
    assert "/openapi.json" in missing.json()["error"]["message"]


async def test_timelines_are_told(facade: HttpFacade) -> None:
    listed = await facade.client.get("/fleet/requests")
    assert listed.json() == {"recent": [], "slowest": []}
    one = await facade.client.get("/fleet/requests/a%2Fb")
    assert one.json() == {"request_id": "a/b"}


async def test_a_worker_is_drained_by_an_operator(facade: HttpFacade) -> None:
    answer = await facade.client.put(DRAIN_PATH, params={"deadline_s": "1.5"})
    assert (answer.status_code, answer.json()) == (200, {"worker": "d/1", "unfinished": 0})
    assert facade.ops.drained == [("d/1", 1.5)]
    for deadline_s in ("-1", "nan", "inf", "1e9", "soon"):
        refused = await facade.client.put(DRAIN_PATH, params={"deadline_s": deadline_s})
        assert_error(refused, 400, "invalid_argument", "deadline_s")
    assert len(facade.ops.drained) == 1


async def test_usage_is_of_a_time(facade: HttpFacade) -> None:
    assert (await facade.client.get("/usage")).json() == {"rows": []}
    asked = {"by": "day", "since": "-1", "until": "1.5"}
    assert (await facade.client.get("/usage", params=asked)).status_code == 200
    assert facade.ops.asked == [("tenant", 0, LATEST_S), ("day", 0, 1.5)]
    for moment in ("nan", "today", ""):
        refused = await facade.client.get("/usage", params={"since": moment})
        assert_error(refused, 400, "invalid_argument", "since")


async def test_experiments_are_started_told_and_stopped(facade: HttpFacade) -> None:
    path, client = "/experiments/org%2Ftiny", facade.client
    started = await client.put(path, json={"name": "split"})
    assert (started.status_code, started.json()) == (200, {"model": "org/tiny", "name": "split"})
    assert (await client.get(path)).json() == {"model": "org/tiny"}
    assert (await client.get("/experiments")).json() == {"experiments": [{"model": "tiny"}]}
    assert (await client.delete(path)).json() == {"model": "org/tiny", "running": False}


@pytest.mark.parametrize(
    ("body", "kind"), [(b"[1]", "application/json"), (b"{", "application/json"), (b"{}", "text/x")]
)
async def test_an_experiment_that_is_no_object_is_refused(
    facade: HttpFacade, body: bytes, kind: str
) -> None:
    refused = await facade.client.put(
        "/experiments/tiny", content=body, headers={"content-type": kind}
    )
    assert_error(refused, 400, "invalid_argument", None)


async def test_openapi_document_describes_the_bodies(facade: HttpFacade) -> None:
    document = (await facade.client.get("/openapi.json")).json()
    post = document["paths"][CHAT_PATH]["post"]
    reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatCompletionRequest"
    schemas = document["components"]["schemas"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    assert "prompt" in schemas["CompletionRequest"]["required"]


async def test_keys() -> None:
    user, user_entry = new_key("acme", may_choose_mode=False)
    admin, admin_entry = new_key("ops", admin=True, max_priority=Priority.HIGH)
    keys = KeyRing([user_entry, admin_entry])
    async with http_facade(keys=keys) as facade:

        async def ask(method: str, path: str, key: str | None, **more: str) -> httpx.Response:
            headers = {**more} if key is None else {"authorization": f"Bearer {key}", **more}
            body = None if method == "GET" else CHAT
            return await facade.client.request(method, path, json=body, headers=headers)

        for method, path in (
            ("POST", CHAT_PATH),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("GET", "/metrics"),
            *ADMINS_ALONE,
        ):
            for key in (None, "pd-wrong"):
                response = await ask(method, path, key)
                assert_error(response, 401, "unauthenticated", None)
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/health", "/health/live", "/health/ready", "/version"):
            assert (await ask("GET", path, None)).status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert (await ask("GET", path, user)).status_code == 200
        for method, path in ADMINS_ALONE:
            assert_error(await ask(method, path, user), 403, "permission_denied", None)
            assert (await ask(method, path, admin)).status_code == 200

        assert (await ask("POST", CHAT_PATH, user)).status_code == 200
        seen = facade.dispatcher.seen[0]
        assert seen.caller.key_id == user_entry.id
        assert seen.spec.tenant == seen.record.tenant == "acme"
        forbidden = await ask("POST", CHAT_PATH, user, **{"x-pdserve-mode": "auto"})
        assert_error(forbidden, 403, "permission_denied", "x-pdserve-mode")
        forbidden = await ask("POST", CHAT_PATH, user, **{"x-pdserve-arm": "a"})
        assert_error(forbidden, 403, "permission_denied", "x-pdserve-arm")
        allowed = await ask("POST", CHAT_PATH, admin, **{"x-pdserve-mode": "auto"})
        assert allowed.status_code == 200

        for key, priority, status in ((user, -1, 403), (user, 1, 200), (admin, -1, 200)):
            response = await facade.client.post(
                CHAT_PATH,
                json={**CHAT, "priority": priority},
                headers={"authorization": f"Bearer {key}"},
            )
            assert response.status_code == status
            if status == 403:
                assert_error(response, 403, "permission_denied", "priority")


async def test_a_model_may_forbid_the_choice(facade: HttpFacade) -> None:
    usual = facade.dispatcher.models
    facade.dispatcher.models = served(ModelConfig(name=MODEL, mode_override=False))
    try:
        response = await facade.client.post(
            CHAT_PATH, json=CHAT, headers={"x-pdserve-mode": "colocated"}
        )
    finally:
        facade.dispatcher.models = usual
    assert_error(response, 403, "permission_denied", "x-pdserve-mode")
