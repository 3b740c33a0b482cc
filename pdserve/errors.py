"""The one tree of errors and THE table: reason, gRPC code, HTTP status, OpenAI type, retryable.

A cause is added here and in errors.proto, nowhere else. Metrics, logs, HTTP
bodies and gRPC details all take their words from the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ERROR_DOMAIN = "pdserve"
"""`domain` of the google.rpc.ErrorInfo in every gRPC status that pdserve makes."""

REQUEST_ID = "x-request-id"
"""The header and metadata that name a request, its client's name or ours."""


@dataclass(frozen=True, slots=True)
class ErrorTraits:
    """How a reason shows on each surface.

    `number` is that of the enum in errors.proto; `grpc` names a grpc.StatusCode (by name, for
    this module is imported by pure code); `retryable` says that the same request
    may succeed later or elsewhere.
    """

    number: int
    grpc: str
    http: int
    openai_type: str
    retryable: bool = False


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_OVERLOAD = "overloaded_error"


class ErrorReason(Enum):
    """The table. Up to 19: rejected, no worker touched. 20 and above: lost after dispatch."""

    INVALID_ARGUMENT = ErrorTraits(1, "INVALID_ARGUMENT", 400, _INVALID)
    CONTEXT_LENGTH_EXCEEDED = ErrorTraits(2, "INVALID_ARGUMENT", 400, _INVALID)
    BODY_TOO_LARGE = ErrorTraits(3, "RESOURCE_EXHAUSTED", 413, _INVALID)
    MODEL_NOT_FOUND = ErrorTraits(4, "NOT_FOUND", 404, _INVALID)
    UNAUTHENTICATED = ErrorTraits(5, "UNAUTHENTICATED", 401, "authentication_error")
    PERMISSION_DENIED = ErrorTraits(6, "PERMISSION_DENIED", 403, "permission_error")
    RATE_LIMITED = ErrorTraits(7, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", True)
    QUEUE_FULL = ErrorTraits(8, "RESOURCE_EXHAUSTED", 429, _OVERLOAD, True)
    NO_WORKER = ErrorTraits(9, "UNAVAILABLE", 503, _OVERLOAD, True)
    NOT_FOUND = ErrorTraits(10, "UNIMPLEMENTED", 404, _INVALID)
    OVERLOADED = ErrorTraits(11, "UNAVAILABLE", 503, _OVERLOAD, True)
    LEDGER_UNAVAILABLE = ErrorTraits(12, "UNAVAILABLE", 503, _SERVER, True)

    PREFILL_FAILED = ErrorTraits(20, "UNAVAILABLE", 502, _SERVER, True)
    DECODE_FAILED = ErrorTraits(21, "UNAVAILABLE", 502, _SERVER, True)
    NO_ROOM = ErrorTraits(22, "RESOURCE_EXHAUSTED", 503, _OVERLOAD, True)
    DRAINING = ErrorTraits(23, "UNAVAILABLE", 503, _OVERLOAD, True)
    DEADLINE_EXCEEDED = ErrorTraits(24, "DEADLINE_EXCEEDED", 504, _SERVER)
    CANCELLED = ErrorTraits(25, "CANCELLED", 499, _SERVER)

    KV_EXPIRED = ErrorTraits(40, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_REUSED = ErrorTraits(41, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_DIGEST_MISMATCH = ErrorTraits(42, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_INCOMPATIBLE = ErrorTraits(43, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_TRANSFER_FAILED = ErrorTraits(44, "UNAVAILABLE", 502, _SERVER, True)
    KV_ALTERED = ErrorTraits(45, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_FOREIGN = ErrorTraits(46, "FAILED_PRECONDITION", 502, _SERVER, True)
    KV_STALE_EPOCH = ErrorTraits(47, "FAILED_PRECONDITION", 502, _SERVER, True)

    INTERNAL = ErrorTraits(90, "INTERNAL", 500, _SERVER)

    @property
    def label(self) -> str:
        """The reason as metrics, logs and OpenAI's `code` spell it: lower case."""
        return self.name.lower()

    @property
    def touched_no_worker(self) -> bool:
        """Whether the request was refused before any worker saw it."""
        return self.value.number < 20

    @property
    def concerns_kv(self) -> bool:
        """Whether a hand-off failed, and neither of its workers by itself."""
        return 40 <= self.value.number < 90


REASON_BY_NUMBER = {reason.value.number: reason for reason in ErrorReason}


class PdserveError(Exception):
    """A refusal or failure that a client is told of.

    `param` names the request's field at fault, `retry_after_s` (seconds) when to come
    back; both may be None. `message` is shown to clients: no addresses, no secrets.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RejectedError(PdserveError):
    """Refused before any worker was touched."""


class PrefillError(PdserveError):
    """The prefill side failed; the ladder may try another way."""


class DecodeError(PdserveError):
    """The decode side refused or lost the sequence."""


class ConfigError(Exception):
    """The process cannot start as configured; the message is one line that says what to do."""
