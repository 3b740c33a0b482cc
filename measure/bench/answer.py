"""One streamed answer as its client saw it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import httpx
import orjson

_DATA = "data: "
_DONE = "[DONE]"


@dataclass(slots=True)
class Answer:
    """Times in seconds, from when the request was due.

    `late_s` is how much later than that it was sent; `first_s` is 0 until there is a token, and
    `gaps_s` are the times between the chunks after it. `failure` says in words what went wrong.
    """

    prompt_tokens: int
    late_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    answer_tokens: int = 0
    mode: str = ""
    failure: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 where there is none."""
        return (self.end_s - self.first_s) / max(1, self.answer_tokens - 1)


async def ask(
    client: httpx.AsyncClient, url: str, body: dict[str, object], prompt_tokens: int, due: float
) -> Answer:
    """Streams one chat; `due` is a time of `time.monotonic`. A failure is an answer too."""
    answer = Answer(prompt_tokens, late_s=time.monotonic() - due)
    try:
        async with client.stream("POST", url, content=orjson.dumps(body)) as response:
            answer.mode = response.headers.get("x-pdserve-mode", "")
            if response.status_code != httpx.codes.OK:
                answer.failure = f"HTTP {response.status_code}"
            else:
                answer.failure = await _read(response, answer, due)
    except httpx.HTTPError as error:
        answer.failure = type(error).__name__
    return answer


async def _read(response: httpx.Response, answer: Answer, due: float) -> str:
    """Fills in the answer; why it is none, empty when all is well."""
    async for line in response.aiter_lines():
        if not line.startswith(_DATA):
            continue
        now = time.monotonic() - due
        data = line.removeprefix(_DATA)
        if data == _DONE:
            return ""
        event = orjson.loads(data)
        if "error" in event:
            return f"broke off: {event['error'].get('message')}"
        if event.get("usage"):
            answer.answer_tokens = event["usage"]["completion_tokens"]
            answer.prompt_tokens = event["usage"]["prompt_tokens"]
        if any(choice["delta"].get("content") for choice in event["choices"]):
            if answer.first_s:
                answer.gaps_s.append(now - answer.end_s)
            else:
                answer.first_s = now
            answer.end_s = now
    return "ended without [DONE]"
