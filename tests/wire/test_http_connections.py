"""Clients that leave, read slowly, or stay."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.types import Delta
from tests.support.fake_dispatch import answer
from tests.support.http_facade import COMPLETION, HttpFacade, http_facade
from tests.support.patience import within

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def send_and_leave(facade: HttpFacade, body: dict[str, Any], until: asyncio.Event) -> None:
    """Posts a completion, and drops the connection as soon as `until` is set."""
    content = json.dumps({**COMPLETION, **body}).encode()
    _, writer = await asyncio.open_connection(*facade.address.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    await until.wait()
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_before_the_first_token(facade: HttpFacade, stream: bool) -> None:
    facade.dispatcher.script = [asyncio.Event()]
    await send_and_leave(facade, {"stream": stream}, until=facade.dispatcher.opening)
    async with within(1):
        await facade.dispatcher.open_cancelled.wait()
        await facade.observer.ended.wait()
    assert [label for _, label in facade.observer.ends] == ["cancelled"]


@pytest.mark.parametrize("stream", [True, False])
async def test_client_leaves_between_tokens(facade: HttpFacade, stream: bool) -> None:
    facade.dispatcher.script = [Delta("a"), asyncio.Event()]
    await send_and_leave(facade, {"stream": stream}, until=facade.dispatcher.opening)
    async with within(1):
        await facade.observer.ended.wait()
    assert facade.dispatcher.streams[0].closed.is_set()


async def test_client_leaves_in_its_own_body(facade: HttpFacade) -> None:
    _, writer = await asyncio.open_connection(*facade.address.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    async with within(1):
        await facade.observer.ended.wait()
    assert [label for _, label in facade.observer.ends] == ["cancelled"]


async def test_a_slow_reader_holds_its_own_stream_back(facade: HttpFacade) -> None:
    text = "x" * 65_536
    facade.dispatcher.script = [Delta(text) for _ in range(2_000)] + answer("end")
    content = json.dumps({**COMPLETION, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*facade.address.split(":"), limit=65_536)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    await reader.readline()
    # Another request is served meanwhile, and most of the slow one's answer is still to come.
    assert (await facade.client.get("/health/live")).status_code == 200
    stream = facade.dispatcher.streams[0]
    assert len(stream.steps) > 1_000
    writer.close()
    async with within(1):
        await stream.closed.wait()


async def test_connection_is_kept_after_an_answer(facade: HttpFacade) -> None:
    reader, writer = await asyncio.open_connection(*facade.address.split(":"))
    content = json.dumps(COMPLETION).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    for _ in range(3):
        writer.write(request)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b'"cached_tokens":0}}}')
    writer.close()
    assert [label for _, label in facade.observer.ends] == ["ok"] * 3


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_the_offer_of_another_protocol_is_ignored(facade: HttpFacade, pieces: int) -> None:
    content = json.dumps(COMPLETION).encode()
    request = (  # Java's own client makes it
        b"POST /v1/completions HTTP/1.1\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"host: x\r\nhttp2-settings: AAEAAEAA\r\nupgrade: h2c\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    reader, writer = await asyncio.open_connection(*facade.address.split(":"))
    for _ in range(2):
        size = -(-len(request) // pieces)
        for at in range(0, len(request), size):
            writer.write(request[at : at + size])
            await asyncio.sleep(0.01)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await reader.readuntil(b'"cached_tokens":0}}}')
    writer.close()


@pytest.mark.parametrize(
    ("stream", "script", "status", "last"),
    [
        (True, [Delta("a"), asyncio.Event()], 200, b"data: "),
        (False, [Delta("a"), asyncio.Event()], 503, b""),
        (True, [asyncio.Event()], 503, b""),
    ],
)
async def test_an_answer_that_outlasts_the_drain_ends_with_an_error(
    stream: bool, script: list[Any], status: int, last: bytes
) -> None:
    async with http_facade() as stopping:
        stopping.dispatcher.script = script
        content = json.dumps({**COMPLETION, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection(*stopping.address.split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(content) + content
        )
        await stopping.dispatcher.opening.wait()
    got = await reader.read()
    writer.close()
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert got.rstrip(b"0\r\n").splitlines()[-1].startswith(last + b'{"error":{"message":"')
    assert b'"code":"draining"' in got
