"""The process supervisor, on real processes that are tiny."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from cli.child import Child, ChildFailedError, ChildSpec, Ending, Message
from cli.supervisor import GaveUpError, RestartBudget, RestartLimits, Supervisor
from tests.support.patience import WITHIN_S

ROOT = Path(__file__).parents[2]
QUICK = RestartLimits(count=2, first_delay_s=0.0, longest_delay_s=0.0)

READY = 'import json, os; print(json.dumps({"event": "ready", "pid": os.getpid()}), flush=True)\n'
STAYS = READY + "import signal; signal.pause()\n"
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + STAYS
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS


class Recorder:
    """An observer whose news can be waited for."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.messages: list[Message] = []
        self.lines: list[str] = []
        self.endings: list[Ending] = []

    def message(self, name: str, message: Message) -> None:
        self.messages.append(message)

    def line(self, name: str, line: str) -> None:
        self.lines.append(line)

    def died(self, ending: Ending, restart_in_s: float) -> None:
        self.endings.append(ending)
        self.news.put_nowait(("died", ending.name, ending.how))

    def restarted(self, name: str) -> None:
        self.news.put_nowait(("restarted", name))

    def killed(self, name: str, after_s: float) -> None:
        self.news.put_nowait(("killed", name))


def spec(script: str, *args: str, name: str = "child", stop_s: float = 60.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", script, *args), os.environ, stop_s)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def supervisor(recorder: Recorder, tmp_path: Path) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(recorder, tmp_path, limits=QUICK)
    yield supervisor
    supervisor.kill()
    await supervisor.stop()
    supervisor.close()


async def test_a_child_is_started_when_it_says_so(
    supervisor: Supervisor, recorder: Recorder, tmp_path: Path
) -> None:
    script = "import sys; print('about to start', file=sys.stderr); print('plain')\n"
    proving = """print('{"event": "proving", "detail": "one"}')\n"""
    message = await supervisor.start(spec(script + proving + POLITE))
    assert psutil.pid_exists(message["pid"])
    assert [m["event"] for m in recorder.messages] == ["proving", "ready"]
    await supervisor.stop()
    assert not psutil.pid_exists(message["pid"])
    assert set((tmp_path / "child.log").read_text().splitlines()) == {"about to start", "plain"}


@pytest.mark.parametrize(
    ("script", "how", "reason"),
    [
        (
            "import sys; print('noise\\npdserve: error: no such model', file=sys.stderr);"
            "print('more noise', file=sys.stderr); sys.exit(1)",
            "exited with code 1",
            ("no such model",),
        ),
        ("raise KeyError('lost')", "exited with code 1", ("KeyError: 'lost'",)),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL", ()),
        ("print('bye')", "exited with code 0", ("bye",)),
    ],
)
async def test_a_child_that_cannot_start_says_why(
    supervisor: Supervisor, script: str, how: str, reason: tuple[str, ...]
) -> None:
    with pytest.raises(ChildFailedError) as failed:
        await supervisor.start(spec(script, name="decode-0"))
    assert str(failed.value) == f"decode-0 {how}"
    assert failed.value.ending.reason == reason


async def test_a_child_that_dies_is_started_again(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    first = await supervisor.start(spec(POLITE))
    os.kill(first["pid"], signal.SIGKILL)
    assert await recorder.news.get() == ("died", "child", "was killed by SIGKILL")
    assert await recorder.news.get() == ("restarted", "child")
    second = recorder.messages[-1]
    assert second["pid"] != first["pid"]
    await supervisor.stop()
    assert not psutil.pid_exists(second["pid"])
    assert recorder.news.empty()


async def test_a_child_that_keeps_dying_is_given_up(
    supervisor: Supervisor, recorder: Recorder, tmp_path: Path
) -> None:
    once = (
        "import os, sys\nif os.path.exists(sys.argv[1]): sys.exit('pdserve: error: worn out')\n"
        "open(sys.argv[1], 'w').close()\n"
    )
    message = await supervisor.start(spec(once + STAYS, str(tmp_path / "been here")))
    os.kill(message["pid"], signal.SIGTERM)
    with pytest.raises(GaveUpError, match="child exited with code 1, after 2 restarts") as gave_up:
        await supervisor.gave_up()
    assert gave_up.value.ending.reason == ("worn out",)
    assert [ending.how for ending in recorder.endings] == [
        "was killed by SIGTERM",
        "exited with code 1",
    ]


async def test_a_child_that_will_not_stop_is_killed(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    message = await supervisor.start(spec(DEAF, stop_s=0.0))
    await supervisor.stop()
    assert await recorder.news.get() == ("killed", "child")
    assert not psutil.pid_exists(message["pid"])


async def test_kill_ends_a_stop_that_waits(supervisor: Supervisor) -> None:
    message = await supervisor.start(spec(DEAF))
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    supervisor.kill()
    await stopping
    assert not psutil.pid_exists(message["pid"])


async def test_what_a_child_started_does_not_outlive_it(
    supervisor: Supervisor, recorder: Recorder
) -> None:
    script = "import subprocess; p = subprocess.Popen(['sleep', '600'])\nprint(p.pid)\n" + STAYS
    message = await supervisor.start(spec(script))
    grandchild = psutil.Process(int(recorder.lines[0]))
    os.kill(message["pid"], signal.SIGKILL)
    await recorder.news.get()
    with contextlib.suppress(psutil.NoSuchProcess):
        grandchild.wait(WITHIN_S)


async def test_a_task_is_run_to_its_end(supervisor: Supervisor) -> None:
    message = await supervisor.run(spec("""print('{"event": "ready", "folder": "/models"}')"""))
    assert message["folder"] == "/models"
    with pytest.raises(ChildFailedError, match="exited with code 3"):
        await supervisor.run(spec(READY + "raise SystemExit(3)"))


async def test_lines_of_any_length_are_survived(recorder: Recorder) -> None:
    script = "print('x' * 3_000_000)\nprint('end')"
    child = await Child.spawn(spec(script), recorder.messages.append, recorder.lines.append)
    ending = await child.wait()
    assert (ending.returncode, ending.tail[-1]) == (0, "end")


PARENT = f"""
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from cli.child import ChildSpec
from cli.supervisor import Supervisor
CHILD = '''
import sys
sys.path.insert(0, {str(ROOT)!r})
from pdserve.process import die_with_parent
die_with_parent(int(sys.argv[1]))
''' + {STAYS!r}

class Silent:
    def __getattr__(self, name): return lambda *_: None

async def main():
    supervisor = Supervisor(Silent(), Path(sys.argv[1]))
    argv = (sys.executable, "-c", CHILD, str(os.getpid()))
    names = ("prefill-0", "decode-0")
    ready = [await supervisor.start(ChildSpec(name, argv, os.environ, 60)) for name in names]
    print(*(message["pid"] for message in ready), flush=True)
    await supervisor.gave_up()

asyncio.run(main())
"""


def test_nothing_survives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", PARENT, str(tmp_path))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=WITHIN_S)
    assert not alive


def test_restarts_come_later_and_later_and_then_no_more() -> None:
    budget = RestartBudget(RestartLimits(count=5, window_s=600))
    assert [budget.take(now=0.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert budget.take(now=599.0) is None
    assert budget.take(now=600.0) == 0.5
