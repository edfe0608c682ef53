"""GPUs by name, and how a word for one is read."""

from __future__ import annotations

import pytest

from winnow.errors import UnsupportedError
from winnow.spec.formats import BF16, FORMATS, FP8, FP32, MXFP8, NVFP4
from winnow.spec.hardware import GPUS, find_gpu


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_dense_and_in_the_ratio_of_their_operands(name: str) -> None:
    gpu = find_gpu(name.upper())
    assert gpu == find_gpu(name)
    assert gpu.peaks is not None
    assert gpu.peaks.fp8 == pytest.approx(2 * gpu.peaks.bf16, rel=0.001)
    assert (gpu.peaks.fp4 >= 2 * gpu.peaks.fp8 * 0.999) == (gpu.peaks.fp4 > 0)
    assert 1e12 < gpu.peaks.link_bandwidth * 10 < gpu.peaks.bandwidth * 2
    for each in FORMATS.values():
        # A product is never timed by a peak that the GPU does not have.
        assert gpu.peaks.flops(gpu.peaks.weight_operand(each)) > 0
        assert gpu.peaks.flops(gpu.peaks.cache_operand(each)) > 0


def test_a_product_runs_as_narrow_as_the_tensor_cores_take_its_format() -> None:
    hopper, blackwell, cdna4 = (find_gpu(name).peaks for name in ("h200", "b300", "mi355x"))
    assert hopper is not None
    assert blackwell is not None
    assert cdna4 is not None
    assert [hopper.weight_operand(f) for f in (NVFP4, MXFP8, FP8, BF16)] == [
        "bf16", "bf16", "fp8", "bf16",
    ]  # fmt: skip
    assert [blackwell.weight_operand(f) for f in (NVFP4, MXFP8, BF16, FP32)] == [
        "fp4", "fp8", "bf16", "bf16",
    ]  # fmt: skip
    assert [cdna4.weight_operand(f) for f in (NVFP4, MXFP8)] == ["bf16", "fp8"]
    # Queries are not quantised to four bits.
    assert blackwell.cache_operand(NVFP4) == "fp8"
    assert hopper.cache_operand(NVFP4) == "bf16"


def test_another_gpu_has_the_memory_it_is_given_and_no_peaks() -> None:
    own = find_gpu("own=96.5")
    assert (own.name, own.memory_bytes, own.peaks) == ("own", 96_500_000_000, None)
    assert find_gpu("x=0.000000001").memory_bytes == 1


def test_a_known_gpu_with_another_memory_keeps_its_peaks() -> None:
    assert find_gpu("b300=288").memory_bytes == 288 * 10**9
    assert find_gpu("b300=288").peaks == find_gpu("b300").peaks


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("b100", r"no GPU 'b100': use one of h100, h200, b200, b300, gb300, mi355x, or NAME=GB"),
        ("", r"no GPU ''"),
        ("own=", r"'own=' is not NAME=GB with GB above 0"),
        ("=80", r"'=80' is not NAME=GB"),
        ("own=0", r"'own=0' is not NAME=GB"),
        ("own=-1", r"'own=-1' is not NAME=GB"),
        ("own=nan", r"'own=nan' is not NAME=GB"),
        ("own=inf", r"'own=inf' is not NAME=GB"),
        ("own=1e999999", r"'own=1e999999' is not NAME=GB .* up to 1e9"),
        ("own=80GB", r"'own=80GB' is not NAME=GB"),
    ],
)
def test_a_word_that_is_no_gpu_is_refused_with_what_is(word: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        find_gpu(word)
