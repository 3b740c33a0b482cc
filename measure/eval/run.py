"""Asks a server the questions of a suite, one after another."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from measure.eval import grade
from measure.eval.parting import TOP, Position, parting
from measure.eval.result import Graded, Result, Run, Way
from measure.eval.suite import Case, Suite

_Answer = tuple[Graded, list[Position]]

LEDGER_LAG_S = 5.0
"""Charges are dated by the server's clock, which may be behind ours."""


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """What a million tokens cost, of a prompt and of an answer."""

    prompt: float
    answer: float


def run(
    client: httpx.Client,
    suite: Suite,
    model: str,
    ways: Sequence[Way],
    prices: TokenPrices | None,
) -> Result:
    """Costs are by `prices`, or else those of the server's ledger, where it has one and lets us
    look.

    One request at a time: at temperature 0 a crowd may turn near ties of the best tokens, and
    answers that are to be compared must not depend on it. Nor must they depend on what the
    prefix caches hold, so that of several ways each has a cache salt of its own. Raises
    httpx.HTTPError where nobody answers at all.
    """
    began = time.time()
    salts: list[str | None] = [None]
    if len(ways) > 1:
        salts = [uuid.uuid4().hex for _ in ways]
    asked = [  # in turn: what changes meanwhile meets all ways alike
        _beside_the_first(
            [
                _ask(client, case, _body(suite, case, model, salt), way)
                for way, salt in zip(ways, salts, strict=True)
            ]
        )
        for case in suite.cases
    ]
    currency, costs = ("", {}) if prices else ledger(client, began - LEDGER_LAG_S)
    runs = tuple(
        Run(way, tuple(_priced(answer, prices, costs) for answer in answers))
        for way, answers in zip(ways, zip(*asked, strict=True), strict=True)
    )
    at = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    return Result(suite.name, suite.digest, model, at, currency, runs)


def is_right(case: Case, text: str) -> bool:
    if case.exact is not None:
        return grade.is_exact(text, case.exact)
    if case.regex is not None:
        return grade.matches(text, case.regex)
    if case.json_schema is not None:
        return grade.fits(text, case.json_schema)
    assert case.choice is not None
    return grade.chooses(text, case.choice.options, case.choice.answer)


def _body(suite: Suite, case: Case, model: str, salt: str | None) -> dict[str, Any]:
    """With a salt, of a request whose answer is compared with another's, token by token."""
    body = suite.body(case, model)
    if salt is None:
        return body
    shows = {"logprobs": True, "top_logprobs": TOP} if body["temperature"] == 0 else {}
    return {"cache_salt": salt, **shows, **body}


def _beside_the_first(asked: list[_Answer]) -> list[Graded]:
    (first, its), *_ = asked
    return [
        msgspec.structs.replace(answer, parted=parting(its, positions))
        if answer.text != first.text and not (answer.failure or first.failure)
        else answer
        for answer, positions in asked
    ]


def _ask(client: httpx.Client, case: Case, body: dict[str, Any], way: Way) -> _Answer:
    request_id = f"eval-{uuid.uuid4().hex}"
    headers = {"x-request-id": request_id, **way.headers}
    began = time.monotonic()
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    seconds = time.monotonic() - began
    if not response.is_success:
        failure = f"HTTP {response.status_code}: {response.text[:200]}"
        return Graded(case.id, request_id, False, "", seconds=seconds, failure=failure), []
    told = response.json()
    choice = told["choices"][0]
    text = choice["message"]["content"] or ""
    usage = told.get("usage") or {}
    graded = Graded(
        case.id,
        request_id,
        is_right(case, text),
        text,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        seconds,
        response.headers.get("x-pdserve-mode", ""),
        response.headers.get("x-pdserve-arm", ""),
    )
    return graded, _positions(choice)


def _positions(choice: dict[str, Any]) -> list[Position]:
    """None where the server shows no log probabilities."""
    return [
        Position(
            one["token"],
            # Its own last: texts of other tokens may look the same.
            {each["token"]: each["logprob"] for each in (*(one.get("top_logprobs") or ()), one)},
        )
        for one in (choice.get("logprobs") or {}).get("content") or ()
    ]


def ledger(client: httpx.Client, since: float) -> tuple[str, dict[str, float]]:
    """The server's: its currency, and costs by request id; empty where there is nothing to see."""
    response = client.get("/usage", params={"by": "request", "since": f"{since:f}"})
    if not response.is_success:
        return "", {}
    try:
        told: dict[str, Any] = response.json()
        costs: dict[str, float] = defaultdict(float)
        for row in told["rows"]:
            if row["cost"] is not None:  # nothing has a price there
                costs[row["request_id"]] += row["cost"]
        return told["currency"], dict(costs)
    except (ValueError, KeyError, TypeError):  # another server's, whatever it means by it
        return "", {}


def _priced(answer: Graded, prices: TokenPrices | None, costs: Mapping[str, float]) -> Graded:
    cost = costs.get(answer.request_id)
    if prices is not None:
        parts = answer.prompt_tokens * prices.prompt + answer.completion_tokens * prices.answer
        cost = parts / 1e6
    return msgspec.structs.replace(answer, cost=cost)
