"""The vocabulary of pdserve: frozen values that every part speaks in.

Nothing here knows of protobuf, HTTP or vLLM; `pdserve.convert` copies to and
from the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

from pdserve.chat import ChatPrompt
from pdserve.errors import ErrorReason
from pdserve.replay import Replay
from pdserve.sampling import PositionLogprobs, SamplingParams


class Mode(StrEnum):
    """The way a request is served; AUTO is resolved by the policy before dispatch."""

    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    AUTO = "auto"


class Fallback(StrEnum):
    """What happens to a disaggregated request when no prefill worker can serve it."""

    COLOCATE = "colocate"
    FAIL = "fail"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """TOOL_CALLS is a façade's: to engines such an answer just stops."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue; with `add_special_tokens` the tokenizer adds those of its own."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, used as they are."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt

WHOLE_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """How much of a prompt is kept at most: so many tokens, or WHOLE_CONTEXT.

    `side` is where tokens are left out, whatever they are. Without one that is the left, but
    not what the tokenizer itself put there.
    """

    tokens: int
    side: Literal["left", "right"] | None = None


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A client's request, parsed and validated once by a façade.

    `tenant` comes from the key, never from the client; `session` is the client's, and so is
    `arm`: that of an experiment which is to serve it, empty for whichever it falls into.
    `deadline` is on the monotonic clock of `time.monotonic`, None for no deadline;
    `priority` is lower for what should be served sooner; `lora` names the adapter of the model
    that is to answer, empty for none.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    mode: Mode | None = None
    tenant: str = ""
    session: str = ""
    arm: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    priority: int = 0
    truncation: Truncation | None = None
    lora: str = ""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine needs to run one sequence. `sampling.max_tokens` is set.

    `traceparent` is the W3C context that what is done for it belongs to, empty for none.
    With `replay` the answer begins with these tokens, which count as any others, and only
    what follows them is given out.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    replay: Replay | None = None
    traceparent: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` is the part of the prompt a prefix cache saved,
    `reasoning_tokens` that of the answer which the model thought with, None where it is not
    told apart."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenTimings:
    """Seconds inside the decode worker: waiting, with the KV transfer, then the first step;
    `transfer_s` is what the transfer took, 0 where there was none or it is not known."""

    queue_s: float
    first_step_s: float
    transfer_s: float = 0.0


@dataclass(slots=True)
class Delta:
    """What one engine step added to one sequence.

    The last delta of a sequence has `finish_reason` and `usage`; the first has `timings`.
    `logprobs` has an item for each of `token_ids` where they were asked for, `prompt_logprobs`
    of the first delta one for each token of the prompt but the first; `stop_reason` is the stop
    string or token that was met.
    Not frozen: one is made for each token, and freezing doubles its cost.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: FirstTokenTimings | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    stop_reason: str | int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is one token with its text and no more, and its sequence goes on."""
        return (
            len(self.token_ids) == 1
            and self.finish_reason is None
            and self.timings is None
            and self.logprobs is None
        )

    def extend(self, later: Delta) -> None:
        """Takes in the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or ()), *later.prompt_logprobs]
        self.finish_reason = later.finish_reason
        self.usage = later.usage
        self.stop_reason = later.stop_reason


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence failed; the message is safe to show to a client. `param` is the field of
    SamplingParams at fault, empty for none."""

    reason: ErrorReason
    message: str
    param: str = ""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What two pools must share for KV blocks of one to mean anything to the other."""

    model_revision: str
    kv_dtype: str
    block_size: int
    layout: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    adapters: str = ""


@dataclass(frozen=True, slots=True)
class NixlDescriptor:
    """Where vLLM's NIXL connector (0.32) finds the blocks; see `NixlDescriptor` in kv.proto."""

    transport: ClassVar[str] = "nixl"

    engine_id: str
    request_id: str
    block_groups: tuple[tuple[int, ...], ...]
    host: str
    port: int
    tensor_parallel: int


@dataclass(frozen=True, slots=True)
class GrpcDescriptor:
    """Where the blocks are fetched over gRPC; see `GrpcDescriptor` in kv.proto."""

    transport: ClassVar[str] = "grpc"

    transfer_id: str
    epoch: str
    host: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimDescriptor:
    """Where a simulated hand-off of `num_bytes` bytes is asked for; see kv.proto."""

    num_bytes: int
    transport: str
    transfer_id: str
    epoch: str
    host: str
    port: int


KvDescriptor = NixlDescriptor | GrpcDescriptor | SimDescriptor
"""Each answers the name of its transport."""


@dataclass(frozen=True, slots=True)
class KvHandle:
    """A claim, good once, on the KV blocks of one prompt; see `KvHandle` in kv.proto.

    `lease_expiry_ns` is in nanoseconds since the Unix epoch, for it crosses machines; whole, so
    that the seal is over the very number. `seal` is empty until `pdserve.handle` has set it.
    """

    handle_id: str
    worker_id: str
    epoch: str
    fingerprint: Fingerprint
    digest: bytes
    num_tokens: int
    lease_expiry_ns: int
    descriptor: KvDescriptor
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A prompt that was read, and the claim on its blocks; times in seconds."""

    handle: KvHandle
    cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is; constant for the life of its process. `weights`, `chunk_tokens` and
    `max_sequences` as in EngineInfo; `tells_cache` says whether it tells what its prefix cache
    holds."""

    worker_id: str
    epoch: str
    roles: frozenset[Role]
    model: str
    fingerprint: Fingerprint
    engine: str
    context_length: int
    kv_capacity_tokens: int
    transports: tuple[str, ...]
    weights: str
    version: str
    chunk_tokens: int
    max_sequences: int
    tells_cache: bool
    adapters: tuple[str, ...] = ()


class LeaseEnd(StrEnum):
    """How a lease on KV ended. FETCHED: the reader has every block. ABANDONED: the reader left
    in the middle. RELEASED: the call that the lease hangs on was ended, or its connection
    broke. EXPIRED: nobody came in time. LOST: the prompt could not be read to its end, or the
    worker stops."""

    FETCHED = "fetched"
    ABANDONED = "abandoned"
    RELEASED = "released"
    EXPIRED = "expired"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """The KV that a prefill worker holds for others, at one moment.

    `oldest_s` is the age in seconds of the oldest open lease, 0 without one. `tokens_by_age`
    are the tokens held, by the name of a range of ages; `ended` counts leases since the
    process began, by how they ended.
    """

    open: int = 0
    oldest_s: float = 0.0
    tokens_by_age: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(self.tokens_by_age.values())


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What an engine's steps did: one of them, or all since it began, added up.

    `prefill_tokens` prompt tokens were read, and `prefill_pairs` adds up how many tokens each
    of them came after. `sequences` adds up those that wrote a token in a step, `kv_usage` the
    part of the cache in use (0 to 1) in each step in which any wrote.
    """

    steps: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    sequences: int = 0
    kv_usage: float = 0.0

    def __add__(self, other: EngineWork) -> EngineWork:
        return EngineWork(
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.prefill_tokens + other.prefill_tokens,
            self.prefill_pairs + other.prefill_pairs,
            self.sequences + other.sequences,
            self.kv_usage + other.kv_usage,
        )

    def __sub__(self, other: EngineWork) -> EngineWork:
        return EngineWork(
            self.steps - other.steps,
            self.seconds - other.seconds,
            self.prefill_tokens - other.prefill_tokens,
            self.prefill_pairs - other.prefill_pairs,
            self.sequences - other.sequences,
            self.kv_usage - other.kv_usage,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is; see `WatchLoadResponse` in worker.proto.

    `work` is all since the engine began; that it grew is no news by itself.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    open_leases: int = 0
    reserved_tokens: int = 0
    draining: bool = False
    lease_tokens: int = 0
    oldest_lease_s: float = 0.0
    work: EngineWork = field(default=EngineWork(), compare=False)


@dataclass(frozen=True, slots=True)
class Route:
    """Which way a request went: `mode` is never AUTO; `reason` is in words."""

    mode: Mode
    reason: str
    arm: str = ""
