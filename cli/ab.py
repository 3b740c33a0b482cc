"""`pdserve ab`"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import DEFAULT_URL, GpuHour, Key, Url

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    help="Serves a model in two ways and says which is better.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class AssignmentName(StrEnum):
    STICKY = "sticky"
    INTERLEAVED = "interleaved"
    SHADOW = "shadow"


class ArmMode(StrEnum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    AUTO = "auto"


_DAY_S = 86_400.0

ModelName = Annotated[
    str | None, typer.Option("--model", help="Whose experiment; default: the only model's.")
]


@app.command()
def start(  # noqa: PLR0913  (one option each)
    arms: Annotated[
        list[ArmMode] | None, typer.Argument(metavar="MODE...", help="Two modes or more.")
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="YAML: an entry of coordinator.experiments."),
    ] = None,
    assignment: Annotated[
        AssignmentName | None,
        typer.Option(help="Of requests to arms.", show_default="interleaved"),
    ] = None,
    slot: Annotated[
        float | None,
        typer.Option(
            min=0.1, max=_DAY_S, metavar="SECONDS", help="Of one time slot.", show_default="60"
        ),
    ] = None,
    washout: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=_DAY_S,
            metavar="SECONDS",
            help="Of each slot, that does not count.",
            show_default="10",
        ),
    ] = None,
    model: ModelName = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Starts an experiment: of modes, or of whole policies by --file."""
    from cli.failure import CliError
    from cli.http import check, connect

    if (file is None) is (not arms):
        raise CliError("name two modes or more, as `pdserve ab start colocated auto`, or --file")
    said = {"assignment": assignment, "slot_s": slot, "washout_s": washout}
    fields: dict[str, Any] = {
        "name": "-or-".join(arms or []),
        "arms": [{"name": arm.value, "mode": arm.value} for arm in arms or []],
        "assignment": AssignmentName.INTERLEAVED,
        **{name: value for name, value in said.items() if value is not None},
    }
    if file is not None:
        if any(value is not None for value in said.values()):
            raise CliError("--file says all of it: leave out --assignment, --slot and --washout")
        fields = _read(file)
    with connect(url, key) as client:
        named = model or fields.pop("model", None) or _only_model(client)
        response = client.put(_path(named), json={**fields, "model": named})
        check(response)
        told = response.json()
    print(f"{told['name']} of {named} runs; see `pdserve ab report`")


@app.command()
def status(url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Shows the experiments of all models."""
    from cli.http import connect, get_json

    with connect(url, key) as client:
        experiments = get_json(client, "/experiments")["experiments"]
    for told in experiments or [{}]:
        print(_line(told) if told else "no experiment has run here")


@app.command()
def report(
    model: ModelName = None,
    gpu_hour: GpuHour = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="What was counted, slot by slot, as JSON.")
    ] = False,
) -> None:
    """Says what the experiment shows by now, as often as one likes."""
    from cli.http import connect, get_json
    from measure.ab.words import render
    from pdserve.ab.report import compare
    from pdserve.ab.slots import experiment

    with connect(url, key) as client:
        told = get_json(client, _path(model or _only_model(client)))
    if as_json:
        print(json.dumps(told, indent=2))
        return
    seen = experiment(told)
    show(f"{_line(told)}\n\n{render(seen, compare(seen, gpu_hour))}")


@app.command()
def stop(model: ModelName = None, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Ends the experiment; its report stays until the next one, or the coordinator's end."""
    from cli.http import check, connect

    with connect(url, key) as client:
        named = model or _only_model(client)
        response = client.delete(_path(named))
        check(response)
    print(_line(response.json()))


def show(markdown: str) -> None:
    """As text with tables, also where it goes on to a pipe or a file."""
    from rich.markdown import Markdown

    from cli.console import console

    console().print(Markdown(markdown))


def _line(told: dict[str, Any]) -> str:
    arms = [f"{arm['name']} (stopped)" if arm["stopped"] else arm["name"] for arm in told["arms"]]
    state = "running" if told["running"] else "ended"
    return (
        f"{told['name']} of {told['model']}: {told['assignment']}, {state}, "
        f"{told['elapsed_s']:.0f} s in slots of {told['slot_s']:g} s; arms {', '.join(arms)}"
    )


def _path(model: str) -> str:
    from cli.http import part

    return f"/experiments/{part(model)}"


def _only_model(client: httpx.Client) -> str:
    from cli.failure import CliError
    from cli.http import get_json

    cards = get_json(client, "/v1/models")["data"]
    # Adapters take part in the experiment of their model.
    names = [card["id"] for card in cards if card["parent"] is None]
    if len(names) != 1:
        raise CliError(f"--model: one of {', '.join(names)}")
    return str(names[0])


def _read(file: Path) -> dict[str, Any]:
    import yaml

    from cli.failure import CliError

    try:
        fields = yaml.safe_load(file.read_text())
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise CliError(f"{file}: {error}") from None
    if not isinstance(fields, dict):
        raise CliError(f"{file} does not hold the fields of an experiment, `name: value`")
    return fields
