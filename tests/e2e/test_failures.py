"""`kill -9` of each kind of process in turn, and workers that stand still, in mid-work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest

from tests.support.fleet import Fleet, Prompt, until
from tests.support.prompts import prompts
from tests.support.second_coordinator import second_coordinator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HANG_S = 10.0
STORY = next(
    prompt for prompt in prompts() if prompt.kind == "completion" and len(prompt.text) > 4000
)


def engine_of(worker: psutil.Process) -> psutil.Process:
    """The vLLM engine process of a worker: the largest below it."""
    return max(worker.children(recursive=True), key=lambda process: process.memory_info().rss)


def assert_recovers(fleet: Fleet, names: list[str], since: int) -> None:
    """The supervisor says what died and brings it back, and both routes work again."""
    for name in names:
        assert fleet.system.wait_for("died", name=name, since=since)["how"]
        fleet.system.wait_for("restarted", name=name, since=since)
    until(fleet.ready)
    for mode in ("colocated", "disaggregated"):
        until(lambda mode=mode: _route_is_ready(fleet, mode))  # type: ignore[misc]
        answer = fleet.ask(Prompt("completion", "One, two, three,", 4), mode, "http", False)
        assert answer.mode == mode
        assert answer.text


def test_a_dead_coordinator_breaks_the_connection_at_once(fleet: Fleet) -> None:
    since = len(fleet.system.events)
    stream = _long_stream(fleet)
    next(stream)
    fleet.system.child("coordinator").kill()
    began = time.monotonic()
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        list(stream)
    assert time.monotonic() - began < HANG_S
    assert_recovers(fleet, ["coordinator"], since)


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_dead_workers_are_fallen_back_from_or_told(fleet: Fleet, victim: str) -> None:
    """Prefill, then decode: both restart at once, for a start of vLLM takes half a minute."""
    since = len(fleet.system.events)
    _kill_prefill_in_mid_prefill(fleet, victim)
    _kill_decode_in_mid_stream(fleet, victim)
    assert_recovers(fleet, ["prefill-0", "decode-0"], since)


def _kill_prefill_in_mid_prefill(fleet: Fleet, victim: str) -> None:
    """The client gets its whole answer, from the decode worker alone."""
    worker = fleet.system.child("prefill-0")
    process = worker if victim == "worker" else engine_of(worker)

    def kill_in_mid_prefill() -> None:
        until(lambda: _running(fleet, "prefill-0") > 0)
        process.kill()

    killer = threading.Thread(target=kill_in_mid_prefill)
    killer.start()
    answer = fleet.ask(STORY, "disaggregated", "http", stream=True)
    killer.join()
    assert answer.mode == "colocated"
    assert answer.text == fleet.ask(STORY, "colocated", "http", stream=False).text


def _kill_decode_in_mid_stream(fleet: Fleet, victim: str) -> None:
    """Nobody is there to go on with the answer: the stream ends with an error that says so."""
    stream = _long_stream(fleet)
    next(stream)
    worker = fleet.system.child("decode-0")
    (worker if victim == "worker" else engine_of(worker)).kill()
    began = time.monotonic()
    with pytest.raises(openai.APIError) as failure:
        list(stream)
    assert time.monotonic() - began < HANG_S
    assert failure.value.code == "decode_failed"


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_workers_that_stand_still_in_a_hand_off_are_done_without(
    fleet: Fleet, transport: str
) -> None:
    """Prefill, then decode, each with its engine; when they go on, they have dropped it all."""
    until(fleet.ready)
    with second_coordinator(fleet, transport) as clients:
        expected = clients.ask(STORY, "colocated", "http", stream=False)
        with _standing_still_once(clients, "prefill-0", lambda: _running(clients, "prefill-0") > 0):
            began = time.monotonic()
            answer = clients.ask(STORY, "disaggregated", "http", stream=True)
            assert time.monotonic() - began < 3 * HANG_S, "and the prompt read twice"
        assert (answer.mode, answer.text) == ("colocated", expected.text)
        until(lambda: _route_is_ready(clients, "disaggregated"))
        with _standing_still_once(clients, "decode-0", lambda: _running(clients, "prefill-0") > 0):
            began = time.monotonic()
            with pytest.raises(openai.InternalServerError) as failure:
                clients.ask(STORY, "disaggregated", "http", stream=True)
            assert time.monotonic() - began < 2 * HANG_S
        assert failure.value.status_code in (502, 503)
        until(lambda: _route_is_ready(clients, "disaggregated"))
        again = clients.ask(STORY, "disaggregated", "http", stream=True)
        assert (again.mode, again.text) == ("disaggregated", expected.text)
        until(lambda: _is_idle(clients))
    until(fleet.ready)
    until(lambda: _route_is_ready(fleet, "disaggregated"))


@contextmanager
def _standing_still_once(fleet: Fleet, name: str, condition: Callable[[], bool]) -> Iterator[None]:
    """Stops a worker and all below it as soon as it is so, until the context ends."""
    worker = fleet.system.child(name)
    processes = [worker, *worker.children(recursive=True)]

    def stop() -> None:
        until(condition)
        for process in processes:
            process.suspend()

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        yield
    finally:
        stopper.join()
        for process in processes:
            process.resume()


def test_after_all_that_nothing_is_held(fleet: Fleet) -> None:
    until(fleet.ready)
    fleet.ask(STORY, "disaggregated", "http", stream=True)
    until(lambda: _is_idle(fleet))


def _is_idle(fleet: Fleet) -> bool:
    state = fleet.state()
    requests = state["requests"][fleet.model]
    return all(
        not worker["open_leases"] and not worker["reserved_tokens"] and not worker["running"]
        for worker in state["workers"]
    ) and not (requests["running"] or requests["queued"])


def _running(fleet: Fleet, worker_id: str) -> int:
    workers = {worker["id"]: worker for worker in fleet.state()["workers"]}
    running: int = workers[worker_id]["running"]
    return running


def _route_is_ready(fleet: Fleet, mode: str) -> bool:
    ready: bool = fleet.state()["routes"][fleet.model][mode]["ready"]
    return ready


def _long_stream(fleet: Fleet) -> openai.Stream[openai.types.Completion]:
    return fleet.openai.completions.create(
        model=fleet.model,
        prompt="One, two, three,",
        max_tokens=2000,
        stream=True,
        extra_headers={"x-pdserve-mode": "colocated"},
        extra_body={"ignore_eos": True},
    )
