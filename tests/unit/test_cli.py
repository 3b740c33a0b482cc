"""The command line, without any service behind it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from cli import bench, keys
from cli.main import app
from cli.options import named_model, nest
from cli.quantities import duration
from cli.system import (
    Pools,
    WorkerPorts,
    child_env,
    coordinator_settings,
    core_list,
    share_cores,
    the_model,
    worker_names,
    worker_settings,
)
from coordinator.gateway.keys import KeyRing
from pdserve.clock import RealClock
from pdserve.config import ModelConfig, SimConfig, dump, load
from pdserve.engine.sim import SimEngine
from pdserve.errors import ConfigError
from pdserve.types import Mode, Role

run = CliRunner()
HEAVY = ("torch", "transformers", "grpc", "vllm", "pydantic", "fastapi", "httpx")


def failure(*args: str, **env: str) -> str:
    """The one line that a failing call prints."""
    result = run.invoke(app, args, env=env)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("pdserve: error: ")
    for raw in ("Input should", "Value error", "Extra inputs", "Field required", "[type="):
        assert raw not in line, "those are a programmer's words"
    return line.removeprefix("pdserve: error: ")


def test_help_imports_nothing_heavy() -> None:
    look = (
        "import sys; sys.argv = ['pdserve', '--help']; from cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        f"print('loaded', [name for name in {HEAVY} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "loaded []"
    workers = ("up", "coordinator", "prefill", "decode", "drain")
    verbs = (*workers, "chat", "status", "trace", "config", "keys", "model")
    assert all(f"\n  {verb} " in shown.stdout for verb in verbs)


def test_version() -> None:
    assert run.invoke(app, ["version"]).stdout.startswith("pdserve 0.")


def test_the_file_is_overruled_by_the_environment_and_that_by_flags(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text(
        "worker: {id: from-file, engine: sim, lease_s: 5}\n"
        "coordinator: {models: [{name: m, mode: auto}]}\n"
    )
    env = {"PDSERVE_WORKER__ID": "from-env", "PDSERVE_WORKER__ENGINE": "vllm"}
    result = run.invoke(app, ["config", "--config", str(file)], env=env)
    shown = yaml.safe_load(result.stdout)
    assert (shown["worker"]["id"], shown["worker"]["lease_s"]) == ("from-env", 5)
    assert shown["coordinator"]["models"][0]["mode"] == "auto"
    sources = f"# worker: defaults, {file}, PDSERVE_WORKER__ENGINE, PDSERVE_WORKER__ID\n"
    assert sources in result.stdout
    assert "# fleet: defaults\n" in result.stdout
    assert "  lease_s: 5.0  # how long exported KV is held unfetched\n" in result.stdout
    assert "sim" not in shown["worker"], "it is not used"
    file.write_text(result.stdout)
    assert dump(load(file, {})) == dump(load(None, shown))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        settings = load(file, nest([("worker.id", "from-flag"), ("worker.engine", None)]))
    assert (settings.worker.id, settings.worker.engine) == ("from-flag", "vllm")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("up", "--prefill", "many"), "'--prefill': must be a whole number, not 'many'"),
        (("up", "--port", "65536"), "'--port': must be 65535 or less, not '65536'"),
        (("up", "--mode", "fast"), "'--mode': 'fast' is not one of"),
        (("bench", "--seconds", "long"), "'--seconds': must be a number, not 'long'"),
        (("config", "--config", "/no/such/file"), "no configuration file at /no/such/file"),
        (("up", "--model", "/no/such/folder"), "/no/such/folder"),
        (("up", "--model", "gpt-5"), "gpt-5"),
        (("up", "--mode", "auto", "--prefill", "0"), "--prefill 1 or more"),
        (("up", "--engine", "sim", "--host", "0.0.0.0"), "without API keys"),
        (("up", "--engine", "sim", "--keys-file", "/no/keys"), "/no/keys"),
        (("up", "--engine", "sim", "--port", "0", "--host", "192.0.2.1"), "192.0.2.1"),
        (("up", "--engine", "sim", "--port", "47", "--grpc-port", "47"), "both"),
        (("prefill", "--roles", "decode"), "one role"),
        (("worker", "--roles", "prefill,cook"), "worker.roles"),
        (("status", "--url", "http://127.0.0.1:1"), "no coordinator answers at http://127.0.0.1:1"),
        (("chat", "--url", "nowhere"), "nowhere"),
        (("status", "--key", "ü"), "--key"),
        (("keys", "new", "--tenant", "a", "--rate", "often", "--file", "/no/such/k"), "rate"),
        (("keys", "new", "--tenant", "a", "--file", "/no/such/keys"), "/no/such/keys"),
        (("model", "fetch", "/no/such/folder"), "/no/such/folder"),
        (("simulate", "trace", "short", "--ttft", "0"), "'--ttft': must be 0.001 or more, not '0'"),
        (("ab", "simulate", "short", "--tpot", "0"), "'--tpot': must be 0.001 or more, not '0'"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(args: tuple[str, ...], said: str) -> None:
    env = {"PDSERVE_COORDINATOR__GATEWAY__ALLOW_ANONYMOUS": "true"} if "192.0.2.1" in args else {}
    assert said in failure(*args, **env)


def test_a_rate_that_is_none_is_told_before_anything_starts() -> None:
    said = failure("up", "--engine", "sim", PDSERVE_COORDINATOR__GATEWAY__RATE="often")
    assert said.startswith("gateway.rate")


@pytest.mark.parametrize("group", [(), ("ab",), ("keys",), ("simulate",)])
def test_without_a_verb_there_is_the_help(group: tuple[str, ...]) -> None:
    told = run.invoke(app, group)
    assert told.stderr == ""
    assert told.stdout == run.invoke(app, [*group, "--help"]).stdout


def test_a_page_without_matplotlib_names_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda _: None)
    assert "`make install`" in failure("bench", "--html", "page.html")


@pytest.mark.parametrize("args", [("bench",), ("bench", "--target", "mine=http://127.0.0.1:1")])
def test_a_load_test_goes_where_other_verbs_go(args: tuple[str, ...]) -> None:
    said = failure(*args, PDSERVE_URL="http://127.0.0.1:1/v1")
    assert said.startswith("no coordinator answers at http://127.0.0.1:1:")


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (("bench",), ("ttft_p99", "itl_p99")),
        (("plan",), ("ttft_p99", "itl_p99")),
        (("simulate", "trace"), ("ttft", "tpot")),
        (("ab", "simulate"), ("ttft", "tpot")),
    ],
)
def test_every_verb_aims_at_the_latencies_that_models_aim_at(
    verb: tuple[str, ...], options: tuple[str, str]
) -> None:
    command = get_command(app)
    for word in verb:
        command = command.commands[word]  # type: ignore[attr-defined]
    given = {param.name: param.default for param in command.params}
    model = ModelConfig()
    for option, seconds in zip(options, (model.ttft_target_s, model.itl_target_s), strict=True):
        told = given[option]
        assert (duration(told) if isinstance(told, str) else told) == pytest.approx(seconds)


def test_the_settings_of_the_environment_are_checked() -> None:
    assert "worker.lease_s" in failure("config", PDSERVE_WORKER__LEASE_S="-1")
    said = failure("config", PDSERVE_COORDINATOR__WORKERS="127.0.0.1:50052")
    assert "PDSERVE_COORDINATOR__WORKERS: a section or a list must be JSON" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a", "pdserve.yaml does not hold sections"),
        (b"coordinator", "pdserve.yaml does not hold sections"),
        (b"\xff\xfe", "can't decode"),
        (b"a: b: c", "mapping values are not allowed"),
        (b"coordinator: {drain_s: .inf}", "coordinator.drain_s"),
        (b"worker: {lease_s: .inf}", "worker.lease_s"),
        (b"worker: {sim: {decode_step_s: .inf}}", "worker.sim.decode_step_s"),
        (b"worker: {roles: []}", "worker.roles"),
        (b"worker: {id: ''}", "worker.id"),
        (b"coordinator: {models: [{name: ''}]}", "coordinator.models.0.name"),
        (b"coordinator: {htpp: 1}", "coordinator.htpp: no such field here"),
        (b"worker: {lease_s: soon}", "worker.lease_s: must be a number, not 'soon'"),
    ],
)
def test_a_file_that_makes_no_sense_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_bytes(content)
    assert said in failure("config", "--config", str(file))


def test_new_keys_are_good_and_only_hashes_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    made = []
    for flags in (["--tenant", "acme", "--admin"], ["--tenant", "other", "--rate", "5/second"]):
        result = run.invoke(app, ["keys", "new", "--file", str(file), *flags])
        assert result.exit_code == 0, result.stderr
        made.append(result.stdout.strip())
        assert made[-1] not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    callers = [KeyRing.load(file).authenticate(f"Bearer {key}") for key in made]
    assert [(caller.tenant, caller.admin, caller.rate) for caller in callers] == [
        ("acme", True, None),
        ("other", False, "5/second"),
    ]


def test_keys_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: keys.new(tenant=f"t{at}", file=file), range(8)))
    assert len(yaml.safe_load(file.read_text())["keys"]) == 8


def test_a_keys_file_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{id: a}]\n")
    assert "keys.0" in failure("keys", "new", "--tenant", "acme", "--file", str(file))
    assert file.read_text() == "keys: [{id: a}]\n"


@pytest.mark.parametrize(
    ("available", "workers", "each", "shares"),
    [
        ([0, 1], 2, None, ["0", "1"]),
        ([0, 1], 3, None, ["0", "1", "0"]),
        ([4], 2, None, ["4", "4"]),
        ([0, 1, 2, 3, 4], 2, None, ["0-1", "2-3"]),
        ([0, 1, 2, 3, 8, 9, 10, 11, 12], 4, None, ["0-1", "2-3", "8-9", "10-11"]),
        ([0, 1, 2, 3, 4], 2, 2, ["0-1", "2-3"]),
        ([0, 1, 2], 2, 2, ["0-1", "0-1"]),
        ([0, 2, 4], 1, 3, ["0,2,4"]),
        ([0, 1], 1, 8, ["0-1"]),
    ],
)
def test_cores_are_shared_out(
    available: list[int], workers: int, each: int | None, shares: list[str]
) -> None:
    assert [core_list(cores) for cores in share_cores(available, workers, each)] == shares


def test_a_child_gets_exactly_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    base = load(
        None,
        {"worker": {"vllm": {"extra_args": {"seed": 1}}}, "fleet": {"key_file": "/etc/key"}},
    )
    model = the_model(base, {"mode": Mode.AUTO, "path": "/models/m"}, Pools())
    ports = WorkerPorts(grpc=1001, metrics=1002, side_channel=1003)
    worker = worker_settings(base, ("prefill-0", Role.PREFILL), model, "0-1", ports)
    head = coordinator_settings(base, model, ["127.0.0.1:1001"], Path("/run/here"))
    for settings in (worker, head):
        outer = {"PDSERVE_WORKER__ID": "of the user", "pdserve_log__level": "ERROR", "HOME": "/h"}
        env = child_env(settings, outer)
        assert env["HOME"] == "/h"
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert load(None, {}).model_dump() == settings.model_dump()
    assert worker.worker.roles == {Role.PREFILL}
    assert worker.worker.grpc.port == 1001
    assert worker.worker.vllm.cpu_cores == "0-1"
    assert head.coordinator.models == (model,)
    assert head.coordinator.ledger.folder == Path("/run/here/ledger")


def test_the_workers_of_a_system() -> None:
    names = [name for name, _ in worker_names(Pools(prefill=1, decode=2))]
    assert names == ["prefill-0", "decode-0", "decode-1"]


def test_a_simulated_model_needs_no_folder() -> None:
    settings = load(None, {"worker": {"engine": "sim"}})
    assert the_model(settings, {}, Pools()).tokenizer == "bytes"
    assert the_model(settings, {"path": "/models/m"}, Pools()).tokenizer == "model"


def test_several_models_are_not_for_up() -> None:
    settings = load(None, {"coordinator": {"models": [{"name": "a"}, {"name": "b"}]}})
    with pytest.raises(ConfigError, match="2 models"):
        the_model(settings, {}, Pools())


def test_a_model_is_a_name_or_a_folder(tmp_path: Path) -> None:
    assert named_model(None) == {}
    assert named_model("smollm2-135m-instruct") == {"name": "smollm2-135m-instruct"}
    assert named_model(str(tmp_path)) == {"name": tmp_path.name, "path": str(tmp_path)}


def test_a_fetched_model_is_told_to_programs_and_people(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run.invoke(app, ["model", "fetch", str(tmp_path)]).stdout == f"{tmp_path}\n"
    as_json = run.invoke(app, ["model", "fetch", str(tmp_path), "--json"])
    assert json.loads(as_json.stdout) == {"event": "ready", "folder": str(tmp_path)}


def test_the_defaults_that_help_shows_are_those_of_the_settings() -> None:
    settings, model = load(None, {}), load(None, {}).coordinator.models[0]
    expected = {
        "mode": model.mode.value,
        "min_prefill_tokens": model.min_prefill_tokens,
        "fallback": model.fallback.value,
        "transport": model.transport,
        "engine": settings.worker.engine,
        "kv_cache_gib": settings.worker.vllm.cpu_kv_cache_gib,
        "model": model.name,
        "host": settings.coordinator.http.host,
        "port": settings.coordinator.http.port,
        "grpc_port": settings.coordinator.grpc.port,
    }
    up = get_command(app).commands["up"]  # type: ignore[attr-defined]
    shown = {option.name: option.show_default for option in up.params if option.name in expected}
    assert shown == {name: str(value) for name, value in expected.items()}


def test_the_transport_is_that_of_either_engine() -> None:
    settings = load(None, nest([("worker.sim.transport", "grpc")])).worker
    engine = SimEngine(settings.sim, "revision", RealClock())
    assert engine.info.transports == ("grpc",)
    assert SimEngine(SimConfig(transport="none"), "r", RealClock()).info.transports == ()
