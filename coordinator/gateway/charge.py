"""A request's charge: what is kept of it for good. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from coordinator.policy.pricing import Seat, cost_nano, reading_gpu_s, writing_gpu_s
from coordinator.record import RequestRecord
from pdserve.config_ledger import Prices
from pdserve.errors import PdserveError
from pdserve.types import Mode, Usage


@dataclass(frozen=True, slots=True)
class Charge:
    """One answer's entry in the ledger, made once, when it ends.

    `charge_id` is the coordinator's own: a client may use a `request_id` again. `at_us` is in
    microseconds since the Unix epoch; `outcome` is "ok" or the error's reason; tokens are as
    the API's usage counts them, or counted so far where the answer was cut off; costs are in
    billionths of the ledger's currency.
    """

    charge_id: str
    request_id: str
    at_us: int
    tenant: str
    key_id: str
    model: str
    mode: str
    arm: str
    surface: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefill_gpu_s: float
    decode_gpu_s: float
    prefill_nano: int
    decode_nano: int


_DECODER = msgspec.json.Decoder(Charge)


def to_line(charge: Charge) -> bytes:
    """The charge as one line of JSON, its end included."""
    return msgspec.json.encode(charge) + b"\n"


def from_line(line: bytes) -> Charge:
    """Raises ValueError for a line that was not written whole."""
    return _DECODER.decode(line)


def charge_of(
    record: RequestRecord, error: PdserveError | None, prices: Prices, charge_id: str, at_us: int
) -> Charge | None:
    """What a request that ended is charged; None for one that got no token.

    It pays for one run: its prompt read once, each token written once. What was tried in vain,
    or done again because a worker was lost, is nobody's debt.
    """
    route, reader, writer = record.route, record.reader, record.writer
    if record.first_token is None or route is None or reader is None or writer is None:
        return None
    used = record.usage or Usage(
        record.prompt_tokens, record.answered_tokens, record.predicted_cached_tokens
    )
    # A prompt's last chunk writes the first token; of one that was read elsewhere, a step does.
    steps = used.completion_tokens - (route.mode is Mode.COLOCATED)
    prefill_gpu_s = reading_gpu_s(reader, used.prompt_tokens, used.cached_tokens)
    decode_gpu_s = writing_gpu_s(writer, used.prompt_tokens, max(0, steps))
    counted = record.counts_prompt
    return Charge(
        charge_id=charge_id,
        request_id=record.request_id,
        at_us=at_us,
        tenant=record.tenant,
        key_id=record.key_id,
        model=record.model,
        mode=route.mode.value,
        arm=route.arm,
        surface=record.surface,
        outcome="ok" if error is None else error.reason.label,
        prompt_tokens=used.prompt_tokens * counted,
        cached_tokens=used.cached_tokens * counted,
        completion_tokens=used.completion_tokens,
        reasoning_tokens=used.reasoning_tokens or 0,
        prefill_gpu_s=prefill_gpu_s,
        decode_gpu_s=decode_gpu_s,
        prefill_nano=cost_nano(prefill_gpu_s, _hour(reader, prices)),
        decode_nano=cost_nano(decode_gpu_s, _hour(writer, prices)),
    )


def _hour(seat: Seat, prices: Prices) -> float:
    return prices.prefill if seat.reads_only else prices.decode
