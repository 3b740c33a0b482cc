"""Where answers part, and what `pdserve eval` makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import log
from typing import Any

import httpx
import pytest

from cli.eval import tell
from measure.eval.parting import NEAR_TIE, Parting, Position, parting
from measure.eval.result import Graded, Result, Run, Way, from_json, to_json
from measure.eval.run import run
from measure.eval.suite import Suite

AB = Position("a", {"a": -0.5, "b": -0.6})
BA = Position("b", {"b": -0.4, "a": -0.5})
FAR = Position("b", {"b": -0.1, "a": -3.1})
ALONE = Position("b", {"b": -0.2, "c": -1.2})
FORCED = Position("b", {"b": -9.0, "c": -0.1})


@pytest.mark.parametrize(
    ("one", "other", "at", "gap"),
    [
        ([AB], [BA], 0, 0.1),
        ([AB, AB], [AB, BA], 1, 0.1),
        # One way alone finds them close.
        ([AB], [FAR], 0, 3.0),
        ([FAR], [AB], 0, 3.0),
        # A token that is not among the likeliest of the other way is at least as far as the last.
        ([AB], [ALONE], 0, 1.0),
        # It may be as likely as this one, which a grammar forced.
        ([AB], [FORCED], 0, None),
        # Nothing is told, or one answer was cut off.
        ([], [], 0, None),
        ([AB], [AB, BA], 1, None),
    ],
)
def test_where_answers_part_and_by_how_much(
    one: list[Position], other: list[Position], at: int, gap: float | None
) -> None:
    assert parting(one, other) == Parting(at, None if gap is None else pytest.approx(gap))


def test_a_near_tie_is_a_few_steps_of_rounding_and_nothing_is_known_without_a_gap() -> None:
    gaps = (0.0, NEAR_TIE, NEAR_TIE + 0.01, None)
    assert [Parting(0, gap).is_near_tie for gap in gaps] == [True, True, False, False]
    assert [Parting(0, gap).is_fault for gap in gaps] == [False, False, True, False]


def parted(*partings: Parting | None) -> Run:
    answers = (Graded(f"q{at}", "", True, "", parted=one) for at, one in enumerate(partings))
    return Run(Way("disaggregated"), tuple(answers))


def told(other: Run) -> Result:
    first = Run(Way("colocated"), tuple(Graded(one.id, "", True, "x") for one in other.answers))
    return Result("s", "d", "tiny", "2026-11-30T12:00:00+00:00", "", (first, other))


def test_near_ties_are_no_fault_and_what_is_none_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not tell(told(parted(Parting(3, 0.125), Parting(0, 0.0), Parting(2))), None)
    out = capsys.readouterr().out
    assert (
        "0 of 3 answers alike; parted: 2 at near ties (at most 0.125 apart), 1 untold; the same"
        in out
    )
    assert tell(told(parted(Parting(3, 0.125), Parting(7, 2.5))), None)
    out = capsys.readouterr().out
    assert (
        "parted: 1 at near ties (at most 0.125 apart), "
        "1 at no near tie (q1 after 7 tokens, 2.5 apart); the same" in out
    )


def test_partings_are_kept_in_the_result() -> None:
    kept = told(parted(Parting(3, 0.125), None, Parting(2)))
    assert from_json(to_json(kept)) == kept


class Server:
    """Answers with one token; that of the second mode is as likely as the first's, nearly so or
    not at all, as the question says."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/usage":
            return httpx.Response(404)
        body = json.loads(request.content)
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        second = request.headers.get("x-pdserve-mode") == "disaggregated"
        chances = {"same": (0.9, 0.1), "near": (0.5, 0.5), "far": (0.1, 0.9)}[question]
        best = ("b" if question != "same" else "a") if second else "a"
        shown = {"a": log(chances[0]), "b": log(chances[1])}
        choice: dict[str, Any] = {"message": {"content": best}}
        if body.get("logprobs"):
            likeliest = [{"token": token, "logprob": each} for token, each in shown.items()]
            one = {"token": best, "logprob": shown[best], "top_logprobs": likeliest}
            choice["logprobs"] = {"content": [one]}
        return httpx.Response(200, json={"choices": [choice]})


def asked(
    server: Callable[[httpx.Request], httpx.Response], ways: list[Way], **request: Any
) -> Result:
    cases = [{"id": name, "ask": name, "exact": "a"} for name in ("same", "near", "far")]
    suite = Suite.model_validate({"name": "three", "request": request, "cases": cases})
    with httpx.Client(transport=httpx.MockTransport(server), base_url="http://s") as client:
        return run(client, suite, "tiny", ways, None)


BOTH = [Way("colocated"), Way("disaggregated")]


@pytest.mark.parametrize("shown", [{"top_logprobs": None}, {"top_logprobs": []}, {}])
def test_what_some_servers_do_not_show_is_untold(shown: dict[str, Any]) -> None:
    server = Server()

    def terse(request: httpx.Request) -> httpx.Response:
        told = server(request)
        if told.is_success:
            (choice,) = told.json()["choices"]
            for one in choice["logprobs"]["content"]:
                del one["top_logprobs"]
                one.update(shown)
            return httpx.Response(200, json={"choices": [choice]})
        return told

    _, other = asked(terse, BOTH).runs
    assert (other.untold, other.near_ties, other.faults) == (2, (), ())


def test_answers_that_are_compared_tell_how_likely_they_were() -> None:
    _, other = asked(Server(), BOTH).runs
    assert [answer.parted for answer in other.answers] == [
        None,
        Parting(0, pytest.approx(0.0)),
        Parting(0, pytest.approx(log(9))),
    ]
    assert [one.id for one in other.near_ties] == ["near"]
    assert [one.id for one in other.faults] == ["far"]
    assert other.untold == 0


def test_sampled_answers_part_as_they_like() -> None:
    _, other = asked(Server(), BOTH, temperature=0.7).runs
    assert (other.near_ties, other.untold, other.faults) == ((), 2, ())


def test_no_way_finds_what_another_one_has_cached() -> None:
    server = Server()
    _, _, again = asked(server, [*BOTH, BOTH[0]]).runs
    assert [answer.parted for answer in again.answers] == [None, None, None]
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 3
    assert salts == salts[:3] * 3


def test_one_way_alone_is_asked_as_the_suite_says() -> None:
    server = Server()
    asked(server, [Way("colocated")])
    assert set(server.bodies[0]) == {"temperature", "model", "messages"}
