"""The Engine protocol, and nothing else: what a service may ask of what computes tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.cached_blocks import CachedBlocks
from pdserve.types import (
    Delta,
    EngineRequest,
    EngineWork,
    Fingerprint,
    KvDescriptor,
    LeaseEnd,
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, known once it has started.

    `kind` is "vllm" or "sim"; `context_length` and `kv_capacity_tokens` are in tokens;
    `transports` are the names of the KV transports it can use, best first; `weights` is what
    it computes with, "bfloat16" or "fp8" for example; `chunk_tokens` is the most prompt tokens
    that one step reads, `max_sequences` the most sequences that it serves at once; `adapters` are
    the LoRA adapters that a request may name.
    """

    kind: str
    fingerprint: Fingerprint
    context_length: int
    kv_capacity_tokens: int
    transports: tuple[str, ...]
    weights: str
    chunk_tokens: int
    max_sequences: int
    adapters: tuple[str, ...] = ()

    def has_adapter(self, lora: str) -> bool:
        """Whether requests may name it; all may name none."""
        return not lora or lora in self.adapters

    def in_blocks(self, num_tokens: int) -> int:
        """The tokens of cache that so many take: those of whole blocks."""
        size = self.fingerprint.block_size
        return -(-num_tokens // size) * size


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences running and waiting, and the part of the KV cache in use (0 to 1)."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt that the engine will read.

    The descriptor is set where the transport can honour it already: its blocks can be asked
    for, and are waited for.
    """

    descriptor: KvDescriptor | None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that was read. Its blocks are held until fetched, released or expired.

    The descriptor is that of `Admitted`, where it had one.
    `cached_tokens` counts prompt tokens that the prefix cache saved; times are in seconds:
    waiting for the engine, then reading.
    """

    descriptor: KvDescriptor
    cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One KV transfer into this engine: its transport's name, bytes and seconds."""

    transport: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did, for metrics and load reports.

    `prefix_queries` and `prefix_hits` count prompt tokens looked up in the prefix cache and
    found there since the last step; `work` is this step's.
    """

    load: EngineLoad
    prefix_queries: int = 0
    prefix_hits: int = 0
    transfers: tuple[Transfer, ...] = ()
    work: EngineWork = field(default_factory=EngineWork)


StepListener = Callable[[StepStats], None]
"""Called on the event loop after a step; must be quick and must not raise."""


class Engine(Protocol):
    """Computes tokens. One event loop owns it.

    Leaving `generate` or `prefill` early (closing the iterator before its last value,
    cancelling the awaiting task) aborts the sequence and frees its blocks no later than the
    end of the running step.
    """

    async def start(self, listener: StepListener) -> None:
        """Loads the model and warms up; returns when a token has been generated.

        Raises ConfigError, in one line, when it cannot.
        """
        ...

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    @property
    def load(self) -> EngineLoad:
        """As of the last step."""
        ...

    @property
    def cached(self) -> CachedBlocks | None:
        """What its prefix cache holds, in blocks of the fingerprint's size, a moment behind the
        engine; None where it does not tell. Valid after `start`."""
        ...

    def generate(self, request: EngineRequest, kv: KvDescriptor | None) -> AsyncIterator[Delta]:
        """Yields the answer's deltas as steps bring them; the last has a finish reason.

        With `kv` the prompt's blocks are fetched, and counted as a Transfer in StepStats;
        they are never silently computed instead. Raises DecodeError (DECODE_FAILED, or
        KV_TRANSFER_FAILED when the blocks could not be fetched completely).
        """
        ...

    def prefill(
        self, request: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[Admitted | Prefilled]:
        """Yields Admitted, reads the prompt, yields Prefilled and ends.

        The blocks are held from then on, for `lease_s` seconds at least; `transport` is one of
        `EngineInfo.transports`. Raises PrefillError (PREFILL_FAILED).
        """
        ...

    async def renew(self, descriptor: KvDescriptor, lease_s: float) -> LeaseEnd | None:
        """Holds blocks for `lease_s` seconds more, from now; how their hold ended, once it has."""
        ...

    async def release(self, descriptor: KvDescriptor) -> LeaseEnd:
        """Frees blocks that `prefill` holds. RELEASED, or how their hold had ended before,
        as far as that is remembered."""
        ...

    async def check(self) -> None:
        """Returns while the engine lives; raises DecodeError once it is dead."""
        ...

    async def close(self) -> None:
        """Ends the engine and every process of it; idempotent."""
        ...
