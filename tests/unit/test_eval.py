"""Suites, graders, and what two results tell of each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.eval import Rounds, evaluate, names_in, tell
from cli.failure import CliError
from measure.eval import run as runner
from measure.eval.grade import chooses, fits, is_exact, matches
from measure.eval.result import (
    Graded,
    Result,
    Run,
    Way,
    baseline_of,
    from_json,
    mcnemar,
    paired,
    to_json,
)
from measure.eval.run import TokenPrices
from measure.eval.suite import Suite, load, packaged
from pdserve.errors import ConfigError

SUITE = """
name: two
system: Be brief.
request: {max_tokens: 8}
cases:
  - {id: capital, ask: 'Capital of France?', regex: Paris}
  - id: choice
    ask: Which is a fruit?
    choice: {options: [stone, apple], answer: apple}
    request: {max_tokens: 2}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    file = tmp_path / "two.yaml"
    file.write_text(SUITE)
    return load(str(file))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("B", True),
        ("B.", True),
        ("b", False),
        ("The answer is B) apple.", True),
        ("A. stone", False),
        ("A fruit is the apple.", True),
        ("apple", True),
        ("stone or apple", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_choices(text: str, right: bool) -> None:
    assert chooses(text, ["stone", "apple"], "apple") is right


def test_other_graders() -> None:
    assert is_exact(" Banana.\n", "banana")
    assert not is_exact("banana banana", "banana")
    assert matches("It is Paris.", r"\bParis\b")
    assert not matches("It is paris.", r"\bParis\b")
    schema = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}
    assert fits('{"age": 3}', schema)
    assert fits('Here:\n```json\n{"age": 3}\n```', schema)
    for text in ('{"age": "3"}', "{}", '{"age": 3', ""):
        assert not fits(text, schema)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(1, 1) == 1.0
    assert mcnemar(5, 0) == 2 / 2**5
    assert mcnemar(6, 0) == 0.03125
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(1, 8) == mcnemar(8, 1)


def answers(mode: str, **right: bool) -> Run:
    return Run(
        Way(mode),
        tuple(
            Graded(name, name, is_right, str(is_right), cost=0.5)
            for name, is_right in right.items()
        ),
    )


def result(*runs: Run, digest: str = "d") -> Result:
    return Result("two", digest, "tiny", "2026-11-30T12:00:00+00:00", "USD", runs)


def test_two_runs_are_paired_by_case() -> None:
    before = answers("", a=True, b=True, c=False, d=False, gone=True)
    now = answers("", a=True, b=False, c=True, d=False, new=True)
    compared = paired(before, now)
    assert (compared.cases, compared.lost, compared.won, compared.alike) == (4, ("b",), ("c",), 2)
    assert not compared.differs
    names = [f"n{at}" for at in range(6)]
    worse = paired(
        answers("", **dict.fromkeys(names, True)), answers("", **dict.fromkeys(names, False))
    )
    assert worse.is_worse
    better = paired(
        answers("", **dict.fromkeys(names, False)), answers("", **dict.fromkeys(names, True))
    )
    assert better.differs
    assert not better.is_worse


def test_costs_for_each_right_answer() -> None:
    run = answers("", a=True, b=True, c=False)
    assert (run.cost, run.cost_per_correct) == (1.5, 0.75)
    assert answers("", a=False).cost_per_correct is None
    assert Run(Way(), (Graded("a", "r", True, ""),)).cost is None


def test_a_result_is_read_back_and_belongs_to_its_suite() -> None:
    kept = result(answers("colocated", a=True), answers("disaggregated", a=False))
    assert from_json(to_json(kept)) == kept
    assert baseline_of(answers("disaggregated"), kept, kept).name == "disaggregated"
    assert baseline_of(answers("auto"), kept, kept).name == "colocated"
    with pytest.raises(ConfigError, match="another suite"):
        baseline_of(answers(""), kept, result(digest="e"))
    with pytest.raises(ConfigError, match="no result"):
        from_json(b'{"suite": 1}')


def test_what_is_asked(suite: Suite) -> None:
    assert suite.body(suite.cases[1], "tiny") == {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 2,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": "Which is a fruit?\nA. stone\nB. apple\nAnswer with the letter alone.",
            },
        ],
    }
    assert suite.digest != Suite.model_validate(suite.model_dump() | {"system": ""}).digest


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("{id: a, ask: b}", "one of exact, regex"),
        ("{id: a, ask: b, exact: c, regex: d}", "one of exact, regex"),
        ("{id: a, ask: b, regex: '('}", "no regular expression"),
        ("{id: a, ask: b, json_schema: {type: 5}}", "no JSON schema"),
        ("{id: a, ask: b, choice: {options: [x, y], answer: z}}", "one of the options"),
        ("{id: a, ask: b, exact: c}\n  - {id: a, ask: b, exact: c}", "share an id"),
        ("{id: a, ask: b, exact: c", "suite"),
        ("{id: a, ask: b, exact: 7}", "cases.0.exact: must be text, in quotes, not 7"),
        ("{id: a, answer: b}", "cases.0.ask: must be given"),
    ],
)
def test_suites_that_are_refused(tmp_path: Path, case: str, words: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(f"name: bad\ncases:\n  - {case}\n")
    with pytest.raises(ConfigError, match=words):
        load(str(file))


def test_packaged_suites_load() -> None:
    assert packaged() == ["basics"]
    assert len(load("basics").cases) == 30
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file.*: basics"):
        load("nowhere.yaml")


class Server:
    """Answers "Paris" by one mode and "B" by the other, and keeps a ledger where it is told."""

    def __init__(self, *, ledger: bool) -> None:
        self.ledger = ledger
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        if request.url.path == "/usage":
            rows = [{"request_id": each, "cost": 0.25} for each in self.asked]
            told = {"currency": "EUR", "rows": rows}
            return httpx.Response(200, json=told) if self.ledger else httpx.Response(404)
        self.asked.append(request.headers["x-request-id"])
        mode = request.headers.get("x-pdserve-mode", "colocated")
        if json.loads(request.content)["max_tokens"] == 2 and mode == "disaggregated":
            return httpx.Response(503, text="no worker")
        text = "Paris" if mode == "colocated" else "B"
        body: dict[str, Any] = {
            "choices": [{"message": {"content": text}}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 1},
        }
        return httpx.Response(200, json=body, headers={"x-pdserve-mode": mode})


def asked(server: Callable[[httpx.Request], httpx.Response], suite: Suite, prices: Any) -> Result:
    with httpx.Client(transport=httpx.MockTransport(server), base_url="http://s") as client:
        ways = (Way("colocated"), Way("disaggregated"))
        return runner.run(client, suite, "tiny", ways, prices)


def test_each_question_is_asked_by_each_mode_and_costs_what_the_ledger_says(suite: Suite) -> None:
    colocated, disaggregated = asked(Server(ledger=True), suite, None).runs
    assert [answer.correct for answer in colocated.answers] == [True, False]
    assert (colocated.cost, colocated.cost_per_correct) == (0.5, 0.5)
    assert [answer.failure for answer in disaggregated.answers] == ["", "HTTP 503: no worker"]
    assert (disaggregated.correct, disaggregated.failed, disaggregated.cost) == (0, 1, 0.25)


def test_other_servers_cost_what_tokens_do(suite: Suite) -> None:
    colocated, _ = asked(Server(ledger=False), suite, TokenPrices(2.0, 5.0)).runs
    assert colocated.cost == pytest.approx(2 * 25e-6)
    colocated, _ = asked(Server(ledger=False), suite, None).runs
    assert colocated.cost is None


def test_rounds_stop_before_the_budget_does() -> None:
    slept: list[float] = []
    now = iter((0.0, 4.0, 600.0, 601.0, 1200.0, 1201.0)).__next__
    rounds = Rounds(600.0, (1.2, "usd"), slept.append, now)
    numbers = []
    for number in rounds:
        numbers.append(number)
        rounds.spent(result(answers("", a=True)))  # 0.5 each
    assert numbers == [0, 1]
    assert slept == [596.0]
    assert list(Rounds(None, None, slept.append, lambda: 0.0)) == [0]


def test_a_budget_needs_costs_in_its_currency() -> None:
    rounds = Rounds(1.0, (1.0, "eur"), lambda _: None, lambda: 0.0)
    with pytest.raises(CliError, match="in eur, and the ledger in USD"):
        rounds.spent(result(answers("", a=True)))
    with pytest.raises(CliError, match="--prices"):
        rounds.spent(result(Run(Way(), (Graded("a", "r", True, ""),))))


def test_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"n{at}" for at in range(6)]
    good = answers("colocated", **dict.fromkeys(names, True))
    bad = answers("disaggregated", **dict.fromkeys(names, False))
    assert not tell(result(good), result(good))
    assert "6 of 6 right, cost 3 USD, 0.5 for each right answer" in capsys.readouterr().out
    assert tell(result(good, bad), None)
    out = capsys.readouterr().out
    assert "disaggregated beside colocated: 0 of 6 answers alike; 6 lost" in out
    assert "worse (p = 0.0312)" in out
    assert tell(result(bad), result(good))


def test_a_server_that_answers_nothing_is_no_success() -> None:
    gone, answer = (Graded("a", "r", False, "", failure=why) for why in ("HTTP 400", ""))
    assert tell(result(Run(Way("nope"), (gone, gone))), None)
    assert tell(result(Run(Way("colocated"), (answer,)), Run(Way("nope"), (gone,))), None)
    assert not tell(result(Run(Way("colocated"), (answer, gone))), None)


@pytest.mark.parametrize(
    ("written", "names"),
    [(None, []), ("", []), (",", []), ("colocated, ", ["colocated"]), ("a,a", ["a", "a"])],
)
def test_names_are_never_empty(written: str | None, names: list[str]) -> None:
    assert names_in(written) == names


def test_the_command_writes_a_result_that_is_the_next_one_s_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "two.yaml", tmp_path / "result.json"
    file.write_text(SUITE)
    real = httpx.Client
    server = httpx.MockTransport(Server(ledger=True))
    monkeypatch.setattr(httpx, "Client", lambda **fields: real(transport=server, **fields))
    evaluate(str(file), out=out)
    assert from_json(out.read_bytes()).runs[0].correct == 1
    evaluate(str(file), baseline=out)
    assert "beside the baseline: the same are right" in capsys.readouterr().out
