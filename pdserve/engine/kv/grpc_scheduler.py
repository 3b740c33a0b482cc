"""The half of the gRPC connector in `VLLM::EngineCore`: which blocks hold what, and when.

It is given vLLM's requests and needs nothing else of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pdserve.engine.kv.grpc import ORDER_KEY, Kind
from pdserve.engine.kv.grpc_fetch import Order

_READ = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""The `RequestStatus` of a prompt that was read to its end."""


@dataclass(slots=True)
class Announced:
    """A prompt that the engine will read."""

    transfer_id: str
    num_tokens: int
    num_blocks: int


@dataclass(slots=True)
class Computed:
    """After the step, the first `readable` blocks hold what they should; `blocks` are new."""

    transfer_id: str
    blocks: list[int]
    readable: int


@dataclass(slots=True)
class StepOrders:
    """What the workers are told with one step; before it: `withdrawn`, `rewound` and
    `announced`, the rest after it.

    `rewound` prompts lost their blocks and will be read anew. `finished` maps transfer ids to
    the request and the seconds that its blocks are held.
    """

    withdrawn: list[str] = field(default_factory=list)
    rewound: list[str] = field(default_factory=list)
    announced: list[Announced] = field(default_factory=list)
    computed: list[Computed] = field(default_factory=list)
    finished: dict[str, tuple[str, float]] = field(default_factory=dict)
    renewed: dict[str, float] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    fetches: list[Order] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether the step may wait a little."""
        return not any(getattr(self, each.name) for each in fields(self))


@dataclass(slots=True)
class _Reading:
    """A prompt that is read here for others; `told` blocks are known to the workers."""

    request: Any
    transfer_id: str
    lease_s: float
    told: int = 0


class GrpcScheduler:
    """Called by vLLM's scheduler, in its own thread alone."""

    def __init__(self, block_size: int) -> None:
        """`ports` and `cache_manager` are set before the first request."""
        self._block_size = block_size
        self.ports: list[int] = []
        self.cache_manager: Any = None
        self._orders = StepOrders()
        self._reading: dict[str, _Reading] = {}
        self._fetching: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        order = _order(request)
        match order.get("kind"):
            case Kind.HOLD:
                transfer_id, num_tokens = order["transfer_id"], request.num_prompt_tokens
                reading = _Reading(request, transfer_id, order["lease_s"])
                self._reading[request.request_id] = reading
                self._orders.announced.append(
                    Announced(transfer_id, num_tokens, self._num_blocks(num_tokens))
                )
            case Kind.RENEW:
                self._orders.renewed[order["transfer_id"]] = order["lease_s"]
            case Kind.RELEASE:
                self._orders.released.append(order["transfer_id"])

    def num_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that will be fetched beyond those that are here: the rest of the prompt."""
        order = _order(request)
        if order.get("kind") != Kind.FETCH or order.get("done"):
            return 0
        return max(0, int(request.num_prompt_tokens) - num_computed_tokens)

    def allocated(self, request: Any, block_ids: list[int], num_external_tokens: int) -> None:
        """Blocks of the request, of which those of the last tokens of its prompt are fetched."""
        order = _order(request)
        if order.get("kind") != Kind.FETCH or order.get("done") or not num_external_tokens:
            return
        # A request that is preempted later computes its prompt anew: the blocks are gone.
        order["done"] = True
        num_tokens = request.num_prompt_tokens
        first = (num_tokens - num_external_tokens) // self._block_size
        self._fetching.add(request.request_id)
        self._orders.fetches.append(
            Order(
                request.request_id,
                order["transfer_id"],
                order["epoch"],
                order["host"],
                order["ports"],
                num_tokens,
                first,
                list(block_ids[first : self._num_blocks(num_tokens)]),
            )
        )

    def take_orders(self, scheduler_output: Any) -> StepOrders:
        """What the step that is about to run means for the workers."""
        for request_id, reading in self._reading.items():
            if reading.request.status.name == "PREEMPTED" and reading.told:
                # Its blocks are somebody else's now. A reader waits for the new ones: nothing
                # is wrong with the pair.
                self._orders.rewound.append(reading.transfer_id)
                reading.told = 0
            scheduled = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if scheduled:
                self._tell_computed(reading, reading.request.num_computed_tokens + scheduled)
        orders, self._orders = self._orders, StepOrders()
        return orders

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Whether the workers hold the request's blocks on, and what is answered to it."""
        if _order(request).get("kind") == Kind.PORTS:
            return False, {"ports": self.ports}
        request_id = request.request_id
        if request_id in self._fetching:
            self._fetching.discard(request_id)
            self._orders.cancelled.append(request_id)
        reading = self._reading.pop(request_id, None)
        if reading is None:
            return False, None
        if request.status.name not in _READ:
            self._orders.withdrawn.append(reading.transfer_id)
            return False, None
        self._orders.finished[reading.transfer_id] = (request_id, reading.lease_s)
        return True, None

    def received(self, request_ids: set[str]) -> None:
        """Their fetches have ended."""
        self._fetching -= request_ids

    def _tell_computed(self, reading: _Reading, num_tokens: int) -> None:
        num_prompt_tokens = reading.request.num_prompt_tokens
        whole = num_tokens >= num_prompt_tokens
        readable = self._num_blocks(num_prompt_tokens) if whole else num_tokens // self._block_size
        if readable <= reading.told:
            return
        (blocks,) = self.cache_manager.get_block_ids(reading.request.request_id)
        new = list(blocks[reading.told : readable])
        reading.told = readable
        self._orders.computed.append(Computed(reading.transfer_id, new, readable))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _order(request: Any) -> dict[str, Any]:
    params = request.kv_transfer_params or {}
    order: dict[str, Any] = params.get(ORDER_KEY, {})
    return order
