"""How long a GPU takes for an engine step, and what KV cache it has: a roofline. Pure.

A step's linear layers take the longer of their FLOPs and of reading the weights once; its
attention the longer of its FLOPs and of reading the KV that it attends to (Williams et al.,
"Roofline", CACM 2009; for transformers, Pope et al., "Efficiently Scaling Transformer
Inference", MLSys 2023). Tensor parallelism divides both, and adds two all-reduces a layer
(Shoeybi et al., "Megatron-LM", 2019). Peaks are the makers' dense figures (data sheets of A100
80GB SXM, H100 SXM, H200 SXM, L40S); what is reached of them is an assumption, and named below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdserve.engine.sim_timing import StepWork

COMPUTE_REACHED = 0.6
"""Of the peak FLOP/s, by large matrix products in vLLM."""
BANDWIDTH_REACHED = 0.8
"""Of the memory bandwidth, by reading weights and KV."""
LINK_REACHED = 0.8
"""Of the link between GPUs, and of the network."""
OVERHEAD_S = 0.002
"""A step's scheduling, launches and sampling."""
MEMORY_USED = 0.9
"""vLLM's default gpu_memory_utilization."""
ACTIVATIONS_BYTES = 2e9
"""Kept free on each GPU for activations and CUDA graphs."""
TRANSFER_START_S = 0.001
"""From asking for KV to its first byte."""


class Precision(StrEnum):
    """Of the weights; the KV cache is in BF16 either way, as is vLLM's default."""

    BF16 = "bf16"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Dense FLOP/s, bytes and bytes/s. `link` is one direction to the other GPUs of the worker,
    `reduce_s` an all-reduce's latency, `network` one direction of its share of the network."""

    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    reduce_s: float
    network_bandwidth: float

    def flops(self, precision: Precision) -> float:
        return self.fp8_flops if precision is Precision.FP8 else self.bf16_flops


GPUS = {
    # An A100 has no FP8: the weights are stored in it, and computed with in BF16.
    "a100": Gpu(312e12, 312e12, 80e9, 2.039e12, 300e9, 10e-6, 25e9),
    "h100": Gpu(989e12, 1979e12, 80e9, 3.35e12, 450e9, 10e-6, 50e9),
    "h200": Gpu(989e12, 1979e12, 141e9, 4.8e12, 450e9, 10e-6, 50e9),
    # Without NVLink: PCIe 4.0 x16.
    "l40s": Gpu(362e12, 733e12, 48e9, 0.864e12, 32e9, 25e-6, 12.5e9),
}
"""Networks: 200, 400, 400 and 100 Gbit/s a GPU, as in DGX A100, DGX H100 and H200, OVX L40S."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder's shape, as in its config.json; `parameters` with both embeddings."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_length: int

    @property
    def multiplied(self) -> float:
        """Parameters that each token is multiplied with: all but the input embedding."""
        return self.parameters - self.vocabulary * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, two bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def attention_flops(self) -> float:
        """For one token that attends to one: queries with keys, weights with values."""
        return 4.0 * self.layers * self.heads * self.head_dim


MODELS = {
    "llama-3.1-8b": Architecture(8.03e9, 32, 4096, 32, 8, 128, 128_256, 131_072),
    "llama-3.1-70b": Architecture(70.55e9, 80, 8192, 64, 8, 128, 128_256, 131_072),
}


class Roofline:
    """A `Timing`: one worker of `tensor_parallel` GPUs."""

    def __init__(
        self, model: Architecture, gpu: Gpu, precision: Precision, tensor_parallel: int
    ) -> None:
        """Raises ValueError where the heads cannot be divided, or the model does not fit."""
        if model.kv_heads % tensor_parallel:
            raise ValueError(
                f"{model.kv_heads} KV heads cannot be divided among {tensor_parallel} GPUs"
            )
        ranks = tensor_parallel
        weight_bytes = model.parameters * (1 if precision is Precision.FP8 else 2)
        usable = ranks * (gpu.memory_bytes * MEMORY_USED - ACTIVATIONS_BYTES)
        self.kv_capacity_tokens = int((usable - weight_bytes) / model.kv_bytes_per_token)
        if self.kv_capacity_tokens <= 0:
            raise ValueError(
                f"{weight_bytes / 1e9:.0f} GB of weights do not fit {ranks} GPUs of "
                f"{gpu.memory_bytes / 1e9:.0f} GB"
            )
        compute = gpu.flops(precision) * COMPUTE_REACHED * ranks
        bandwidth = gpu.memory_bandwidth * BANDWIDTH_REACHED * ranks
        self._weights_s = weight_bytes / bandwidth
        self._token_s = 2 * model.multiplied / compute
        # Attention is computed in BF16 whatever the weights are.
        bf16 = gpu.bf16_flops * COMPUTE_REACHED * ranks
        self._attended_s = model.attention_flops / bf16
        self._kv_read_s = model.kv_bytes_per_token / bandwidth
        self._reduce_s = self._reduce_token_s = 0.0
        if ranks > 1:
            reduces = 2 * model.layers
            self._reduce_s = reduces * gpu.reduce_s
            # A ring carries each byte 2 (n - 1) / n times.
            carried = reduces * model.hidden * 2 * 2 * (ranks - 1) / ranks
            self._reduce_token_s = carried / (gpu.link_bandwidth * LINK_REACHED)
        network = gpu.network_bandwidth * LINK_REACHED * ranks
        self._transfer_token_s = model.kv_bytes_per_token / network

    def step_s(self, work: StepWork) -> float:
        tokens = work.read_tokens + work.writing
        linear_s = max(tokens * self._token_s, self._weights_s)
        # KV that a chunk attends to is read once for all of its tokens: it hides behind FLOPs.
        attention_s = work.read_pairs * self._attended_s + max(
            work.write_context * self._attended_s, work.write_context * self._kv_read_s
        )
        reduce_s = self._reduce_s + tokens * self._reduce_token_s
        return OVERHEAD_S + linear_s + attention_s + reduce_s

    def transfer_s(self, num_tokens: int) -> float:
        return TRANSFER_START_S + num_tokens * self._transfer_token_s
