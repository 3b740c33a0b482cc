"""A real browser without a window."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from playwright.async_api import Page, async_playwright, expect

from tests.support.patience import WITHIN_S
from tests.support.tools import FOLDER, tool

_WITHIN_MS = WITHIN_S * 1000
expect.set_options(timeout=_WITHIN_MS)


@asynccontextmanager
async def browser_page(scheme: Literal["light", "dark"] = "light") -> AsyncIterator[Page]:
    """An empty page. Left without an exception, no script of it may have failed, nor asked for
    what its server forbids it."""
    # Its own libraries, for machines that have none for browsers.
    env = {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "lib")}
    flags = ["--no-sandbox", "--no-zygote", "--disable-gpu"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=tool("chromium"), args=flags, env=env, timeout=_WITHIN_MS
        )
        try:
            page = await browser.new_page(
                viewport={"width": 1280, "height": 900}, color_scheme=scheme
            )
            page.set_default_timeout(_WITHIN_MS)
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda it: faults.append(it.text) if it.type == "error" else None)
            yield page
            assert not [fault for fault in faults if "status of 40" not in fault], faults
        finally:
            await browser.close()
