"""What the workers of a vLLM engine are told of hand-offs over gRPC, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.kv import grpc
from pdserve.engine.kv.grpc_fetch import Order
from pdserve.engine.kv.grpc_scheduler import Announced, Computed, GrpcScheduler, StepOrders
from pdserve.types import GrpcDescriptor

KV = GrpcDescriptor("t", "epoch", "host", (7010,))
BLOCK_IDS = [11, 12, 13, 14, 15]


class Status(Enum):
    """As vLLM's RequestStatus, where it matters."""

    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


@dataclass
class FakeRequest:
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 70
    num_computed_tokens: int = 0
    request_id: str = "r"
    status: Status = Status.RUNNING


@dataclass
class Engine:
    """Runs steps as vLLM's scheduler does."""

    scheduler: GrpcScheduler = field(default_factory=lambda: GrpcScheduler(32))

    def __post_init__(self) -> None:
        self.scheduler.cache_manager = SimpleNamespace(get_block_ids=lambda _: (BLOCK_IDS,))

    def step(self, request: FakeRequest | None = None, num_tokens: int = 0) -> StepOrders:
        scheduled = {request.request_id: num_tokens} if request else {}
        orders = self.scheduler.take_orders(SimpleNamespace(num_scheduled_tokens=scheduled))
        if request:
            request.num_computed_tokens += num_tokens
        return orders

    def admit(self, **kwargs: Any) -> FakeRequest:
        request = FakeRequest(grpc.hold_params(KV, 30.0), **kwargs)
        self.scheduler.on_new_request(request)
        return request


def test_a_prompt_is_announced_and_its_blocks_are_told_of_when_they_are_whole() -> None:
    engine = Engine()
    request = engine.admit()
    assert engine.step() == StepOrders(announced=[Announced("t", 70, 3)])
    assert engine.step(request, 20) == StepOrders()
    assert engine.step(request, 20) == StepOrders(computed=[Computed("t", [11], 1)])
    # The last block is whole with the prompt's last token.
    assert engine.step(request, 30) == StepOrders(computed=[Computed("t", [12, 13], 3)])
    assert engine.step(request, 1) == StepOrders()


def test_blocks_that_the_prefix_cache_had_are_told_of_with_the_first_step() -> None:
    engine = Engine()
    request = engine.admit(num_computed_tokens=64)
    assert engine.step(request, 6).computed == [Computed("t", [11, 12, 13], 3)]


def test_a_prompt_that_was_read_is_held() -> None:
    engine = Engine()
    request = engine.admit()
    engine.step(request, 70)
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert engine.scheduler.finished(request) == (True, None)
    assert engine.step() == StepOrders(finished={"t": ("r", 30.0)})


def test_a_prompt_that_was_given_up_is_withdrawn_before_its_blocks_are_used_again() -> None:
    engine = Engine()
    request = engine.admit()
    engine.step(request, 40)
    request.status = Status.FINISHED_ABORTED
    assert engine.scheduler.finished(request) == (False, None)
    assert engine.step() == StepOrders(withdrawn=["t"])


def test_a_prompt_that_is_preempted_is_read_anew_for_the_same_reader() -> None:
    engine = Engine()
    request = engine.admit()
    engine.step(request, 40)
    request.status, request.num_computed_tokens = Status.PREEMPTED, 0
    assert engine.step() == StepOrders(rewound=["t"])
    assert engine.step() == StepOrders(), "told once"
    request.status = Status.RUNNING
    assert engine.step(request, 70).computed == [Computed("t", [11, 12, 13], 3)]


@pytest.mark.parametrize(("num_cached", "first"), [(0, 0), (32, 1), (64, 2)])
def test_what_is_not_cached_is_fetched_once(num_cached: int, first: int) -> None:
    engine = Engine()
    request = FakeRequest(grpc.fetch_params(KV))
    scheduler = engine.scheduler
    assert scheduler.num_matched_tokens(request, num_cached) == 70 - num_cached
    scheduler.allocated(request, BLOCK_IDS, 70 - num_cached)
    order = Order("r", "t", "epoch", "host", [7010], 70, first, BLOCK_IDS[first:3])
    assert engine.step() == StepOrders(fetches=[order])
    # As after the transfer, or after the request was preempted.
    scheduler.allocated(request, BLOCK_IDS, 0)
    assert scheduler.num_matched_tokens(request, 0) == 0
    assert engine.step() == StepOrders()


def test_a_request_that_ends_while_it_is_fetched_cancels_that() -> None:
    engine = Engine()
    request = FakeRequest(grpc.fetch_params(KV))
    engine.scheduler.allocated(request, BLOCK_IDS, 70)
    engine.step()
    request.status = Status.FINISHED_ABORTED
    assert engine.scheduler.finished(request) == (False, None)
    assert engine.step() == StepOrders(cancelled=["r"])


def test_a_request_that_was_fetched_ends_like_any_other() -> None:
    engine = Engine()
    request = FakeRequest(grpc.fetch_params(KV))
    engine.scheduler.allocated(request, BLOCK_IDS, 70)
    engine.step()
    engine.scheduler.received({"r"})
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert engine.scheduler.finished(request) == (False, None)
    assert engine.step() == StepOrders()


def test_orders_of_the_front_end_are_passed_on() -> None:
    engine = Engine()
    for params in (grpc.renew_params(KV, 5.0), grpc.release_params(KV)):
        engine.scheduler.on_new_request(FakeRequest(params))
    orders = engine.step()
    assert orders == StepOrders(renewed={"t": 5.0}, released=["t"])
    assert not orders.idle
    assert engine.step().idle


def test_the_ports_of_the_workers_are_told_to_who_asks() -> None:
    engine = Engine()
    engine.scheduler.ports = [7010, 7011]
    request = FakeRequest(grpc.ports_params())
    assert engine.scheduler.finished(request) == (False, {"ports": [7010, 7011]})


@pytest.mark.parametrize("params", [None, {"do_remote_prefill": True}])
def test_requests_of_other_transports_are_left_alone(params: dict[str, Any] | None) -> None:
    engine = Engine()
    request = FakeRequest(params)
    engine.scheduler.on_new_request(request)
    assert engine.scheduler.num_matched_tokens(request, 0) == 0
    engine.scheduler.allocated(request, BLOCK_IDS, 70)
    assert engine.scheduler.finished(request) == (False, None)
    assert engine.step(request, 70) == StepOrders()
