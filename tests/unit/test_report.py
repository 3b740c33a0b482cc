"""What `pdserve up` says while it works."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from cli.child import Ending
from cli.report import Endpoints, JsonReporter, PlainReporter, welcome

ENDPOINTS = Endpoints(
    http="127.0.0.1:8000",
    grpc="127.0.0.1:50051",
    metrics={"coordinator": "127.0.0.1:8000", "decode-0": "127.0.0.1:9"},
    model="m",
    needs_key=False,
    log_dir=Path("/logs"),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_said_at_once_and_again_within_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    reporter = PlainReporter(clock=clock)
    reporter.step("decode-0", "starting decode-0")
    for second in range(1, 26):
        clock.now = second
        reporter.tick()
        if second == 15:
            reporter.message("decode-0", {"event": "progress", "detail": "loading weights"})
    reporter.done("decode-0", "decode-0 is ready")
    clock.now = 100
    reporter.tick()
    assert capsys.readouterr().out.splitlines() == [
        "starting decode-0 ...",
        "starting decode-0 ... 9 s",
        "starting decode-0 ... 18 s: loading weights",
        "decode-0 is ready (25.0 s)",
    ]


def test_a_death_is_told_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    tail = ("pdserve: error: the engine died",)
    PlainReporter().died(Ending("decode-0", -9, tail), 0.5)
    assert capsys.readouterr().out.splitlines() == [
        "decode-0 was killed by SIGKILL, and is started again in 0.5 s",
        "  the engine died",
    ]


@pytest.mark.parametrize(
    ("returncode", "tail", "reason"),
    [
        (-9, ("[info     ] request error='x'",), ()),
        (1, ("[info     ] a", "[error    ] bad", "[info     ] b"), ("[error    ] bad",)),
        (1, ("a", "b"), ("a", "b")),
        (1, ("Traceback (most recent call last):", "  File", "OSError: x", "y"), ("OSError: x",)),
        (1, ("x" * 400,), ("x" * 300 + "...",)),
        (-11, ("Fatal Python error: Segmentation fault",), None),
    ],
)
def test_only_lines_that_matter_are_told(
    returncode: int, tail: tuple[str, ...], reason: tuple[str, ...] | None
) -> None:
    assert Ending("decode-0", returncode, tail).reason == (tail if reason is None else reason)


def test_programs_get_json_lines() -> None:
    out = io.StringIO()
    reporter = JsonReporter(out=out)
    reporter.step("decode-0", "starting")
    reporter.done("decode-0", "ready")
    reporter.ready(ENDPOINTS)
    reporter.died(Ending("decode-0", 1, ("pdserve: error: x",)), 0.5)
    reporter.restarted("decode-0")
    reporter.failed(Ending("decode-0", -15, ()))
    reporter.killed("decode-0", 40.0)
    reporter.stopped()
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(event["event"], event.get("name")) for event in events] == [
        ("step", "decode-0"),
        ("step", "decode-0"),
        ("ready", None),
        ("died", "decode-0"),
        ("restarted", "decode-0"),
        ("died", "decode-0"),
        ("killed", "decode-0"),
        ("stopped", None),
    ]
    assert events[2]["metrics"]["decode-0"] == "127.0.0.1:9"
    assert (events[3]["how"], events[3]["detail"], events[3]["restart_in_s"]) == (
        "exited with code 1",
        "x",
        0.5,
    )


def test_the_welcome_is_short_where_it_can_be() -> None:
    text = welcome(ENDPOINTS)
    assert "http://127.0.0.1:8000/v1 (OpenAI API) and 127.0.0.1:50051 (gRPC)" in text
    assert "pdserve chat, pdserve status\n" in text
    assert "authorization" not in text


def test_the_welcome_names_keys_and_ports_that_are_needed() -> None:
    text = welcome(
        Endpoints("127.0.0.1:9000", "127.0.0.1:1", {}, "m", needs_key=True, log_dir=Path("/l"))
    )
    assert text.count("authorization: Bearer $PDSERVE_KEY") == 2
    assert 'os.environ["PDSERVE_KEY"]' in text
    assert "pdserve chat --url http://127.0.0.1:9000" in text


def test_the_welcome_s_example_shows_the_way_it_went() -> None:
    text = welcome(ENDPOINTS)
    assert "curl -i http://127.0.0.1:8000/v1/chat/completions" in text
    assert "http://127.0.0.1:8000/dashboard" in text
    assert "-H 'x-pdserve-mode: disaggregated'" in text
    assert text.count("temperature") == 2


def test_the_welcome_s_commands_are_those_that_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    command = folder / "pdserve"
    command.write_text("")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(command), "up"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert ".venv/bin/pdserve chat, .venv/bin/pdserve status\n" in welcome(ENDPOINTS)
    monkeypatch.setenv("PATH", str(folder))
    assert "terminal: pdserve chat, pdserve status\n" in welcome(ENDPOINTS)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["pdserve", "up"])
    # Without a folder a shell would look elsewhere.
    assert "./pdserve chat, ./pdserve status\n" in welcome(ENDPOINTS)
