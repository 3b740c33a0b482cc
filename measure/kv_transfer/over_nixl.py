"""NIXL agents as vLLM makes them, whose progress threads pause as pdserve makes them."""

from __future__ import annotations

import os
from typing import Any

from measure.kv_transfer.cache import Cache
from measure.kv_transfer.jobs import Way
from measure.kv_transfer.ways import Prompt, WayError, until
from pdserve.engine.kv.mends import progress_thread_paced

_TLS = {Way.NIXL_SHM: "tcp,shm,self", Way.NIXL_TCP: "tcp,self"}
_DRAM = "DRAM"

Hello = tuple[bytes, list[tuple[int, int, int]]]


class Agent:
    """A NIXL agent with a cache that it has registered."""

    def __init__(self, name: str, way: Way, cache: Cache) -> None:
        from nixl._api import nixl_agent, nixl_agent_config
        from nixl._api import nixlBind as bindings

        # Read when the agent's UCX context is made.
        os.environ["UCX_TLS"] = _TLS[way]
        os.environ["UCX_LOG_LEVEL"] = "fatal"
        with progress_thread_paced(bindings):
            self.nixl: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        layers = [layer.view(-1) for layer in cache.tensor]
        self._registered = self.nixl.register_memory(layers)
        width = cache.shape.bytes_per_block
        self.blocks = [
            (layer.data_ptr() + block * width, width, 0)
            for layer in layers
            for block in range(cache.num_blocks)
        ]

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered)
        del self.nixl


class NixlSource:
    def __init__(self, way: Way, cache: Cache) -> None:
        self._agent = Agent("holder", way, cache)

    def hello(self) -> Hello:
        return self._agent.nixl.get_agent_metadata(), self._agent.blocks

    def expect(self, prompt: Prompt) -> None:
        pass

    def close(self) -> None:
        self._agent.close()


class NixlLink:
    def __init__(self, way: Way, cache: Cache, hello: Hello) -> None:
        self._cache = cache
        self._agent = Agent("reader", way, cache)
        metadata, blocks = hello
        nixl = self._agent.nixl
        self._theirs_each = len(blocks) // cache.shape.num_layers
        self._holder = nixl.add_remote_agent(metadata)
        self._theirs = nixl.prep_xfer_dlist(self._holder, blocks, _DRAM)
        self._ours = nixl.prep_xfer_dlist("", self._agent.blocks, _DRAM)

    def copy(self, prompt: Prompt) -> None:
        nixl = self._agent.nixl
        layers = range(self._cache.shape.num_layers)
        ours = [layer * self._cache.num_blocks + block for layer in layers for block in prompt.ours]
        theirs = [layer * self._theirs_each + block for layer in layers for block in prompt.theirs]
        handle = nixl.make_prepped_xfer("READ", self._ours, ours, self._theirs, theirs)
        states = [nixl.transfer(handle)]

        def over() -> bool:
            if states[-1] == "PROC":
                states[-1] = nixl.check_xfer_state(handle)
            return bool(states[-1] != "PROC")

        until(over, prompt.num_bytes)
        nixl.release_xfer_handle(handle)
        if states[-1] != "DONE":
            raise WayError(f"NIXL says {states[-1]}")

    def close(self) -> None:
        nixl = self._agent.nixl
        nixl.release_dlist_handle(self._theirs)
        nixl.release_dlist_handle(self._ours)
        nixl.remove_remote_agent(self._holder)
        self._agent.close()
