"""`echo` of completions: the answer begins with the prompt, as in vLLM's own server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from coordinator.facade.ports import TokenStream
from coordinator.prompts import Encoder
from coordinator.token_threads import looked_up
from pdserve.sampling import TokenLogprob
from pdserve.types import ChatPrompt, Delta, GenerateSpec, Route, TextPrompt, TokenPrompt

UNKNOWN_RANK = 0
"""Of the first token of a prompt, which has no log probability."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as text, and its first token; `alone` where nothing is to come after it."""

    text: str
    first: TokenLogprob
    alone: bool

    def before(self, delta: Delta) -> None:
        """Puts the prompt before the first delta of its answer."""
        after = Delta("") if self.alone else Delta(delta.text, logprobs=delta.logprobs)
        delta.text = self.text + after.text
        if delta.logprobs is not None:
            of_prompt = delta.prompt_logprobs or ()
            delta.logprobs = [(self.first,), *of_prompt, *(after.logprobs or ())]


async def echo_of(spec: GenerateSpec, encoder: Encoder, *, alone: bool) -> Echo:
    """Raises RejectedError for a prompt that is none."""
    match spec.prompt:
        case TextPrompt(text):
            token_ids: tuple[int, ...] = ()
            if spec.sampling.logprobs is not None:
                token_ids = await encoder.encode_async(spec.prompt)
        case TokenPrompt(token_ids):
            text = await looked_up(encoder.decode, token_ids)
        case ChatPrompt():
            raise AssertionError("chats have no echo")
    first = token_ids[0] if token_ids else 0
    word = encoder.decode(token_ids[:1])
    return Echo(text, TokenLogprob(first, 0.0, word, UNKNOWN_RANK), alone)


class Echoed:
    """A TokenStream whose first delta has the prompt before it."""

    def __init__(self, stream: TokenStream, echo: Echo) -> None:
        self._stream = stream
        self._echo: Echo | None = echo
        self.route: Route = stream.route
        self.prompt_token_ids = stream.prompt_token_ids

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(aiter(self._stream))
        if self._echo is not None:
            self._echo.before(delta)
            self._echo = None
        return delta

    def forward(self, write: Callable[[str], bool]) -> None:
        """The first delta is there already, and never comes this way."""
        self._stream.forward(write)

    async def aclose(self) -> None:
        await self._stream.aclose()


def echoed(stream: TokenStream, echo: Echo | None) -> TokenStream:
    return stream if echo is None else Echoed(stream, echo)
