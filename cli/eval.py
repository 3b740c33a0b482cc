"""`pdserve eval SUITE`"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.failure import CliError
from cli.options import DEFAULT_URL, Key, Url

if TYPE_CHECKING:
    import httpx

    from measure.eval.result import Graded, Paired, Result, Run, Way
    from measure.eval.run import TokenPrices

    Ask = Callable[[httpx.Client, str, list[Way]], Result]
    """Of a server and a model, by each of these ways."""

_LM_EVAL = "lm-eval:"
_SHOWN = 5
"""Questions that are named of each kind."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SPAN = re.compile(r"(\d+)([smh])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


Suite = Annotated[
    str,
    typer.Argument(
        help="A file in YAML, one that comes with pdserve, or lm-eval:TASK,TASK of lm-eval."
    ),
]
Modes = Annotated[
    str | None,
    typer.Option(
        metavar="MODE,MODE",
        help="Asks each question by each mode, and compares the answers; a mode that is named "
        "twice is compared with itself.",
    ),
]
Arms = Annotated[
    str | None,
    typer.Option(metavar="ARM,ARM", help="Likewise by each arm of the server's experiment."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions of each of lm-eval's tasks.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR", help="The model's, for those of lm-eval's tasks that score prompts."
    ),
]
OwnTasks = Annotated[
    Path | None, typer.Option("--tasks", metavar="DIR", help="Tasks for lm-eval that are your own.")
]
Baseline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="An earlier result to compare with.")
]
Output = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Where the result goes, as JSON.")
]
Prices = Annotated[
    str | None,
    typer.Option(
        metavar="PROMPT,ANSWER",
        help="What a million tokens cost, where the server keeps no ledger that we may see.",
    ),
]
Every = Annotated[
    str | None, typer.Option(metavar="SPAN", help="Again and again, for example every 10m.")
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT", help="Stops before more is spent, for example 2usd."),
]


def evaluate(  # noqa: PLR0913  (every one is an option)
    suite: Suite,
    *,
    model: Annotated[str | None, typer.Option(help="By default, the first one served.")] = None,
    modes: Modes = None,
    arms: Arms = None,
    limit: Limit = None,
    tokenizer: Tokenizer = None,
    tasks: OwnTasks = None,
    baseline: Baseline = None,
    out: Output = None,
    prices: Prices = None,
    every: Every = None,
    budget: Budget = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Asks any OpenAI-compatible server the questions of a suite and grades its answers.

    Exit status 1 where it got worse: than the baseline, or by one mode or arm than by another;
    where their answers part at no near tie; and where no question of a mode or arm was answered.
    """
    from cli.http import connect, get_json
    from measure.eval.result import Way

    ways = [Way(mode=it) for it in names_in(modes)] + [Way(arm=it) for it in names_in(arms)] or [
        Way()
    ]
    known = _read(baseline) if baseline else None
    if suite.startswith(_LM_EVAL):
        names = names_in(suite.removeprefix(_LM_EVAL))
        ask = _asks_lm_eval(names, limit, tokenizer, tasks, _prices(prices))
    elif limit or tokenizer or tasks:
        raise CliError("--limit, --tokenizer and --tasks are of lm-eval:TASK,TASK")
    else:
        ask = _asks(suite, _prices(prices))
    rounds = Rounds(_span_s(every), _amount(budget), time.sleep, time.monotonic)
    worse = False
    with connect(url, key) as client:
        name = model or get_json(client, "/v1/models")["data"][0]["id"]
        for _ in rounds:
            result = ask(client, name, ways)
            if out is not None:
                _write(out, result)
            worse |= tell(result, known)
            rounds.spent(result)
            known = known or result
    if worse:
        raise typer.Exit(1)


def _asks(suite: str, prices: TokenPrices | None) -> Ask:
    """Raises ConfigError."""
    from measure.eval.run import run
    from measure.eval.suite import load

    questions = load(suite)
    return lambda client, model, ways: run(client, questions, model, ways, prices)


def _asks_lm_eval(
    names: list[str],
    limit: int | None,
    tokenizer: str | None,
    folder: Path | None,
    prices: TokenPrices | None,
) -> Ask:
    """Raises CliError."""
    from measure.eval import harness

    if prices is not None:
        raise CliError("--prices: lm-eval does not tell how many tokens its answers have")
    tasks = harness.Tasks(tuple(names), limit, tokenizer, folder)
    return lambda client, model, ways: harness.run(client, tasks, model, ways)


@dataclass
class Rounds:
    """One, or with `every_s` one after another, for as long as the budget has room for a round
    that costs what the last one did. A budget is an amount and its currency, empty for any."""

    every_s: float | None
    budget: tuple[float, str] | None
    sleep: Callable[[float], None]
    now: Callable[[], float]
    cost: float = 0.0
    last: float = 0.0

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            began = self.now()
            yield number
            number += 1
            if self.every_s is None:
                return
            if self.budget is not None and self.cost + self.last > self.budget[0]:
                print(f"the budget has no room for another round: {self.cost:.4g} were spent")
                return
            self.sleep(max(0.0, began + self.every_s - self.now()))

    def spent(self, result: Result) -> None:
        """Raises CliError where a budget cannot be kept, for want of costs or of currency."""
        if self.budget is None:
            return
        costs = [run.cost for run in result.runs]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            raise CliError(
                "the budget cannot be kept: the server shows no ledger (it takes an admin key) or "
                "has no prices, and --prices were not given"
            )
        currency = self.budget[1]
        if currency and result.currency and currency.upper() != result.currency.upper():
            raise CliError(f"the budget is in {currency}, and the ledger in {result.currency}")
        self.last = sum(known)
        self.cost += self.last


def tell(result: Result, baseline: Result | None) -> bool:
    """Prints what came of it; whether anything got worse, or was not answered at all."""
    from measure.eval.result import baseline_of, paired

    print(f"{result.suite} of {result.model}, {result.at}")
    worse = False
    for run in result.runs:
        print(f"  {run.name}: {_figures(run, result.currency)}")
        worse |= run.failed == len(run.answers)
        if baseline is not None:
            compared = paired(baseline_of(run, baseline, result), run)
            print(f"    beside the baseline: {_words(compared)}")
            worse |= compared.is_worse
    first, *others = result.runs
    for run in others:
        compared = paired(first, run)
        print(
            f"  {run.name} beside {first.name}: {compared.alike} of {compared.cases} answers "
            f"alike{_partings(run)}; {_words(compared)}"
        )
        worse |= compared.differs or bool(run.faults)
    return worse


def _partings(run: Run) -> str:
    parts = []
    if run.near_ties:
        widest = max(_gap(one) for one in run.near_ties)
        parts.append(f"{len(run.near_ties)} at near ties (at most {widest:.3g} apart)")
    if run.untold:
        parts.append(f"{run.untold} untold")
    if run.faults:
        places = (
            f"{one.id} after {one.parted.at} tokens, {one.parted.gap:.3g} apart"
            for one in run.faults
            if one.parted
        )
        parts.append(f"{len(run.faults)} at no near tie ({_some(places)})")
    return f"; parted: {', '.join(parts)}" if parts else ""


def _gap(answer: Graded) -> float:
    return (answer.parted and answer.parted.gap) or 0.0


def _figures(run: Run, currency: str) -> str:
    words = [f"{run.correct} of {len(run.answers)} right"]
    if run.failed:
        first = next(answer.failure for answer in run.answers if answer.failure)
        words.append(f"{run.failed} failed ({first})")
    if run.cost is not None:
        words.append(f"cost {run.cost:.4g} {currency}".rstrip())
    if run.cost_per_correct is not None:
        words.append(f"{run.cost_per_correct:.4g} for each right answer")
    return ", ".join(words)


def _words(compared: Paired) -> str:
    if not compared.lost and not compared.won:
        return "the same are right"
    verdict = "no more than chance"
    if compared.differs:
        verdict = "worse" if compared.is_worse else "better"
    parts = [
        f"{len(ids)} {what} ({_some(ids)})"
        for ids, what in ((compared.lost, "lost"), (compared.won, "won"))
        if ids
    ]
    return f"{', '.join(parts)}: {verdict} (p = {compared.p_value:.3g})"


def _some(names: Iterable[str]) -> str:
    first = list(islice(names, _SHOWN + 1))
    return ", ".join(first[:_SHOWN] + ["…"] * (len(first) > _SHOWN))


def names_in(text: str | None) -> list[str]:
    """Of a list with commas, none of them empty."""
    return [name for part in (text or "").split(",") if (name := part.strip())]


def _read(file: Path) -> Result:
    from measure.eval.result import from_json
    from pdserve.errors import ConfigError

    try:
        return from_json(file.read_bytes())
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None
    except ConfigError as error:
        raise CliError(f"{file}: {error}") from None


def _write(file: Path, result: Result) -> None:
    from measure.eval.result import to_json

    try:
        file.write_bytes(to_json(result))
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None


def _prices(text: str | None) -> TokenPrices | None:
    from measure.eval.run import TokenPrices

    if text is None:
        return None
    try:
        prompt, answer = (float(part) for part in text.split(","))
    except ValueError:
        raise CliError("--prices: two numbers, as in 0.15,0.60") from None
    return TokenPrices(prompt, answer)


def _span_s(text: str | None) -> float | None:
    if text is None:
        return None
    found = _SPAN.fullmatch(text)
    if found is None:
        raise CliError("--every: a number with s, m or h, as in 10m")
    return float(found[1]) * _UNIT_S[found[2]]


def _amount(text: str | None) -> tuple[float, str] | None:
    if text is None:
        return None
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise CliError("--budget: an amount and, if you like, its currency, as in 2usd")
    return float(found[1]), found[2]
