"""What GenerationResponse asks of an API: how it is read, answered, streamed, and refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from coordinator.facade.intake import Answer
from coordinator.facade.openai_schema import GenerationBody
from coordinator.facade.sse import AnswerIdentity
from coordinator.gateway.keys import Caller
from coordinator.record import RequestRecord
from pdserve.errors import PdserveError
from pdserve.parsing import ChatParser
from pdserve.types import Delta, GenerateSpec, Usage


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was understood, whoever of its choices is meant; `parser` takes its answers
    apart, where there is one."""

    caller: Caller
    body: GenerationBody
    identity: AnswerIdentity
    record: RequestRecord
    spec: GenerateSpec
    parser: ChatParser | None

    @property
    def parses_reasoning(self) -> bool:
        return self.parser is not None and self.parser.parses_reasoning


class Events(Protocol):
    """The events of one choice of a streamed answer, as bytes."""

    @property
    def opening(self) -> bytes:
        """What comes before all text; read once."""

    @property
    def is_plain(self) -> bool:
        """Whether an event is no more than its text as JSON between `before` and `after`."""

    @property
    def before(self) -> bytes: ...

    @property
    def after(self) -> bytes: ...

    def piece(self, delta: Delta) -> bytes:
        """Empty for a delta that has nothing to show."""

    def last(self, delta: Delta) -> bytes:
        """The last delta of the choice."""

    def end(self, usage: Usage) -> bytes:
        """The end of the stream, once all choices have ended."""

    def broken(self, error: PdserveError) -> bytes:
        """The end of a stream that cannot go on: no client may take it for a good one."""


class Operation(Protocol):
    """One API by which text is asked for."""

    @property
    def name(self) -> str:
        """In records and metrics."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def document(self) -> type[msgspec.Struct]:
        """The body, for the OpenAPI document."""

    def authorization(self, headers: Headers) -> str | None:
        """The key that was sent, as in an `Authorization` header."""

    def read(self, data: bytes) -> GenerationBody:
        """Raises RejectedError INVALID_ARGUMENT that names the first field at fault."""

    def answer(self, asked: Asked, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]: ...

    def events(self, asked: Asked, prompt_token_ids: Sequence[int], index: int) -> Events:
        """`index` is the choice's."""

    def refusal(self, error: PdserveError, request_id: str) -> Response:
        """For a failure that is known before the answer has begun."""
