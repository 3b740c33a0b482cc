"""The pdserve command. Verbs import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import typer

from cli import (
    ab,
    ab_simulate,
    bench,
    chat,
    config,
    drain,
    eval,
    keys,
    model,
    plan,
    service,
    simulate,
    status,
    trace,
    up,
    usage,
    version,
)
from cli.failure import OneLineErrors

app = typer.Typer(
    cls=OneLineErrors,
    help="Serves language models from prefill and decode workers over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up")(up.up)
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("trace")(trace.trace)
app.command("usage")(usage.usage)
app.command("drain")(drain.drain)
app.command("config")(config.config)
ab.app.command("simulate")(ab_simulate.simulate)
app.add_typer(ab.app, name="ab")
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.command("coordinator")(service.coordinator)
app.command("prefill", help="Runs a worker that reads prompts.")(service.worker)
app.command("decode", help="Runs a worker that writes answers.")(service.worker)
app.command("worker")(service.worker)
app.add_typer(simulate.app, name="simulate")
app.command("eval")(eval.evaluate)
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("version")(version.version)

if __name__ == "__main__":
    app()
