"""The pure parts of the benchmark of the token path."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure import processes
from measure.machine import model_name
from measure.stats import Quantiles, deviations, quantiles, repeated
from measure.token_path import report
from measure.token_path.fake_answers import QuickAnswer
from measure.token_path.jobs import Latency, Outcome, Rate
from measure.token_path.plan import Measured, Scenario
from measure.token_path.sse import AnswerError, SseMeter
from tests.support.patience import WITHIN_S

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (
    b'data: {"delta":{"role":"assistant","content":""}}\n\n'
    b'data: {"delta":{"content":" the"}}\n\n'
    b'data: {"delta":{"content":" of and"}}\n\n'
    b'data: {"delta":{"content":" to"},"finish_reason":"length"}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chunked(data: bytes, sizes: Iterable[int] = ()) -> bytes:
    """In HTTP chunks of these sizes, and what is left in one more."""
    out = b""
    for size in (*sizes, len(data)):
        piece, data = data[:size], data[size:]
        if piece:
            out += b"%x\r\n%b\r\n" % (len(piece), piece)
    return out + b"0\r\n\r\n"


def pieces(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    out = []
    for size in (*sizes, len(data)):
        out.append(data[:size])
        data = data[size:]
    return out


sizes = st.lists(st.integers(1, 40), max_size=12)


@given(chunks=sizes, reads=sizes)
def test_tokens_are_counted_however_the_answer_is_cut(chunks: list[int], reads: list[int]) -> None:
    meter = SseMeter()
    tokens = 0
    for piece in pieces(HEAD + chunked(EVENTS + DONE, chunks), reads):
        count = meter.feed(piece)
        assert count >= 0
        tokens += count
    assert tokens == 4
    assert meter.complete


def test_tokens_count_when_their_event_is_whole() -> None:
    meter = SseMeter()
    event = b'data: {"content":" the"}\n\n'
    data = HEAD + b"%x\r\n%b\r\n" % (len(event), event)
    assert meter.feed(data[:-5]) == 0
    assert meter.feed(data[-5:]) == 1
    assert not meter.complete


def test_an_answer_without_its_end_is_an_error() -> None:
    with pytest.raises(AnswerError, match=r"without .* after .*lost"):
        SseMeter().feed(HEAD + chunked(EVENTS + b'data: {"error":"lost"}\n\n'))


def test_a_refusal_is_an_error_that_shows_it() -> None:
    with pytest.raises(AnswerError, match=r"429(.|\n)*slow down"):
        SseMeter().feed(b"HTTP/1.1 429 Too Many Requests\r\n\r\nslow down")


class Transport:
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


def test_the_fake_writes_what_the_meter_counts() -> None:
    transport = Transport()
    QuickAnswer(transport, "quick", 1)  # type: ignore[arg-type]
    meter = SseMeter()
    assert meter.feed(transport.written) == 1
    assert meter.complete


def test_quantiles_and_repeats() -> None:
    assert quantiles([float(value) for value in range(101)]) == Quantiles(50.0, 99.0)
    assert deviations([18.0, 22.0, 22.0], 20.0) == Quantiles(2.0, 2.0)
    assert Quantiles(3.0, 9.0) - Quantiles(1.0, 2.0) == Quantiles(2.0, 7.0)
    figure = repeated([3.0, 1.0, 2.0])
    assert (figure.median, figure.lowest, figure.highest) == (2.0, 1.0, 3.0)


def test_the_model_of_a_processor() -> None:
    assert model_name(["processor\t: 0", "model name\t: Some CPU: fast"]) == "Some CPU: fast"


def outcome(cpu_us: float, latency: Latency | None) -> Outcome:
    return Outcome(Rate(12_800.0, cpu_us, 0.25, 0.5, 1.0), latency)


def rendered() -> str:
    latency = Latency(
        itl=Quantiles(20.5, 24.0),
        direct_itl=Quantiles(20.0, 25.0),
        jitter=Quantiles(1.5, 4.0),
        direct_jitter=Quantiles(1.0, 2.0),
        ttft=Quantiles(2.0, 3.0),
        direct_ttft=Quantiles(0.5, 1.0),
    )
    paced, flat_out = Scenario(256, paced=True), Scenario(256, paced=False)
    measured = [
        *(Measured("one", paced, outcome(cpu_us, latency)) for cpu_us in (10.0, 12.0)),
        *(Measured("other", paced, outcome(cpu_us, latency)) for cpu_us in (20.0, 26.0)),
        *(Measured(name, flat_out, outcome(5.0, None)) for name in ("one", "other") * 2),
    ]
    return report.render(measured, "A machine", "make bench", ["A note."])


def test_the_report_has_medians_and_ranges() -> None:
    text = rendered()
    assert "Made by `make bench`: A machine. Median of 2 runs" in text
    assert "A note." in text
    assert "| 256 | one | 11.0 (10.0 to 12.0) | 12,800 (12,800 to 12,800) |" in text
    assert "| 256 | other | 23.0 (20.0 to 26.0) |" in text
    # First token added: 2.0 - 0.5 and 3.0 - 1.0; inter-token added: 20.5 - 20 and 24 - 25.
    assert "| 256 | one | 1.50 (1.50 to 1.50) | 2.00 (2.00 to 2.00) | 0.50 " in text
    assert "| 0.50 (0.50 to 0.50) | -1.00 (-1.00 to -1.00) | 1.50 " in text


def test_the_part_of_a_core_is_the_routers_own() -> None:
    rate = outcome(10.0, None).rate
    assert rate.router_share == pytest.approx(0.128)
    assert rate.foreign_share == pytest.approx(0.25 - 0.128)


def test_a_run_among_other_work_says_so() -> None:
    scenario = Scenario(64, paced=False)
    quiet = Measured("one", scenario, Outcome(Rate(10_000.0, 50.0, 0.55, 0.5, 1.0)))
    noisy = Measured("one", scenario, Outcome(Rate(10_000.0, 50.0, 1.0, 0.5, 1.0)))
    assert "Noisy" not in report.render([quiet], "m", "c", [])
    assert "other processes used 50% of the router's core" in report.render([noisy], "m", "c", [])


async def test_a_process_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP_S", 0.1)
    # It ignores SIGTERM, and has written more than a pipe holds and anybody reads.
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        """print('{"event": "deaf"}', flush=True); sys.stdout.write('x' * 10**6); time.sleep(600)"""
    )
    program = (sys.executable, "-c", script)
    core = min(os.sched_getaffinity(0))
    async with asyncio.timeout(WITHIN_S), processes.child("deaf", core, program) as child:
        await child.event("deaf")
    assert child.ended


def test_only_the_generated_part_of_a_page_is_replaced() -> None:
    page = f"# Title\n\nBefore.\n\n{report.SECTION.begin}\nold\n{report.SECTION.end}\n\nAfter.\n"
    renewed = report.SECTION.replace(page, rendered())
    assert renewed.startswith("# Title\n\nBefore.\n\n" + report.SECTION.begin)
    assert renewed.endswith(report.SECTION.end + "\n\nAfter.\n")
    assert "old" not in renewed
    assert report.SECTION.replace(renewed, rendered()) == renewed


def test_a_page_without_a_generated_part_gets_one_at_its_end() -> None:
    renewed = report.SECTION.replace("# Title\n", rendered())
    assert renewed == "# Title\n\n" + rendered()


def test_a_page_with_half_of_the_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="only one of"):
        report.SECTION.replace(f"{report.SECTION.end}\n", rendered())
