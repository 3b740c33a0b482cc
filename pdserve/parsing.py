"""What takes a model's answers apart, into reasoning, text and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pdserve.chat import AnsweredMessage, ChatPrompt, MessageDelta
from pdserve.config import ModelConfig
from pdserve.sampling import SamplingParams


class AnswerParser(Protocol):
    """Of one answer, which is given to it in pieces or whole, never both."""

    def piece(self, text: str, token_ids: Sequence[int], *, last: bool) -> MessageDelta | None:
        """What is known now; None where it must be told with what follows."""

    def whole(self, text: str, token_ids: Sequence[int]) -> AnsweredMessage:
        """As its parts show it, whatever tools were to be called."""

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of them the model thought with."""


class ChatParsing(Protocol):
    """Of one request."""

    @property
    def sampling(self) -> SamplingParams:
        """As the request's own, with what its tools hold the answer to."""

    def parser(self, prompt_token_ids: Sequence[int]) -> AnswerParser:
        """For one answer to that prompt."""


class ChatParser(Protocol):
    """Of one model, of which at least one of these is told apart."""

    @property
    def parses_tools(self) -> bool: ...

    @property
    def parses_reasoning(self) -> bool: ...

    def takes_apart(self, prompt: ChatPrompt) -> bool:
        """Whether an answer to it may be anything else than its text as it comes."""

    def read(self, prompt: ChatPrompt, sampling: SamplingParams) -> ChatParsing:
        """Raises RejectedError for tools that cannot be held to."""


ParserFactory = Callable[[ModelConfig, Path], ChatParser]
"""Makes the parser of a model that names one, from its folder. Raises ConfigError."""
