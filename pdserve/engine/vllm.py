"""The real engine: vLLM's AsyncLLM in this process, its core and workers in processes of their own.

This module, its siblings `vllm_*`, `child` and `kv` alone know vLLM (0.32).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from pdserve.cached_blocks import CachedBlocks
from pdserve.engine import vllm_process
from pdserve.engine.base import Admitted, EngineInfo, EngineLoad, Prefilled, StepListener
from pdserve.engine.kv import grpc, nixl
from pdserve.engine.replayed import Replayed
from pdserve.engine.vllm_args import VllmEngineConfig, grpc_config
from pdserve.engine.vllm_cache import CacheFollower
from pdserve.engine.vllm_lora import Adapters
from pdserve.engine.vllm_sampling import KV_PARAMS, REPLAY, logprobs_of, to_vllm
from pdserve.engine.vllm_stats import StepRecorder
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.prefix import chain
from pdserve.replay import Replay
from pdserve.types import (
    Delta,
    EngineRequest,
    FinishReason,
    FirstTokenTimings,
    GrpcDescriptor,
    KvDescriptor,
    LeaseEnd,
    NixlDescriptor,
    SamplingParams,
    Usage,
)

_WARM_UP = EngineRequest("warm-up", (1, 2, 3, 4), SamplingParams(max_tokens=1, temperature=0))
_CACHE_PROOFS = 2
"""Prompts that are read to see their blocks told; news of the first may be lost on its way."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_RELEASE_S = 5.0
"""How long the engine is given to say how a hold ended, which it does after its running step."""
_DEAD = "the engine is not running"
_MAX_TOLD_CHARS = 300


class VllmEngine:
    """`Engine` on vLLM; one per process, for vLLM is configured by the environment."""

    def __init__(self, config: VllmEngineConfig) -> None:
        self._config = config
        self._grpc = grpc_config(config, secrets.token_hex(8))
        self._ports: tuple[int, ...] = ()
        self._process: vllm_process.EngineProcess | None = None
        self._recorder = StepRecorder(lambda _: None)
        self._info: EngineInfo | None = None
        self._cached: CachedBlocks | None = None
        self._adapters = Adapters({})
        self._releases: set[asyncio.Task[None]] = set()
        self._held: set[str] = set()

    async def start(self, listener: StepListener) -> None:
        self._recorder = StepRecorder(listener)
        process = vllm_process.EngineProcess(self._config, self._grpc.epoch, self._recorder)
        self._process = process
        try:
            self._info = await process.start()
            self._adapters = Adapters(self._config.adapters)
            await self._adapters.load(process.llm)
            await self._warm_up()
            self._cached = await self._told(process.cache)
        except BaseException:
            await self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def load(self) -> EngineLoad:
        return self._recorder.load

    @property
    def cached(self) -> CachedBlocks | None:
        return self._cached

    async def generate(
        self, request: EngineRequest, kv: KvDescriptor | None
    ) -> AsyncIterator[Delta]:
        reason = ErrorReason.DECODE_FAILED
        extra: dict[str, Any] = {}
        if request.replay is not None:
            extra[REPLAY] = self._to_replay(request.replay)
        replayed = Replayed(request.replay)
        if kv is not None:
            extra[KV_PARAMS] = self._fetch_params(kv, len(request.token_ids))
            # Until the first token, what can fail is the hand-off.
            reason = ErrorReason.KV_TRANSFER_FAILED
        outputs = self._outputs(request, to_vllm(request.sampling, extra))
        completion_tokens = 0
        timings: FirstTokenTimings | None = None
        async with aclosing(outputs):
            async for output in _translated(outputs, DecodeError, reason, request.sampling):
                completion = output.outputs[0]
                if completion.finish_reason == "error" and kv is not None:
                    self._raise_failure(kv)
                _check_finish(completion.finish_reason, DecodeError, reason)
                first = completion_tokens == 0
                completion_tokens += len(completion.token_ids)
                delta = Delta(completion.text, list(completion.token_ids))
                delta.logprobs = logprobs_of(completion.logprobs)
                delta.prompt_logprobs = logprobs_of(output.prompt_logprobs)
                if first and completion_tokens:
                    if kv is None:
                        self._recorder.read(len(request.token_ids), output.num_cached_tokens or 0)
                    reason = ErrorReason.DECODE_FAILED
                    took = 0.0 if kv is None else self._recorder.take_transfer_s(_name(kv))
                    timings = FirstTokenTimings(*_phases(output.metrics), took)
                if output.finished:
                    delta.finish_reason = _FINISH[completion.finish_reason]
                    delta.stop_reason = completion.stop_reason
                    # vLLM counts tokens that were handed over as cached: they were not.
                    cached = 0 if kv is not None else output.num_cached_tokens or 0
                    delta.usage = Usage(len(request.token_ids), completion_tokens, cached)
                if replayed.cut(delta):
                    delta.timings, timings = timings, None
                    yield delta

    async def prefill(
        self, request: EngineRequest, lease_s: float, transport: str
    ) -> AsyncGenerator[Admitted | Prefilled]:
        early = None
        params = nixl.prefill_params(lease_s)
        if transport == GrpcDescriptor.transport:
            early = grpc.new_descriptor(self._grpc, self._ports)
            params = grpc.hold_params(early, lease_s)
        # What is sampled here is thrown away: the decode engine samples the first token.
        sampling = to_vllm(
            SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), {KV_PARAMS: params}
        )
        name = _unique(request.request_id)
        last = None
        outputs = self._outputs(request, sampling, name)
        try:
            # NIXL's descriptor names the blocks, which are known at the end alone.
            yield Admitted(early)
            async with aclosing(outputs):
                async for output in _translated(outputs, PrefillError, ErrorReason.PREFILL_FAILED):
                    _check_finish(
                        output.outputs[0].finish_reason, PrefillError, ErrorReason.PREFILL_FAILED
                    )
                    last = output
        except BaseException:
            # It may have finished inside the engine before the abort got there.
            self._release_in_background(
                nixl.release_params(name) if early is None else grpc.release_params(early)
            )
            raise
        if last is None or (early is None and last.kv_transfer_params is None):
            raise PrefillError(ErrorReason.PREFILL_FAILED, "the prompt's KV blocks are not held")
        descriptor = early or nixl.to_descriptor(last.kv_transfer_params)
        self._held.add(_name(descriptor))
        self._recorder.read(len(request.token_ids), last.num_cached_tokens or 0)
        yield Prefilled(descriptor, last.num_cached_tokens or 0, *_phases(last.metrics))

    async def renew(self, descriptor: KvDescriptor, lease_s: float) -> LeaseEnd | None:
        end = self._end_of(descriptor)
        if end is not None:
            return end
        if isinstance(descriptor, NixlDescriptor):
            await self._notify("renew", nixl.renew_params(descriptor.request_id, lease_s))
        elif isinstance(descriptor, GrpcDescriptor):
            await self._notify("renew", grpc.renew_params(descriptor, lease_s))
        return None

    async def release(self, descriptor: KvDescriptor) -> LeaseEnd:
        end, name = self._end_of(descriptor), _name(descriptor)
        self._held.discard(name)
        if end is not None:
            return end
        if isinstance(descriptor, NixlDescriptor):
            await self._notify("release", nixl.release_params(name))
        elif isinstance(descriptor, GrpcDescriptor):
            await self._notify("release", grpc.release_params(descriptor))
        # The reader may have been done before, and its word be on its way.
        with suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_S if self._lives else 0):
                return await self._recorder.ended(name, self._num_workers)
        return LeaseEnd.RELEASED

    def _end_of(self, descriptor: KvDescriptor) -> LeaseEnd | None:
        """How the engine's hold ended, if it has; RELEASED where there is none."""
        name = _name(descriptor)
        if name not in self._held:
            return LeaseEnd.RELEASED
        return self._recorder.end_of(name, self._num_workers)

    @property
    def _num_workers(self) -> int:
        return self.info.fingerprint.tensor_parallel

    @property
    def _lives(self) -> bool:
        return self._process is not None and self._process.alive

    async def check(self) -> None:
        if not self._lives:
            raise DecodeError(ErrorReason.DECODE_FAILED, _DEAD)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for task in self._releases:
                task.cancel()
            await process.close()

    def _llm(self) -> Any:
        if self._process is None or not self._process.alive:
            raise DecodeError(ErrorReason.DECODE_FAILED, _DEAD)
        return self._process.llm

    def _outputs(self, request: EngineRequest, sampling: Any, name: str | None = None) -> Any:
        from vllm.inputs.engine import tokens_input

        prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt or None)
        return self._llm().generate(
            prompt,
            sampling,
            # Two sequences may have one public id: a retry while the first is being aborted.
            name or _unique(request.request_id),
            lora_request=self._adapters.request(request.lora),
            reasoning_ended=True if request.sampling.constrain_reasoning else None,
        )

    async def _warm_up(self) -> None:
        """The first answer; it brings the ports that the engine's workers serve KV blocks on."""
        serves = GrpcDescriptor.transport in self.info.transports
        extra = {KV_PARAMS: grpc.ports_params()} if serves else {}
        outputs = self._outputs(_WARM_UP, to_vllm(_WARM_UP.sampling, extra))
        async for output in _translated(outputs, DecodeError, ErrorReason.DECODE_FAILED):
            if output.finished and serves:
                self._ports = tuple(output.kv_transfer_params["ports"])

    async def _told(self, cache: CacheFollower) -> CachedBlocks | None:
        """What the engine tells of its cache, once it was seen to tell truly: not every model
        has one cache alone, and whoever starts the engine may have its events sent elsewhere."""
        if not self._llm().vllm_config.cache_config.enable_prefix_caching:
            return cache.blocks
        size = self.info.fingerprint.block_size
        if size + 2 > self.info.context_length:
            return None
        for first in range(1, 1 + _CACHE_PROOFS):
            prompt = tuple(range(first, first + size + 1))
            outputs = self._outputs(
                replace(_WARM_UP, token_ids=prompt), to_vllm(_WARM_UP.sampling, {})
            )
            async for _ in _translated(outputs, DecodeError, ErrorReason.DECODE_FAILED):
                pass
            if await cache.tells(chain(prompt, "", size)[0]):
                return cache.blocks
        return None

    def _to_replay(self, replay: Replay) -> list[int]:
        if self._process is None or not self._process.can_replay:
            raise DecodeError(
                ErrorReason.INVALID_ARGUMENT,
                "this engine cannot go on with such an answer: it decodes speculatively",
            )
        return list(replay.token_ids)

    def _fetch_params(self, descriptor: KvDescriptor, num_tokens: int) -> dict[str, Any]:
        fits = descriptor.transport in self.info.transports
        if fits and isinstance(descriptor, NixlDescriptor):
            fits = nixl.covers(descriptor, num_tokens, self.info.fingerprint.block_size)
            params = nixl.decode_params(descriptor)
        elif fits and isinstance(descriptor, GrpcDescriptor):
            fits = len(descriptor.ports) == self.info.fingerprint.tensor_parallel
            params = grpc.fetch_params(descriptor)
        else:
            raise DecodeError(
                ErrorReason.KV_TRANSFER_FAILED, "this engine cannot fetch such KV blocks"
            )
        if not fits:
            raise DecodeError(
                ErrorReason.KV_TRANSFER_FAILED, "the KV blocks are not those of the prompt"
            )
        return params

    def _raise_failure(self, descriptor: KvDescriptor) -> None:
        """Raises what the engine's workers say of a fetch, if they have said it."""
        failure = self._recorder.take_failure(_name(descriptor))
        if failure is not None:
            raise failure

    async def _notify(self, name: str, params: dict[str, Any]) -> None:
        """Gives the connector an order, by an empty request that vLLM aborts at once."""
        if self._process is not None and self._process.alive:
            await self._process.llm.notify_kv_transfer_request_rejected(_unique(name), params)

    def _release_in_background(self, params: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self._notify("release", params))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


def _name(descriptor: KvDescriptor) -> str:
    """What the engine that holds the blocks calls them; empty for none of vLLM's."""
    if isinstance(descriptor, NixlDescriptor):
        return descriptor.request_id
    return descriptor.transfer_id if isinstance(descriptor, GrpcDescriptor) else ""


def _unique(request_id: str) -> str:
    return f"{request_id}-{secrets.token_hex(8)}"


def _phases(metrics: Any) -> tuple[float, float]:
    """Seconds from vLLM's request statistics: waiting in the engine, then to the first token."""
    return (
        max(0.0, metrics.scheduled_ts - metrics.queued_ts),
        max(0.0, metrics.first_token_ts - metrics.scheduled_ts),
    )


def _check_finish(
    finish_reason: str | None, error: type[DecodeError] | type[PrefillError], reason: ErrorReason
) -> None:
    if finish_reason is None or finish_reason in _FINISH:
        return
    what = (
        "the prompt's KV blocks could not be fetched"
        if reason is ErrorReason.KV_TRANSFER_FAILED
        else "the engine gave the sequence up"
    )
    raise error(reason, what)


async def _translated(
    outputs: Any,
    error: type[DecodeError] | type[PrefillError],
    reason: ErrorReason,
    sampling: SamplingParams | None = None,
) -> AsyncIterator[Any]:
    """vLLM's outputs, its exceptions as ours."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        async for output in outputs:
            yield output
    except EngineDeadError as dead:
        raise error(reason, _DEAD) from dead
    except VLLMClientError as refused:
        # vLLM names the parameter, but for a constraint that it cannot compile.
        param = getattr(refused, "parameter", None)
        if param is None and sampling is not None and sampling.structured_outputs is not None:
            param = "structured_outputs"
        told = f"the engine refuses the request: {refused}"[:_MAX_TOLD_CHARS]
        raise error(ErrorReason.INVALID_ARGUMENT, told, param=param) from refused
    except ValueError as refused:
        raise error(reason, f"the engine refused the request: {refused}") from refused
    except EngineGenerateError as failed:
        raise error(reason, "the engine failed on the request") from failed
