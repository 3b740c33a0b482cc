"""Step times and cache sizes against figures worked out by hand from data sheets."""

from __future__ import annotations

import pytest

from measure.simulation.roofline import GPUS, MODELS, OVERHEAD_S, Precision, Roofline
from pdserve.engine.sim_timing import StepWork

LLAMA_8B, LLAMA_70B = MODELS["llama-3.1-8b"], MODELS["llama-3.1-70b"]


def roofline(gpu: str, precision: str = "bf16", ranks: int = 1, model: str = "8b") -> Roofline:
    return Roofline(MODELS[f"llama-3.1-{model}"], GPUS[gpu], Precision(precision), ranks)


def test_a_token_of_llama_8b_takes_128_kib_of_kv_cache_and_one_of_70b_320() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_70B.kv_bytes_per_token == 320 * 1024


def test_one_token_at_a_time_is_bound_by_reading_the_weights() -> None:
    # 16.06 GB at 0.8 x 3.35 TB/s is 5.99 ms; its KV, 1,000 x 131,072 bytes, 0.049 ms.
    seconds = roofline("h100").step_s(StepWork(writing=1, write_context=1000))
    assert seconds - OVERHEAD_S == pytest.approx(0.005993 + 0.0000489, abs=2e-6)


def test_a_long_chunk_is_bound_by_its_flops() -> None:
    # 2 x (8.03e9 - 128,256 x 4,096) x 8,192 / (0.6 x 989e12) is 207.19 ms; attention of
    # 8,192 tokens to 8,192 x 8,192 / 2 others: 4 x 32 x 32 x 128 FLOPs each, 29.65 ms.
    work = StepWork(read_tokens=8192, read_pairs=8192**2 // 2)
    assert roofline("h100").step_s(work) - OVERHEAD_S == pytest.approx(0.23684, abs=2e-5)


def test_fp8_halves_what_the_linear_layers_take_where_the_gpu_has_it() -> None:
    chunk, token = StepWork(read_tokens=8192), StepWork(writing=1)
    bf16, fp8 = roofline("h100"), roofline("h100", "fp8")
    assert fp8.step_s(chunk) - OVERHEAD_S == pytest.approx(0.20719 * 989 / 1979, abs=2e-5)
    assert fp8.step_s(token) - OVERHEAD_S == pytest.approx(
        (bf16.step_s(token) - OVERHEAD_S) / 2, rel=1e-9
    )
    a100 = roofline("a100", "fp8")
    assert a100.step_s(chunk) == pytest.approx(roofline("a100").step_s(chunk), rel=1e-9)


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    # Of 70B on four H100: 141.1 GB / (4 x 0.8 x 3.35 TB/s) is 13.16 ms. 160 all-reduces of
    # 10 us are 1.6 ms; a token's 16,384 bytes go 1.5 times over 0.8 x 450 GB/s: 10.9 us.
    seconds = roofline("h100", ranks=4, model="70b").step_s(StepWork(writing=1))
    assert seconds - OVERHEAD_S == pytest.approx(0.013162 + 0.0016 + 0.0000109, abs=2e-6)


@pytest.mark.parametrize(
    ("gpu", "precision", "ranks", "model", "tokens"),
    [
        # (80e9 x 0.9 - 2e9 - 16.06e9) / 131,072
        ("h100", "bf16", 1, "8b", 411_529),
        # (141e9 x 0.9 - 2e9 - 8.03e9) / 131,072
        ("h200", "fp8", 1, "8b", 891_647),
        # (4 x (48e9 x 0.9 - 2e9) - 70.55e9) / 327,680
        ("l40s", "fp8", 4, "70b", 287_628),
    ],
)
def test_what_weights_leave_of_the_memory_is_kv_cache(
    gpu: str, precision: str, ranks: int, model: str, tokens: int
) -> None:
    assert roofline(gpu, precision, ranks, model).kv_capacity_tokens == tokens


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="141 GB of weights do not fit 1 GPUs of 80 GB"):
        roofline("h100", model="70b")
    with pytest.raises(ValueError, match="8 KV heads cannot be divided among 3 GPUs"):
        roofline("h100", ranks=3)


def test_a_transfer_takes_its_bytes_over_the_network() -> None:
    # 10,000 x 131,072 bytes over 0.8 x 50 GB/s are 32.77 ms, and one to begin with.
    assert roofline("h100").transfer_s(10_000) == pytest.approx(0.033768, abs=1e-6)
