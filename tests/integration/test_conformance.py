"""The conformance table's own requests, on a simulated fleet held against itself."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from tests.conformance.asking import over_http
from tests.conformance.cases import CASES, Case
from tests.conformance.compare import WAYS, Expected, Way, cell, table
from tests.conformance.seen import Verdict
from tests.support.fleet import Fleet
from tests.support.running_system import RunningSystem
from tests.support.second_coordinator import second_coordinator


def test_every_way_to_ask_answers_alike() -> None:
    # Answers of a step a millisecond: there are a thousand of them.
    env = {**os.environ, "PDSERVE_WORKER__SIM__DECODE_STEP_S": "0.001"}
    system = RunningSystem("--engine", "sim", "--port", "0", "--grpc-port", "0", env=env)
    try:
        with (
            Fleet(system, system.wait_for("ready")) as nixl,
            second_coordinator(nixl, "grpc") as grpc,
            ThreadPoolExecutor(8) as pool,
        ):

            def reference(case: Case) -> Expected:
                seen = over_http(nixl.http, nixl.model, case, "colocated", stream=False)
                return Expected(seen, None)

            references = dict(zip(CASES, pool.map(reference, CASES), strict=True))

            def tried(of: tuple[Case, Way]) -> Verdict:
                case, way = of
                asked = grpc if way.route == "gRPC transport" else nixl
                return cell(asked, case, way, references[case])

            every = list(product(CASES, WAYS))
            cells = dict(zip(every, pool.map(tried, every), strict=True))
    finally:
        system.stop()
    assert Verdict.DIFFERENT not in cells.values(), table(cells)
    refused = {case.name for (case, _), found in cells.items() if found is Verdict.REFUSED}
    for (case, _), found in cells.items():  # one refusal is one on every way that there is
        assert case.name not in refused or found in (Verdict.REFUSED, Verdict.NOT_THERE)
