"""What a request is charged, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.gateway.charge import Charge, charge_of, from_line, to_line
from coordinator.policy.estimate import Timings
from coordinator.policy.pricing import Seat, cost_nano, reading_gpu_s, writing_gpu_s
from coordinator.record import RequestRecord
from pdserve.config_ledger import Prices
from pdserve.errors import ErrorReason, PdserveError
from pdserve.types import Mode, Route, Usage

TIMINGS = Timings(step_s=0.01, token_s=1e-4, pair_s=1e-8, sequence_s=1e-3, context_s=1e-6)
SEAT = Seat(TIMINGS, gpus=2, chunk_tokens=512, sharing=4, reads_only=False)
PRICES = Prices(prefill=3.6, decode=7.2)


def test_a_prompt_pays_for_what_is_read_and_its_part_of_each_step() -> None:
    # 800 tokens, 480,000 pairs, two chunks that four share; on two GPUs.
    assert reading_gpu_s(SEAT, 1000, 200) == pytest.approx(2 * (0.08 + 0.0048 + 0.005))
    # The last token of a prompt that is wholly cached is read, after 999 others.
    assert reading_gpu_s(SEAT, 1000, 1000) == pytest.approx(2 * (1e-4 + 999.5e-8 + 0.0025))


def test_an_answer_pays_for_its_tokens_its_context_and_its_part_of_each_step() -> None:
    assert writing_gpu_s(SEAT, 1000, 100) == pytest.approx(2 * 100 * (0.001 + 0.00105 + 0.0025))
    assert writing_gpu_s(SEAT, 1000, 0) == 0


def test_those_who_share_a_step_pay_for_it_once() -> None:
    alone = replace(SEAT, gpus=1, sharing=1)
    shared = 4 * writing_gpu_s(replace(alone, sharing=4), 0, 1)
    assert shared - 4 * writing_gpu_s(alone, 0, 1) == pytest.approx(TIMINGS.step_s * (1 - 4))


def test_money_is_in_whole_billionths() -> None:
    assert cost_nano(3600, 2.5) == 2_500_000_000
    assert cost_nano(0.91, 4.0) == 1_011_111
    assert cost_nano(0.91, 0.0) == 0


def record(mode: Mode = Mode.DISAGGREGATED) -> RequestRecord:
    made = RequestRecord("r1", "http", "chat", True, "trace", 100.0)
    made.model, made.tenant, made.key_id = "tiny", "acme", "k1"
    made.route = Route(mode, "because", "blue")
    made.usage = Usage(1000, 100, 200)
    made.reader = replace(SEAT, reads_only=mode is Mode.DISAGGREGATED)
    made.writer = SEAT
    made.first_token = 100.5
    return made


def charge(made: RequestRecord, error: PdserveError | None = None) -> Charge:
    charged = charge_of(made, error, PRICES, "c1", 5)
    assert charged is not None
    return charged


def test_a_charge_names_who_used_what_and_each_phase_has_its_pool_s_price() -> None:
    assert charge(record()) == Charge(
        charge_id="c1",
        request_id="r1",
        at_us=5,
        tenant="acme",
        key_id="k1",
        model="tiny",
        mode="disaggregated",
        arm="blue",
        surface="http",
        outcome="ok",
        prompt_tokens=1000,
        cached_tokens=200,
        completion_tokens=100,
        reasoning_tokens=0,
        prefill_gpu_s=pytest.approx(0.1796),
        decode_gpu_s=pytest.approx(0.91),
        prefill_nano=179_600,  # a thousandth of a GPU second at 3.6 an hour is a millionth
        decode_nano=1_820_000,
    )


def test_a_prompt_s_own_worker_writes_the_first_token_as_it_reads_the_last() -> None:
    colocated = charge(record(Mode.COLOCATED))
    assert colocated.decode_gpu_s == pytest.approx(writing_gpu_s(SEAT, 1000, 99))
    assert colocated.prefill_nano == 2 * 179_600


def test_what_was_cut_off_pays_for_what_it_got() -> None:
    made = record()
    made.usage, made.prompt_tokens, made.answered_tokens = None, 1000, 7
    made.predicted_cached_tokens = 200
    cut_off = charge(made, PdserveError(ErrorReason.CANCELLED, "the client left"))
    assert (cut_off.outcome, cut_off.prompt_tokens, cut_off.cached_tokens) == (
        "cancelled",
        1000,
        200,
    )
    assert cut_off.completion_tokens == 7
    assert cut_off.decode_gpu_s == pytest.approx(writing_gpu_s(SEAT, 1000, 7))


def test_who_got_no_token_is_not_charged() -> None:
    made = record()
    made.first_token = None
    assert charge_of(made, None, PRICES, "c1", 5) is None


def test_a_second_choice_pays_for_its_reading_and_counts_no_prompt() -> None:
    made = record().twin("r1-1", counts_prompt=False)
    second = charge(made)
    assert (second.prompt_tokens, second.cached_tokens) == (0, 0)
    assert second.prefill_nano == 179_600


def test_a_line_is_read_back_or_refused() -> None:
    line = to_line(charge(record()))
    assert from_line(line) == charge(record())
    for end in (1, len(line) // 2, len(line) - 2):
        with pytest.raises(ValueError, match=r".+"):
            from_line(line[:end])
