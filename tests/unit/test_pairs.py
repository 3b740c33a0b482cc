"""The standing of pairs: what each event makes of each state, and when they are probed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.policy.pairs import (
    MAX_RETRY_S,
    RETRY_S,
    Pair,
    PairState,
    PairTable,
    Standing,
    mixture,
    pairs_of,
)
from pdserve.types import Fingerprint, Role, WorkerInfo

NOW = 1000.0
UNTRIED = Standing()
PROVEN = Standing(PairState.PROVEN)
REFUSED = Standing(PairState.REFUSED, "not alike")
QUARANTINED = Standing(PairState.QUARANTINED, "it broke", setbacks=1, probe_at=NOW)
PAIR = Pair(("p", "1"), ("d", "1"), "nixl")
OTHER = replace(PAIR, transport="grpc")


def told(event: str, standing: Standing) -> Standing:
    match event:
        case "probe passed":
            return standing.probe_passed("")
        case "probe failed":
            return standing.probe_failed("it broke", NOW)
        case "probe put off":
            return standing.probe_put_off("it is full", NOW)
        case "request passed":
            return standing.request_passed()
        case _:
            return standing.request_failed("it broke", NOW, quarantine_after=2)


ROWS = [
    (UNTRIED, "probe passed", PROVEN),
    (UNTRIED, "probe failed", replace(QUARANTINED, probe_at=NOW + RETRY_S)),
    (
        UNTRIED,
        "probe put off",
        Standing(PairState.UNTRIED, "it is full", probe_at=NOW + RETRY_S),
    ),
    (UNTRIED, "request failed", UNTRIED),
    (PROVEN, "request failed", replace(PROVEN, failures=1)),
    (
        replace(PROVEN, failures=1),
        "request failed",
        Standing(
            PairState.QUARANTINED,
            "2 requests failed in a row, the last one: it broke",
            failures=2,
            setbacks=1,
            probe_at=NOW + RETRY_S,
        ),
    ),
    (replace(PROVEN, failures=1, setbacks=2), "request passed", PROVEN),
    (QUARANTINED, "probe passed", replace(PROVEN, setbacks=1)),
    (QUARANTINED, "probe failed", replace(QUARANTINED, setbacks=2, probe_at=NOW + 2 * RETRY_S)),
    (
        replace(QUARANTINED, setbacks=4),
        "probe put off",
        Standing(PairState.QUARANTINED, "it is full", setbacks=4, probe_at=NOW + RETRY_S),
    ),
    # What began before the quarantine and ends in it changes nothing.
    (QUARANTINED, "request failed", QUARANTINED),
    (REFUSED, "request failed", REFUSED),
]


@pytest.mark.parametrize(
    ("before", "event", "after"), ROWS, ids=lambda it: it if isinstance(it, str) else it.state
)
def test_standings(before: Standing, event: str, after: Standing) -> None:
    assert told(event, before) == after


def test_probes_of_a_pair_that_stays_broken_become_rare_but_never_stop() -> None:
    standing, now, waits = UNTRIED, NOW, []
    for _ in range(8):
        standing = standing.probe_failed("it broke", now)
        waits.append(standing.probe_at - now)
        now = standing.probe_at
    assert waits == [2, 4, 8, 16, 32, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]


def test_a_pair_whose_probes_pass_and_whose_requests_fail_is_probed_ever_more_rarely() -> None:
    standing = PROVEN
    for _ in range(3):
        standing = standing.request_failed("", NOW, 1).probe_passed("")
    assert standing.request_failed("", NOW, 1).probe_at == NOW + 8 * RETRY_S


def table(quarantine_after: int = 3) -> PairTable:
    pairs = PairTable(quarantine_after)
    pairs.meet(PAIR)
    pairs.meet(OTHER)
    return pairs


def test_new_pairs_are_due_at_once_and_have_no_traffic() -> None:
    pairs = table()
    assert pairs.due(NOW) == [PAIR, OTHER]
    assert not pairs.proven


def test_a_pair_whose_probe_was_put_off_is_due_again_a_little_later() -> None:
    pairs = table()
    pairs.probe_put_off(PAIR, "it is full", NOW)
    assert pairs.due(NOW) == [OTHER]
    assert pairs.next_probe(NOW) == NOW + RETRY_S
    assert pairs.due(NOW + RETRY_S) == [PAIR, OTHER]
    assert not pairs.proven


@pytest.mark.parametrize("order", [(PAIR, OTHER), (OTHER, PAIR)])
def test_proven_transports_are_told_best_first(order: tuple[Pair, Pair]) -> None:
    pairs = table()
    for pair in order:
        pairs.probe_passed(pair, "")
    assert pairs.proven == {("p", "d"): ("nixl", "grpc")}
    assert pairs.due(NOW) == []
    assert pairs.next_probe(NOW) is None


def test_a_quarantine_takes_one_transport_out_until_a_probe_goes_through() -> None:
    pairs = table()
    for pair in (PAIR, OTHER):
        pairs.probe_passed(pair, "")
    assert [pairs.request_failed(PAIR, "it broke", NOW) for _ in range(4)] == [0, 0, 1, 0]
    assert pairs.proven == {("p", "d"): ("grpc",)}
    assert pairs.due(NOW) == []
    assert pairs.next_probe(NOW) == NOW + RETRY_S
    assert pairs.due(NOW + RETRY_S) == [PAIR]
    pairs.probe_passed(PAIR, "")
    assert pairs.proven == {("p", "d"): ("nixl", "grpc")}


def test_only_failures_in_a_row_count() -> None:
    pairs = table(quarantine_after=2)
    pairs.probe_passed(PAIR, "")
    for _ in range(5):
        assert not pairs.request_failed(PAIR, "it broke", NOW)
        pairs.request_passed(PAIR)
    assert pairs[PAIR].state is PairState.PROVEN


def test_a_lost_process_is_forgotten_with_what_is_still_told_of_it() -> None:
    pairs = table()
    assert pairs.have_met(PAIR.prefill, PAIR.decode)
    pairs.forget(("d", "1"))
    pairs.probe_passed(PAIR, "")
    pairs.probe_failed(PAIR, "it broke", NOW)
    pairs.probe_put_off(PAIR, "it is full", NOW)
    pairs.request_passed(PAIR)
    assert not pairs.request_failed(PAIR, "it broke", NOW)
    assert list(pairs) == []
    assert not pairs.have_met(PAIR.prefill, PAIR.decode)


def test_a_refused_pair_is_never_due() -> None:
    pairs = PairTable(1)
    pairs.meet(PAIR, "not alike")
    assert pairs.due(NOW) == []
    assert not pairs.proven


# Who may be a pair at all.


def worker(
    worker_id: str, *transports: str, weights: str = "bfloat16", **fingerprint: object
) -> WorkerInfo:
    like: dict[str, object] = {
        "model_revision": "rev-1",
        "kv_dtype": "bfloat16",
        "block_size": 32,
        "layout": "NHD",
    }
    return WorkerInfo(
        worker_id=worker_id,
        epoch="1",
        roles=frozenset({Role.PREFILL}),
        model="tiny",
        fingerprint=Fingerprint(**{**like, **fingerprint}),  # type: ignore[arg-type]
        engine="fake",
        context_length=1,
        kv_capacity_tokens=1,
        transports=transports,
        weights=weights,
        version="0",
        chunk_tokens=1,
        max_sequences=1,
        tells_cache=False,
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted", "pairs"),
    [
        ("nixl grpc", "nixl grpc", None, {"nixl": "", "grpc": ""}),
        ("nixl grpc", "grpc nixl", None, {"grpc": "", "nixl": ""}),
        ("nixl grpc", "grpc", None, {"grpc": ""}),
        ("nixl grpc", "nixl grpc", "grpc", {"grpc": ""}),
        (
            "nixl", "grpc", None,
            {"": "no KV transport in common: the prefill side has nixl, the decode side grpc"},
        ),
        (
            "nixl", "nixl grpc", "grpc",
            {
                "": "the KV transport is to be grpc: the prefill side has nixl, "
                "the decode side nixl, grpc"
            },
        ),
        (
            "", "grpc", None,
            {"": "no KV transport in common: the prefill side has none, the decode side grpc"},
        ),
    ],
)  # fmt: skip
def test_the_transports_of_a_pair(
    ours: str, theirs: str, wanted: str | None, pairs: dict[str, str]
) -> None:
    workers = worker("p", *ours.split()), worker("d", *theirs.split())
    met = pairs_of(*workers, wanted, mixed_precision=False)
    assert [(pair.transport, refusal) for pair, refusal in met.items()] == list(pairs.items())
    assert {(pair.prefill, pair.decode) for pair in met} == {(("p", "1"), ("d", "1"))}


def refusals(prefill: WorkerInfo, *, mixed_precision: bool = False) -> list[str]:
    """Of its pairs with one decode worker."""
    pairs = pairs_of(prefill, worker("d", "nixl"), None, mixed_precision=mixed_precision)
    return list(pairs.values())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_revision", "rev-2", "model_revision is 'rev-2' on the prefill side and 'rev-1' "),
        ("kv_dtype", "fp8", "kv_dtype is 'fp8' on the prefill side and 'bfloat16' "),
        ("block_size", 16, "block_size is 16 on the prefill side and 32 "),
        ("layout", "HND", "layout is 'HND' on the prefill side and 'NHD' "),
        ("tensor_parallel", 3, "tensor_parallel is 3 on the prefill side and 1 "),
        ("pipeline_parallel", 2, "pipeline_parallel is 2 on the prefill side and 1 "),
    ],
)
def test_a_difference_refuses_the_pair_by_name(field: str, value: object, words: str) -> None:
    assert refusals(worker("p", "nixl", **{field: value})) == [f"{words}on the decode side"]


def test_every_difference_is_named() -> None:
    assert refusals(worker("p", "nixl", kv_dtype="fp8", block_size=16)) == [
        "kv_dtype is 'fp8' on the prefill side and 'bfloat16' on the decode side; "
        "block_size is 16 on the prefill side and 32 on the decode side"
    ]


def test_weights_of_another_precision_refuse_the_pair_unless_that_is_meant() -> None:
    prefill = worker("p", "nixl", weights="fp8")
    words = "weights are fp8 on the prefill side and bfloat16 on the decode side"
    assert mixture(prefill, worker("d")) == words
    assert refusals(prefill) == [f"{words}, and mixed_precision is off"]
    assert refusals(prefill, mixed_precision=True) == [""]
    assert mixture(prefill, prefill) == ""


def test_mixed_precision_allows_no_other_difference() -> None:
    prefill = worker("p", "nixl", weights="fp8", kv_dtype="fp8")
    assert refusals(prefill, mixed_precision=True) == [
        "kv_dtype is 'fp8' on the prefill side and 'bfloat16' on the decode side"
    ]
