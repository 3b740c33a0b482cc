"""What the policy sees and what it answers: frozen values, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.policy.estimate import Estimates
from pdserve.targets import ITL_S, TTFT_S
from pdserve.types import Fallback, Mode, Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that may be given work now.

    `outstanding_tokens` are uncached prompt tokens that this coordinator has planned for it and
    that are not read yet, `outstanding_pairs` adds up the tokens that each of them comes after, and
    `outstanding_prompts` are those prompts, the first of which is read since `reading_since`;
    `outstanding_sequences` are the requests whose answers it writes for this coordinator.
    `writing` are the answers in progress, for anybody, as far as is known; `context_tokens` the
    tokens in its cache, of `capacity_tokens`, 0 where that is unknown. `pool` names those that
    are timed together. `reading` is the part of its time, 0 to 1, in which it lately read prompts.
    """

    worker_id: str
    outstanding_sequences: int = 0
    outstanding_tokens: int = 0
    outstanding_pairs: int = 0
    outstanding_prompts: int = 0
    reading_since: float = 0.0
    writing: int = 0
    context_tokens: float = 0.0
    capacity_tokens: int = 0
    chunk_tokens: int = 256
    pool: str = ""
    reading: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One model's part of the fleet: only ready workers, only proven pairs.

    `pairs` holds the transports that were proven, best first, by (prefill id, decode id).
    `turn` counts decisions, to break ties by turns; `now` is of the clock of `reading_since`.
    """

    prefill: tuple[WorkerView, ...]
    decode: tuple[WorkerView, ...]
    pairs: Mapping[tuple[str, str], tuple[str, ...]]
    turn: int = 0
    estimates: Estimates = field(default_factory=Estimates)
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """A model's routing configuration. `transport` is the one KV transport that is allowed, None
    allows all; `experiment` and `arm` name the experiment's arm whose policy it is.
    `prefill_balance` and `decode_balance` name balance policies, `decider` what `auto` goes by; the
    targets, in seconds, are what it weighs latencies by: the first token may come
    `ttft_target_token_s` later for each prompt token."""

    mode: Mode = Mode.COLOCATED
    min_prefill_tokens: int = 512
    fallback: Fallback = Fallback.COLOCATE
    transport: str | None = None
    experiment: str = ""
    arm: str = ""
    prefill_balance: str = "prefix-aware"
    decode_balance: str = "prefix-aware"
    decider: Literal["threshold", "estimate"] = "estimate"
    ttft_target_s: float = TTFT_S
    ttft_target_token_s: float = 0.0
    itl_target_s: float = ITL_S


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the decision needs to know of one request.

    `colocated_because` says why it can be served in no other way, in words; empty if it can.
    `cached_tokens` says how many prompt tokens each worker's cache is believed to save.
    `queue_s` is how long it is still to wait for its turn, in seconds, by the pool that would read
    it; empty where it has its turn.
    `failed_prefill` and `failed_decode` are workers that this request has tried in vain,
    `full_decode` those that had no room to promise, where it may still wait its turn
    colocated; `failure` is the last one's reason, in words. `stay` is the pair of ids whose
    next transport comes first, after those of `tried_transports`; its prefill worker may be
    among the failed ones, for it is only to be used in this way.
    """

    prompt_tokens: int
    asked: Mode | None = None
    colocated_because: str = ""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    queue_s: Mapping[Role, float] = field(default_factory=dict)
    failed_prefill: frozenset[str] = frozenset()
    failed_decode: frozenset[str] = frozenset()
    full_decode: frozenset[str] = frozenset()
    stay: tuple[str, str] | None = None
    tried_transports: frozenset[str] = frozenset()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where one request goes. `prefill` is None for a colocated one, and `transport` empty;
    `reason` is in words, names no worker, and is shown to the client.

    `fell_back` says that the request should be disaggregated and there is no pair for it.
    """

    prefill: str | None
    decode: str
    arm: str
    reason: str
    transport: str = ""
    fell_back: bool = False

    @property
    def mode(self) -> Mode:
        return Mode.COLOCATED if self.prefill is None else Mode.DISAGGREGATED
