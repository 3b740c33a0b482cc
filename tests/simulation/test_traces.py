"""Public traces are read as they are published, and equal blocks become equal tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from measure.simulation.traces import (
    Arrival,
    TraceError,
    bimodal,
    faster,
    load,
    short,
    spread,
    token_ids,
)

MOONCAKE = """\
{"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 1500, "input_length": 513, "output_length": 0, "hash_ids": [46, 2353]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
ACCESS_LOG = """\
{"surface": "http", "outcome": "ok", "prompt_tokens": 12, "completion_tokens": 0, \
"duration_ms": 500.0, "event": "request", "timestamp": "2026-11-30T07:00:03.000000Z"}
{"event": "worker ready", "timestamp": "2026-11-30T07:00:03.500000Z"}
{"surface": "http", "outcome": "ok", "prompt_tokens": 900, "completion_tokens": 40, \
"duration_ms": 3000.0, "event": "request", "timestamp": "2026-11-30T07:00:04.000000Z"}
{"surface": "shadow", "outcome": "ok", "prompt_tokens": 900, "completion_tokens": 40, \
"duration_ms": 3000.0, "event": "request", "timestamp": "2026-11-30T07:00:04.000000Z"}
{"surface": "http", "outcome": "overloaded", "prompt_tokens": 7, "completion_tokens": null, \
"duration_ms": 1.0, "event": "request", "timestamp": "2026-11-30T07:00:05.000000Z"}
a line of something else
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.jsonl", MOONCAKE.replace("6955", "0").replace("513", "0")),
        ("t.csv", AZURE.replace(",4808,10", ",0,0").replace(",3180,8", ",0,0")),
        ("t.log", ACCESS_LOG.replace(": 12,", ": 0,").replace(": 900,", ": 0,")),
    ],
)
def test_whatever_is_asked_and_answered_has_a_token(tmp_path: Path, name: str, text: str) -> None:
    """In any format: work is shared out, and added up, by tokens."""
    (tmp_path / name).write_text(text)
    assert {it.prompt_tokens for it in load(tmp_path / name)} == {1}
    assert min(it.answer_tokens for it in load(tmp_path / name)) == 1


def test_a_mooncake_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(MOONCAKE)
    assert load(tmp_path / "trace.jsonl") == [
        Arrival(1.5, 513, 1, (46, 2353)),
        Arrival(27.0, 6955, 52, (46, 47)),
    ]


def test_an_azure_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(AZURE)
    assert load(tmp_path / "trace.csv") == [
        Arrival(0.0, 4808, 10),
        Arrival(pytest.approx(0.052), 3180, 8),
    ]


def test_the_access_log_of_a_coordinator(tmp_path: Path) -> None:
    """Requests come in the order in which they arrived, not in that of their ends."""
    (tmp_path / "coordinator.log").write_text(ACCESS_LOG)
    assert load(tmp_path / "coordinator.log") == [
        Arrival(0.0, 900, 40),
        Arrival(pytest.approx(1.5), 12, 1),
    ]


def test_a_log_of_no_requests_is_told(tmp_path: Path) -> None:
    (tmp_path / "coordinator.log").write_text('{"event": "listening"}\n')
    with pytest.raises(TraceError, match="holds no request"):
        load(tmp_path / "coordinator.log")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.csv", b"", "holds no request"),
        ("t.csv", b"TIMESTAMP\n", "holds no request"),
        ("t.csv", b"TIMESTAMP\n2023-11-16 18:17:03\n", "no trace: a request has no ContextTokens"),
        ("t.csv", b"TIMESTAMP,ContextTokens\nnow,1\n", "no trace: .*isoformat string: 'now'"),
        ("t.csv", b"x" * 200_000, "no trace: field larger"),
        ("t.jsonl", b"\x80", "no trace: 'utf-8' codec"),
        ("t.jsonl", b'{"hash_ids": []}', "no trace: a request has no timestamp"),
        ("t.jsonl", MOONCAKE.replace("6955", "Infinity").encode(), "no trace: .*infinity"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=words):
        load(tmp_path / name)


def test_prompts_share_their_tokens_as_far_as_they_share_blocks() -> None:
    first = token_ids(Arrival(0, 1100, 1, (1, 2, 3)), 0)
    second = token_ids(Arrival(0, 1100, 1, (1, 2, 4)), 1)
    assert (len(first), len(second)) == (1100, 1100)
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second)


def test_prompts_without_blocks_differ_from_their_first_token_on() -> None:
    one, other = (token_ids(Arrival(0, 40, 1), number) for number in (1, 2))
    assert len(one) == len(other) == 40
    assert one[0] != other[0]


def test_what_comes_in_one_step_of_a_trace_can_be_spread_over_it() -> None:
    arrivals = [Arrival(at_s, 1, 1) for at_s in (0.0, 0.0, 0.0, 2.999, 9.0, 9.0)]
    assert [one.at_s for one in spread(arrivals, 3.0)] == [0.0, 1.0, 2.0, 3.0, 9.0, 10.5]


def test_a_mix_is_repeated_by_its_seed_and_comes_at_its_rate() -> None:
    arrivals = bimodal(1000, 5.0, 7)
    assert arrivals == bimodal(1000, 5.0, 7) != bimodal(1000, 5.0, 8)
    assert 4700 < len(arrivals) < 5300
    long = [arrival for arrival in arrivals if arrival.prompt_tokens > 500]
    assert 0.08 < len(long) / len(arrivals) < 0.12
    assert all(arrival.prompt_tokens <= 500 for arrival in short(100, 5.0, 7))


def test_a_faster_trace_has_the_same_requests() -> None:
    assert faster([Arrival(6.0, 10, 2, (1,))], 3) == [Arrival(2.0, 10, 2, (1,))]
