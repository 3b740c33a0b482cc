"""A fake vLLM server, for the router that it is compared with: all protocol, next to no cost.

`python -m measure.token_path.fake` prints {"event": "ready", "http": ADDRESS}. The model
"paced" gets a token every 20 ms, all streams in one step; the model "quick" answers as fast as
flow control lets it. A chat that is not streamed is the prefill leg of vLLM's hand-off.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import orjson
import uvloop

from measure.token_path.fake_answers import Answer, QuickAnswer, Steps
from measure.token_path.jobs import PACED, QUICK, STEP_S

_MODELS = {"object": "list", "data": [{"id": name, "object": "model"} for name in (PACED, QUICK)]}
_PREFILLED = {
    "id": "chatcmpl-prefill",
    "object": "chat.completion",
    "created": 0,
    "model": PACED,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": " the"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "fake",
        "remote_request_id": "chatcmpl-prefill",
        "remote_block_ids": [[0]],
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    },
}


class _Connection(asyncio.Protocol):
    """HTTP/1.1 as a router speaks it: bodies with a length, one request after another."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.drop()

    def pause_writing(self) -> None:
        if self._answer is not None:
            self._answer.pause()

    def resume_writing(self) -> None:
        if self._answer is not None:
            self._answer.resume()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        length = _content_length(head)
        if separator and len(rest) >= length:
            self._received = rest[length:]
            self._request(head.split(b" ", 2)[1], rest[:length])

    def _request(self, path: bytes, body: bytes) -> None:
        if not body:
            self._send(_MODELS if path == b"/v1/models" else {"status": "ok"})
            return
        asked = orjson.loads(body)
        if not asked.get("stream"):
            self._send(_PREFILLED)
        elif asked["model"] == PACED:
            self._answer = self._steps.add(self._transport, PACED, asked["max_tokens"])
        else:
            self._answer = QuickAnswer(self._transport, QUICK, asked["max_tokens"])

    def _send(self, content: dict[str, Any]) -> None:
        data = orjson.dumps(content)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(data), data)
        )


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


async def _serve() -> None:
    steps = Steps(STEP_S)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(steps), "127.0.0.1", 0, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(json.dumps({"event": "ready", "http": f"127.0.0.1:{port}"}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve())
