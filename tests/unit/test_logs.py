"""What a process logs, and where."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from coordinator.metrics import CoordinatorMetrics
from coordinator.observer import Observer
from coordinator.record import RequestRecord
from measure.simulation.traces import load
from pdserve import logs
from pdserve.config import LogConfig
from pdserve.types import Usage


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_lines_are_json_on_standard_error_with_the_fields_of_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(LogConfig(), worker_id="w")
    structlog.get_logger("test").info("begun", port=1)
    logging.getLogger("library").warning("from a %s", "library")
    ours, theirs = lines(capsys)
    assert (ours["event"], ours["port"], ours["worker_id"], ours["level"]) == (
        "begun",
        1,
        "w",
        "info",
    )
    assert (theirs["event"], theirs["worker_id"], theirs["level"]) == (
        "from a library",
        "w",
        "warning",
    )


def test_less_than_the_level_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(level="WARNING"))
    structlog.get_logger("test").info("quiet")
    structlog.get_logger("test").warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


def test_a_traceback_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig())
    try:
        raise ValueError("what")
    except ValueError:
        structlog.get_logger("test").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: what" in line["exception"]


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig())
    structlog.get_logger("test").info("call", authorization="Bearer k", fleet_key="k")
    (line,) = lines(capsys)
    assert (line["authorization"], line["fleet_key"]) == ("***", "***")


def test_people_get_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(format="console"))
    structlog.get_logger("test").info("begun", port=1)
    assert "begun" in capsys.readouterr().err


def test_a_traceback_for_people_shows_no_values(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(LogConfig(format="console"))

    def call(key: str) -> None:
        raise ValueError("refused")

    try:
        call("secret-" + "1234")
    except ValueError:
        structlog.get_logger("test").exception("failed")
        logging.getLogger("library").exception("failed too")
    err = capsys.readouterr().err
    assert err.count("ValueError: refused") == 2
    assert err.count("in call") == 2
    assert "secret-1234" not in err


def test_the_access_log_can_be_played_as_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs.configure(LogConfig())
    observer = Observer(CoordinatorMetrics(CollectorRegistry()))
    now = time.monotonic()
    for name, ago_s, prompt, answer in (("first", 9.0, 300, 20), ("second", 2.0, 40, 5)):
        record = RequestRecord(name, "http", "chat", True, "trace", now - ago_s)
        record.prompt_tokens, record.usage = prompt, Usage(prompt, answer)
        observer.done(record, None)
    (tmp_path / "coordinator.log").write_text(capsys.readouterr().err)
    first, second = load(tmp_path / "coordinator.log")
    assert (first.at_s, first.prompt_tokens, first.answer_tokens) == (0.0, 300, 20)
    assert second.at_s == pytest.approx(7.0, abs=0.5)
    assert (second.prompt_tokens, second.answer_tokens) == (40, 5)
