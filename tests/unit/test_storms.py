"""Random scripts and events: whatever happens, every request ends once and nothing stays held."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.config import GatewayConfig
from pdserve.errors import DecodeError, ErrorReason, PdserveError, PrefillError
from pdserve.types import EngineRequest, Fallback, Load, Mode, Role, SamplingParams
from tests.support.core import Core, assert_idle, running
from tests.support.fake_script import ANSWER_TOKENS, Script, answer, first_delta
from tests.support.fake_worker import pool
from tests.support.virtual_time import run, settle

REASONS = [reason for reason in ErrorReason if not reason.touched_no_worker]
LONGEST_SCRIPT_S = 12.0
seconds = st.integers(0, 6).map(float)  # few values, so that things often happen at once


def scripts(error: type[PdserveError]) -> st.SearchStrategy[list[Script]]:
    def script(delays: list[float], reason: ErrorReason | None) -> Script:
        return delays if reason is None else [*delays, error(reason, reason.label)]

    reasons = st.none() | st.sampled_from(REASONS)
    return st.lists(st.builds(script, st.lists(seconds, max_size=2), reasons), max_size=4)


@dataclass(frozen=True)
class Asked:
    """One request: asked at some second, read with a pause, perhaps left, perhaps in a hurry."""

    at: float
    text: str
    mode: Mode
    pause_s: float
    leaves_at: float | None
    within_s: float | None


@dataclass(frozen=True)
class Happening:
    at: float
    worker: str
    what: str


requests = st.lists(
    st.builds(
        Asked,
        at=seconds,
        text=st.sampled_from(["one", "another"]),
        mode=st.sampled_from([Mode.COLOCATED, Mode.DISAGGREGATED]),
        pause_s=st.sampled_from([0.0, 0.0, 1.0]),
        leaves_at=st.none() | seconds,
        within_s=st.none() | seconds,
    ),
    min_size=1,
    max_size=4,
)
happenings = st.lists(
    st.builds(
        Happening,
        at=seconds,
        worker=st.sampled_from(["p1", "p2", "d1", "d2"]),
        what=st.sampled_from(["stop", "restart", "drain"]),
    ),
    max_size=4,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests,
    happenings=happenings,
    prefills=scripts(PrefillError),
    reservations=scripts(DecodeError),
    starts=scripts(DecodeError),
    breaks_in_mid_stream=st.booleans(),
    places=st.integers(1, 4),
    fallback=st.sampled_from(Fallback),
)
def test_every_request_ends_once_and_nothing_stays_held(
    *,
    requests: list[Asked],
    happenings: list[Happening],
    prefills: list[Script],
    reservations: list[Script],
    starts: list[Script],
    breaks_in_mid_stream: bool,
    places: int,
    fallback: Fallback,
) -> None:
    async def storm() -> None:
        readers = pool(2, Role.PREFILL, name="p")
        writers = pool(2, Role.DECODE, name="d")
        gateway = GatewayConfig(max_running=places, max_queued=2)
        async with running(*readers, *writers, gateway=gateway, fallback=fallback) as core:
            readers[0].prefills.extend(prefills)
            writers[0].reservations.extend(reservations)
            writers[0].starts.extend(starts)
            if breaks_in_mid_stream:
                lost = DecodeError(ErrorReason.DECODE_FAILED, "broken")
                writers[0].starts.append([first_delta("a"), 2.0, lost])
            events = [asyncio.create_task(_happen(core, happening)) for happening in happenings]
            clients = [asyncio.create_task(_client(core, asked)) for asked in requests]
            await asyncio.gather(*events, *clients)
            for worker in core.fakes.values():
                for left in (worker.prefills, worker.reservations, worker.starts):
                    left.clear()
            await asyncio.sleep(LONGEST_SCRIPT_S)  # probes use scripts up, too
            await settle()
            assert_idle(core)

    run(storm())


async def _happen(core: Core, happening: Happening) -> None:
    await asyncio.sleep(happening.at)
    worker = core.fakes_by_id[happening.worker]
    match happening.what:
        case "stop":
            worker.stop()
        case "restart":
            worker.restart()
        case "drain" if worker.up:
            worker.report(Load(draining=True))


async def _client(core: Core, asked: Asked) -> None:
    """Asserts that what is read is an undisturbed answer, or a beginning and one error."""
    await asyncio.sleep(asked.at)
    reading = asyncio.create_task(_read(core, asked))
    if asked.leaves_at is not None:
        await asyncio.wait([reading], timeout=asked.leaves_at)
        reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.result()


async def _read(core: Core, asked: Asked) -> None:
    deadline = None if asked.within_s is None else time.monotonic() + asked.within_s
    texts: list[str] = []
    finished = False
    try:
        stream = await core.open(
            asked.text,
            # As many as are answered: who goes on with a beginning is asked for the rest of these.
            max_tokens=ANSWER_TOKENS,
            mode=asked.mode,
            deadline=deadline,
        )
    except PdserveError:
        return
    try:
        async for delta in stream:
            assert not finished, "something came after the end"
            texts.append(delta.text)
            finished = delta.finish_reason is not None
            await asyncio.sleep(asked.pause_s)
    except PdserveError:
        assert not finished, "an error came after the end"
        return
    finally:
        await stream.aclose()
    assert finished, "ended without a reason"
    if texts[0] != "a":
        assert "".join(texts) == _undisturbed(asked.text)


def _undisturbed(text: str) -> str:
    request = EngineRequest("", tuple(byte + 3 for byte in text.encode()), SamplingParams())
    return "".join(delta.text for delta in answer(request))
