"""`pdserve chat` and `pdserve status` against a coordinator that is a function."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from cli.chat import Conversation
from cli.failure import CliError
from cli.http import check, connect, get_json
from cli.status import picture
from pdserve.types import Mode

ROUTE = {"x-pdserve-mode": "disaggregated", "x-pdserve-reason": "disaggregated: asked for"}
Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler), base_url="http://coordinator")


def sse(*pieces: str, end: str = "data: [DONE]\n\n") -> httpx.Response:
    chunks = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    usage = {"choices": [], "usage": {"completion_tokens": len(pieces)}}
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, usage])
    return httpx.Response(200, text=body + end, headers=ROUTE)


def test_each_turn_sends_the_conversation_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return sse("Hel", "lo")

    talk = Conversation(client(answer), "m", Mode.DISAGGREGATED, 16)
    talk.add("system", "be brief")
    talk.turn("hi")
    talk.turn("again")
    first, second = (json.loads(request.content) for request in asked)
    assert first["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert [each["content"] for each in second["messages"]] == ["be brief", "hi", "Hello", "again"]
    assert {request.headers["x-pdserve-mode"] for request in asked} == {"disaggregated"}
    assert len({request.headers["x-pdserve-session"] for request in asked}) == 1
    shown = capsys.readouterr()
    assert shown.out == "Hello\nHello\n"
    assert "disaggregated: asked for, first token after" in shown.err
    assert "tokens/s" in shown.err


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(429, json={"error": {"message": "too many"}}), r"too many \(HTTP 429\)"),
        (httpx.Response(502, text="<html>"), r"Bad Gateway \(HTTP 502\)"),
        (sse("a", end='data: {"error": {"message": "worker lost"}}\n\n'), "worker lost"),
        (sse("a", end=""), "broke off"),
    ],
)
def test_a_failed_turn_is_told_and_forgotten(response: httpx.Response, said: str) -> None:
    answers = [response, sse("fine")]
    talk = Conversation(client(lambda _: answers.pop(0)), "m", None, 16)
    with pytest.raises(CliError, match=said):
        talk.turn("one")
    talk.turn("two")
    assert [each["content"] for each in talk.messages] == ["two", "fine"]


def test_a_stopped_answer_stays_in_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(httpx.SyncByteStream):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield b'data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
            raise KeyboardInterrupt

    response = httpx.Response(200, stream=Interrupted(), headers=ROUTE)
    talk = Conversation(client(lambda _: response), "m", None, 16)
    talk.turn("hi")
    assert talk.messages[-1] == {"role": "assistant", "content": "Half"}
    assert "stopped" in capsys.readouterr().err


def test_what_is_no_coordinator_is_told() -> None:
    with pytest.raises(CliError, match="not as a coordinator does"):
        get_json(client(lambda _: httpx.Response(200, text="hello")), "/fleet")
    with pytest.raises(CliError, match="HTTP 404"):
        check(httpx.Response(404))


def test_whoever_has_no_key_is_told_where_it_goes() -> None:
    refused = httpx.Response(401, json={"error": {"message": "no API key"}})
    with pytest.raises(CliError, match=r"no API key; .* PDSERVE_KEY, or as --key"):
        check(refused)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_as_sdks_take_it_will_do(end: str) -> None:
    with connect(f"http://127.0.0.1:8000{end}", key=None) as to:
        assert str(to.build_request("GET", "/v1/models").url) == "http://127.0.0.1:8000/v1/models"


def test_the_fleet_fits_a_terminal_of_80_columns() -> None:
    fleet = {
        "ready": False,
        "routes": {
            "m": {
                "colocated": {"ready": True, "detail": ""},
                "disaggregated": {"ready": False, "detail": "no proven pair of workers"},
            }
        },
        "workers": [
            {
                "id": "prefill-0",
                "roles": ["prefill"],
                "duty": "prefill",
                "state": "ready",
                "detail": "",
                "epoch": "0123456789abcdef",
                "model": "m",
                "engine": "sim",
                "running": 3,
                "waiting": 12,
                "kv_usage": 0.25,
                "open_leases": 2,
                "lease_tokens": 4321,
                "oldest_lease_s": 1.25,
                "reserved_tokens": 123456,
            }
        ],
        "pairs": [
            {
                "prefill": "prefill-0",
                "decode": "d",
                "transport": "nixl",
                "state": "quarantined",
                "detail": "[other] layout",
                "failures": 3,
                "next_probe_s": 4.2,
            }
        ],
        "requests": {
            "m": {
                "running": 7,
                "queued": 9,
                "queued_tokens": 900,
                "queued_by_priority": {"high": 1, "normal": 8, "low": 0},
                "unread_tokens": 70,
                "wait_s": 1.5,
            }
        },
        "estimates": {
            "m": {
                "pools": {
                    "both": {
                        "step_s": 0.0123,
                        "token_s": 0.00123,
                        "pair_s": 1.25e-08,
                        "sequence_s": 0.000123,
                        "context_s": 1.25e-06,
                        "reads_learnt": True,
                        "writes_learnt": False,
                    }
                },
                "hand_over": {"base_s": 0.0123, "token_s": 1.2e-06, "learnt": True},
                "answer_tokens": 128.0,
            }
        },
    }
    console = Console(width=80, record=True)
    console.print(picture(fleet))
    text = console.export_text()
    assert "…" not in text
    for part in (
        "not ready",
        "012345",
        "25%",
        "123456",
        "quarantined",
        "in 4 s",
        "[other] layout",
        "no proven pair",
        " 12.3 ",
        "1,230 ",
        "0.123 ?",
        "?: a guess",
        "7",
    ):
        assert part in text
