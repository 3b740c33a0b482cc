from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from coordinator.gateway.keys import KeyRing
from pdserve.config import GatewayConfig
from tests.support.grpc_facade import GrpcFacade, grpc_facade
from tests.support.http_facade import MAX_BODY, HttpFacade, http_facade


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running_http() -> AsyncIterator[HttpFacade]:
    async with http_facade(GatewayConfig(max_body_bytes=MAX_BODY)) as facade:
        yield facade


@pytest.fixture
def facade(running_http: HttpFacade) -> HttpFacade:
    """The HTTP façade of the module, as new."""
    running_http.reset()
    return running_http


@pytest_asyncio.fixture
async def service() -> AsyncIterator[GrpcFacade]:
    """The gRPC façade, open to all."""
    async with grpc_facade(KeyRing.open_to_all()) as found:
        yield found
