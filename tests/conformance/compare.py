"""Every case on every way, held against vLLM's own server; and the table of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from typing import NamedTuple

import httpx

from tests.conformance.asking import over_grpc, over_http
from tests.conformance.cases import CASES, Case
from tests.conformance.reference import TOOL_PARSER, vllm_server
from tests.conformance.seen import Seen, Verdict, near_tie, verdict
from tests.support.fleet import Fleet
from tests.support.running_system import RunningSystem
from tests.support.second_coordinator import second_coordinator

ROUTES = ("colocated", "NIXL", "gRPC transport")
SURFACES = ("HTTP", "gRPC")
_ATTEMPTS = 10
"""Of a request that fell back, on a machine so busy that a hand-off fails now and then."""


class Way(NamedTuple):
    route: str
    surface: str
    stream: bool


WAYS = tuple(Way(*way) for way in product(ROUTES, SURFACES, (False, True)))
Cells = dict[tuple[Case, Way], Verdict]


class Expected(NamedTuple):
    seen: Seen
    near_tie_at: int | None


def expected(model: str) -> dict[Case, Expected]:
    """What vLLM's own server answers; it has ended when this returns."""
    with vllm_server(model) as client:
        return {case: _expected(client, model, case) for case in CASES}


def _expected(client: httpx.Client, model: str, case: Case) -> Expected:
    seen = over_http(client, model, case, "", stream=False)
    if case.kind != "completion" or case.body["temperature"] or seen.refused is not None:
        return Expected(seen, None)
    body = {"model": model, **case.body, "logprobs": 2}
    body.pop("stream_options", None)
    shown = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    return Expected(seen, near_tie(shown["top_logprobs"], shown["tokens"]))


def compare(references: dict[Case, Expected], fleet: Fleet) -> Cells:
    """The fleet hands over by NIXL of itself."""
    with second_coordinator(fleet, "grpc") as by_grpc:
        cells: Cells = {}
        for case, way in product(CASES, WAYS):
            clients = by_grpc if way.route == "gRPC transport" else fleet
            cells[case, way] = cell(clients, case, way, references[case])
        return cells


def cell(clients: Fleet, case: Case, way: Way, reference: Expected) -> Verdict:
    """One case on one way; a way that differs is told in full."""
    there = case.grpc if way.surface == "gRPC" else case.streamed or not way.stream
    if not there:
        return Verdict.NOT_THERE
    mode = "colocated" if way.route == "colocated" else "disaggregated"
    for _ in range(_ATTEMPTS):
        if way.surface == "HTTP":
            seen = over_http(clients.http, clients.model, case, mode, stream=way.stream)
        else:
            seen = over_grpc(clients.grpc, clients.model, case, mode, stream=way.stream)
        if not seen.fell_back:
            break
    whole = reference.seen
    if way.stream and way.surface == "HTTP":
        whole = replace(whole, num_prompt_logprobs=0)
    found = verdict(whole, seen, mode, reference.near_tie_at)
    if found in (Verdict.DIFFERENT, Verdict.NEAR_TIE):
        parted = [
            field.name
            for field in fields(Seen)
            if getattr(whole, field.name) != getattr(seen, field.name)
        ]
        print(f"{case.name} {way}: {parted}; {whole.text!r}, but {seen.text!r}", flush=True)
    return found


@contextmanager
def fleet() -> Iterator[Fleet]:
    system = RunningSystem("--port", "0", "--grpc-port", "0", "--tool-parser", TOOL_PARSER)
    try:
        with Fleet(system, system.wait_for("ready", timeout=500)) as running:
            yield running
    finally:
        system.stop()


def table(cells: Cells) -> str:
    """In Markdown: the four ways to ask in each cell, in the order of the head."""
    lines = [
        "| parameter | asked by | " + " | ".join(ROUTES) + " |",
        "| --- | --- |" + " --- |" * len(ROUTES),
    ]
    for case in CASES:
        columns = [
            " ".join(cells[case, way].value for way in WAYS if way.route == route)
            for route in ROUTES
        ]
        lines.append(f"| {case.name} | {case.kind} | " + " | ".join(columns) + " |")
    return "\n".join(lines)
