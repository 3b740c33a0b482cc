"""What a fleet of fake workers is believed to be."""

from __future__ import annotations

from typing import Any

from coordinator.policy.prefix import PromptBlocks
from pdserve.types import Role
from tests.support.core import Core
from tests.support.fake_worker import MODEL, FakeWorker

BLOCK_TOKENS = 32
LONG_TEXT = "x" * (3 * BLOCK_TOKENS + 1)


def prefill(worker_id: str = "p", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.PREFILL, **info)


def decode(worker_id: str = "d", **info: Any) -> FakeWorker:
    return FakeWorker(worker_id, Role.DECODE, **info)


def ready(core: Core) -> tuple[list[str], list[str], set[tuple[str, str]]]:
    """(prefill, decode, pairs) of the snapshot."""
    snapshot = core.fleet.snapshot(MODEL)
    prefills = [view.worker_id for view in snapshot.prefill]
    return prefills, [view.worker_id for view in snapshot.decode], set(snapshot.pairs)


def cached(core: Core, text: str, salt: str = "") -> dict[str, int]:
    return core.fleet.cached_tokens(MODEL, blocks_of(text, salt))


def blocks_of(text: str, salt: str = "") -> PromptBlocks:
    return PromptBlocks(tuple(byte + 3 for byte in text.encode()), salt)
