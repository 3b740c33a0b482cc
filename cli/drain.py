"""`pdserve drain`"""

from __future__ import annotations

from typing import Annotated

import typer

from cli.failure import CliError
from cli.options import DEFAULT_URL, Key, Url


def drain(
    worker: Annotated[str, typer.Argument(help="The worker's id, as in `pdserve status`.")],
    url: Url = DEFAULT_URL,
    key: Key = None,
    deadline: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for what runs there.")
    ] = 30.0,
) -> None:
    """Takes a worker out: nothing new, and waits for what runs there."""
    from cli.http import check, connect, part

    with connect(url, key) as client:
        path = f"/fleet/workers/{part(worker)}/drain"
        response = client.put(path, params={"deadline_s": deadline})
        check(response)
        unfinished = response.json()["unfinished"]
    if unfinished:
        raise CliError(f"{worker} takes nothing new, but has not finished {unfinished} yet")
    print(f"{worker} is drained; it takes work again when it is restarted")
