"""The session's real fleet as a client sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self
from uuid import uuid4

import grpc
import httpx
import openai

from pdserve.v1 import generation_pb2 as generation
from pdserve.v1 import inference_pb2 as inference
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.patience import eventually
from tests.support.running_system import Event, RunningSystem, sample

Surface = Literal["http", "grpc"]
MODES = {
    "colocated": generation.MODE_COLOCATED,
    "disaggregated": generation.MODE_DISAGGREGATED,
}
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """What is asked, by chat or by completion; greedily, for `max_tokens` tokens."""

    kind: Literal["chat", "completion"]
    text: str
    max_tokens: int = 8


@dataclass(frozen=True)
class Answer:
    """`mode` is the route that the answer says it took."""

    text: str
    mode: str
    prompt_tokens: int


class Fleet:
    """Clients of a running system; owns its connections, not the system."""

    def __init__(self, system: RunningSystem, ready: Event) -> None:
        self.system = system
        self.model: str = ready["model"]
        self.metrics_addresses: dict[str, str] = ready["metrics"]
        self.base_url = f"http://{ready['http']}"
        self.http = httpx.Client(base_url=self.base_url, timeout=TIMEOUT_S)
        self.openai = openai.OpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        self.channel = grpc.insecure_channel(ready["grpc"])
        self.grpc = InferenceServiceStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        self.openai.close()
        self.channel.close()

    def ready(self) -> bool:
        try:
            return self.http.get("/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def state(self) -> Event:
        """What `pdserve status` shows."""
        answer: Event = self.http.get("/fleet").json()
        return answer

    def metric(self, process: str, name: str, **labels: str) -> float:
        text = httpx.get(f"http://{self.metrics_addresses[process]}/metrics").text
        return sample(text, name, labels)

    def ask(self, prompt: Prompt, mode: str, surface: Surface, stream: bool) -> Answer:
        """One answer.

        A salt of its own keeps prefix caches out of a hand-off: all of its KV must travel.
        Colocated answers to the same prompt may share what is cached.
        """
        salt = "colocated" if mode == "colocated" else uuid4().hex
        ask = self._ask_http if surface == "http" else self._ask_grpc
        return ask(prompt, mode, stream, salt)

    def _ask_http(self, prompt: Prompt, mode: str, stream: bool, salt: str) -> Answer:
        headers = {"x-pdserve-mode": mode}
        extra = {"cache_salt": salt}
        if prompt.kind == "chat":
            raw = self.openai.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt.text}],
                max_tokens=prompt.max_tokens,
                temperature=0,
                stream=stream,
                stream_options={"include_usage": True} if stream else None,
                extra_headers=headers,
                extra_body=extra,
            )
        else:
            raw = self.openai.completions.with_raw_response.create(
                model=self.model,
                prompt=prompt.text,
                max_tokens=prompt.max_tokens,
                temperature=0,
                stream=stream,
                stream_options={"include_usage": True} if stream else None,
                extra_headers=headers,
                extra_body=extra,
            )
        parsed = raw.parse()
        texts, usage = [], None
        for part in parsed if stream else [parsed]:
            usage = part.usage or usage
            for choice in part.choices:
                if prompt.kind == "completion":
                    texts.append(choice.text)
                else:
                    texts.append((choice.delta if stream else choice.message).content or "")
        assert usage is not None
        return Answer("".join(texts), raw.headers["x-pdserve-mode"], usage.prompt_tokens)

    def _ask_grpc(self, prompt: Prompt, mode: str, stream: bool, salt: str) -> Answer:
        sampling = generation.SamplingParams(max_tokens=prompt.max_tokens, temperature=0)
        options = inference.RequestOptions(mode=MODES[mode], cache_salt=salt)
        if prompt.kind == "chat":
            chat = inference.ChatRequest(
                model=self.model,
                messages=[inference.ChatMessage(role="user", content=prompt.text)],
                sampling=sampling,
                options=options,
            )
            if not stream:
                whole = self.grpc.Chat(chat, timeout=TIMEOUT_S)
                return _answer(whole.message.content, whole.route, whole.usage)
            streamed_chat = inference.ChatStreamRequest(request=chat)
            call = self.grpc.ChatStream(streamed_chat, timeout=TIMEOUT_S)
        else:
            request = inference.GenerateRequest(
                model=self.model, text=prompt.text, sampling=sampling, options=options
            )
            if not stream:
                whole = self.grpc.Generate(request, timeout=TIMEOUT_S)
                return _answer(whole.text, whole.route, whole.usage)
            call = self.grpc.GenerateStream(
                inference.GenerateStreamRequest(request=request), timeout=TIMEOUT_S
            )
        parts = list(call)
        return _answer("".join(part.text for part in parts), parts[0].route, parts[-1].usage)


def _answer(text: str, route: generation.Route, usage: generation.Usage) -> Answer:
    return Answer(text, {v: k for k, v in MODES.items()}[route.mode], usage.prompt_tokens)


def until(condition: Callable[[], bool], timeout: float = TIMEOUT_S) -> None:
    """For what only an outside look can tell, such as a peer's metrics."""
    assert eventually(condition, timeout, 0.05), "waited in vain"
