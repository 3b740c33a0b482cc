"""A prompt read by an engine, in one call."""

from __future__ import annotations

from pdserve.engine.base import Admitted, Engine, Prefilled
from pdserve.types import EngineRequest


async def read(engine: Engine, asked: EngineRequest, transport: str, lease_s: float) -> Prefilled:
    """Asserts that the engine tells what it must, in order, and one descriptor throughout."""
    admitted, prefilled = [event async for event in engine.prefill(asked, lease_s, transport)]
    assert isinstance(admitted, Admitted)
    assert isinstance(prefilled, Prefilled)
    assert admitted.descriptor in (None, prefilled.descriptor)
    assert prefilled.descriptor.transport == transport
    return prefilled
