"""lm-eval's tasks: how its program is called, and what is read of what it logged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.eval import evaluate
from cli.failure import CliError
from measure.eval import harness
from measure.eval.harness import Tasks, digest, graded
from measure.eval.result import Way
from pdserve.errors import ConfigError

PROGRAM = """#!{python}
import json, pathlib, shutil, sys, yaml
assert sys.argv[1:3] == ["run", "--config"]
text = pathlib.Path(sys.argv[3]).read_text()
config = yaml.safe_load(text)
with open({seen!r}, "a") as seen:
    seen.write(json.dumps(config) + "\\n")
folder = pathlib.Path(config["output_path"], "tiny")
folder.mkdir()
mode = config["model_args"]["header"].get("x-pdserve-mode", "")
for task in config["tasks"]:
    if task == "broken":
        sys.exit("no such task")
    lines = [
        dict(doc_id=number, filter=kind, metrics=["exact_match"], filtered_resps=[str(number)],
             exact_match=float(number == 0 or mode == "colocated"),
             doc_hash=str(number), prompt_hash="p", target_hash="t")
        for number in range(2)
        for kind in ("strict", "loose")
    ]
    text = "\\n".join(map(json.dumps, lines))
    (folder / f"samples_{{task}}_2026-11-30T08-00-00.jsonl").write_text(text + "\\n")
"""
"""Logs what lm-eval 0.4.13 does: a line for each question and filter."""


class LmEval:
    def __init__(self, folder: Path) -> None:
        self._seen = folder / "seen.jsonl"
        program = folder / "lm_eval"
        program.write_text(PROGRAM.format(python=sys.executable, seen=str(self._seen)))
        program.chmod(0o755)

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._seen.read_text().splitlines()]


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LmEval:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return LmEval(tmp_path)


def served(lm_eval: LmEval | None = None) -> httpx.Client:
    """A server whose ledger knows three charges of each run, of 0.25 each."""

    def answer(request: httpx.Request) -> httpx.Response:
        if lm_eval is None or request.url.path != "/usage":
            return httpx.Response(404)
        ids = [seen["model_args"]["header"]["x-request-id"] for seen in lm_eval.seen]
        rows = [
            {"request_id": name, "cost": 0.25} for each in ids for name in (each, each, f"{each}-1")
        ]
        return httpx.Response(200, json={"currency": "EUR", "rows": rows})

    return httpx.Client(
        transport=httpx.MockTransport(answer),
        base_url="http://server",
        headers={"authorization": "Bearer secret"},
    )


def test_each_way_is_a_run_of_its_own(lm_eval: LmEval) -> None:
    with served(lm_eval) as client:
        tasks = Tasks(("one", "one_two"), limit=5)
        ways = [Way(mode="colocated"), Way(arm="b")]
        told = harness.run(client, tasks, "tiny", ways)
    assert (told.suite, told.model, told.currency) == ("lm-eval:one,one_two", "tiny", "EUR")
    whole, arm = told.runs
    assert [answer.id for answer in whole.answers] == ["one/0", "one/1", "one_two/0", "one_two/1"]
    assert (whole.correct, arm.correct) == (4, 2)
    assert (whole.cost, arm.cost_per_correct) == (0.75, 0.375)
    first, second = lm_eval.seen
    assert first["model"] == "local-chat-completions"
    assert first["model_args"]["base_url"] == "http://server/v1/chat/completions"
    headers = first["model_args"]["header"]
    assert headers["authorization"] == "Bearer secret"
    assert (headers["x-pdserve-mode"], first["limit"]) == ("colocated", 5)
    assert first["apply_chat_template"]
    assert second["model_args"]["header"]["x-pdserve-arm"] == "b"
    assert not Path(first["output_path"]).exists()


def test_with_a_tokenizer_prompts_are_no_chats(lm_eval: LmEval, tmp_path: Path) -> None:
    with served() as client:
        tasks = Tasks(("one",), tokenizer="folder", folder=tmp_path)
        told = harness.run(client, tasks, "tiny", [Way()])
    assert told.runs[0].cost is None
    (seen,) = lm_eval.seen
    assert (seen["model"], seen["apply_chat_template"]) == ("local-completions", False)
    assert seen["model_args"]["base_url"] == "http://server/v1/completions"
    assert (seen["model_args"]["tokenizer"], seen["include_path"]) == ("folder", str(tmp_path))


def test_what_lm_eval_says_of_its_failure_is_told(lm_eval: LmEval) -> None:
    with served() as client, pytest.raises(ConfigError, match="code 1: no such task"):
        harness.run(client, Tasks(("broken",)), "tiny", [Way()])
    assert lm_eval.seen


def test_without_lm_eval_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with served() as client, pytest.raises(ConfigError, match="pip install"):
        harness.run(client, Tasks(("one",)), "tiny", [Way()])


def sample(**fields: Any) -> dict[str, Any]:
    hashes = {"doc_hash": "d", "prompt_hash": "p", "target_hash": "t"}
    base = {"task": "one", "doc_id": 0, "metrics": ["acc"], "acc": 1.0, "filtered_resps": []}
    return {**base, **hashes, **fields}


def test_figures_of_no_single_answer_are_refused() -> None:
    with pytest.raises(ConfigError, match="word_perplexity is of no single answer"):
        graded([sample(metrics=["word_perplexity"], word_perplexity=[-3.2, 5])])


def test_results_of_other_questions_have_another_digest() -> None:
    same = digest([sample(), sample(doc_id=1, acc=0.0)])
    assert digest([sample(acc=0.0)]) == same
    assert digest([sample(target_hash="u")]) != same


@pytest.mark.parametrize(
    ("suite", "options", "complaint"),
    [
        ("lm-eval:one", {"prices": "1,2"}, "--prices"),
        ("basics", {"limit": 3}, "lm-eval:TASK"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    suite: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CliError, match=complaint):
        evaluate(suite, **options)
