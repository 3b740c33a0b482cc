"""What the reader process is asked to do, and what it answers; both travel as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

BLOCK_SIZE = 32
"""Tokens a block; on CPU vLLM takes multiples of 32 alone."""

CHUNK_TOKENS = 256
"""Tokens that a paced holder makes readable at a time, as pdserve's prefill chunks."""

CHUNK_BYTES_PER_S = 0.3e9
"""Pace of the chunks: slower than any of the ways that are paced."""


class Way(StrEnum):
    """How bytes get from the holder to the reader; the values are the words of the report."""

    MEMCPY = "memcpy"
    SOCKET = "socket"
    GRPC = "gRPC"
    NIXL_SHM = "NIXL, shared memory"
    NIXL_TCP = "NIXL, TCP"


@dataclass(frozen=True, slots=True)
class Model:
    """A KV cache's shape; two bytes a number."""

    name: str
    num_layers: int
    kv_heads: int
    head_size: int

    @property
    def bytes_per_block(self) -> int:
        """Of one layer: keys and values."""
        return 2 * BLOCK_SIZE * self.kv_heads * self.head_size * 2

    def num_bytes(self, num_tokens: int) -> int:
        return num_blocks(num_tokens) * self.num_layers * self.bytes_per_block

    @property
    def chunk_s(self) -> float:
        """Seconds between two chunks of a paced holder."""
        return self.num_bytes(CHUNK_TOKENS) / CHUNK_BYTES_PER_S


SMOLLM2 = Model("SmolLM2-135M", 30, 3, 64)
LLAMA_8B = Model("Llama-3.1-8B", 32, 8, 128)
LLAMA_70B = Model("Llama-3.1-70B", 80, 8, 128)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Job:
    """Every way with every number of tokens, and then paced ones over gRPC; `repeats` times."""

    model: Model
    ways: tuple[Way, ...]
    num_tokens: tuple[int, ...]
    paced_tokens: tuple[int, ...]
    repeats: int
    holder: str
    holder_pid: int

    @property
    def copies(self) -> int:
        return self.repeats * (len(self.ways) * len(self.num_tokens) + len(self.paced_tokens))


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy: seconds from asking to its end, and CPU seconds of each process meanwhile.

    Of a `paced` one, the seconds are those from the last chunk to the end.
    """

    way: Way
    num_tokens: int
    seconds: float
    holder_cpu_s: float
    reader_cpu_s: float
    paced: bool = False
