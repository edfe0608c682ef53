"""The Triton kernels of norm, products, experts and sampling: right by Triton's interpreter, and
accepted by the compiler for the GPUs they are meant for. What only a GPU shows is not shown here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.compiled import compiling
from support.interpreted import interpreted

from winnow.ops.case_data import mlp_weights, moe_weights, small_spec, weight
from winnow.ops.linear.cuda import linear
from winnow.ops.mlp.cuda import mlp
from winnow.ops.moe.cuda import moe
from winnow.ops.norm.cuda import add_norm, norm
from winnow.ops.sample import SampleRow
from winnow.ops.sample.cuda import sample


def test_norm_products_and_mlp_equal_their_definitions() -> None:
    interpreted("support.triton_layers:products")


def test_experts_equal_their_definition() -> None:
    interpreted("support.triton_layers:experts")


def test_pairs_are_ordered_by_expert_and_experts_without_rows_have_none() -> None:
    interpreted("support.triton_layers:routing")


def test_launches_that_depend_on_shapes_alone_serve_every_routing() -> None:
    interpreted("support.triton_layers:replay")


def test_every_stage_of_sampling_equals_its_definition() -> None:
    interpreted("support.triton_layers:sampling")


def test_ranks_are_the_same_where_a_row_has_too_many_candidates() -> None:
    interpreted("support.triton_layers:whole_rows")


def test_a_row_is_sampled_the_same_alone_and_in_a_batch() -> None:
    interpreted("support.triton_layers:alone")


# The sizes of tiles follow the rows; 16 rows a matrix and 128 are the ends of what is served.
PRODUCTS = [("mxfp8", 1), ("mxfp8", 65), ("nvfp4", 1)]
EXPERTS = [("bf16", 1), ("mxfp8", 1), ("nvfp4", 1), ("nvfp4", 200)]


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_without_a_gpu(capability: int) -> None:
    spec, generator = small_spec(), torch.Generator().manual_seed(0)
    spec = replace(spec, hidden_size=128, expert_width=64)
    built: dict[tuple[Any, ...], Any] = {}

    def rows(count: int) -> torch.Tensor:
        return torch.zeros(count, spec.hidden_size, dtype=torch.bfloat16)

    with compiling(capability, built):
        norm(rows(2), torch.zeros(spec.hidden_size), 1e-6)
        add_norm(rows(2), rows(2), torch.zeros(spec.hidden_size), 1e-6)
        for top_p in (1.0, 0.9):
            asked = [SampleRow(seed=0, index=0, top_p=top_p)] * 2
            sample(torch.zeros(2, 99), asked)
        mlp(rows(1), mlp_weights("bf16", generator, 64, spec.hidden_size), spec)
        for kind, count in PRODUCTS:
            linear(rows(count), weight(kind, generator, 64, spec.hidden_size))
        for kind, count in EXPERTS if capability == 90 else EXPERTS[2:3]:
            moe(rows(count), moe_weights(kind, generator, spec), spec)
    names = {key[0] for key in built}
    assert names == {
        "_norm", "_add_norm", "_highest", "_most_likely", "_weigh", "_draw",
        "_bin", "_count", "_gather", "_cut",
        "_activate", "_linear", "_scores", "_choose", "_sort", "_gate_up", "_down", "_combine",
    }  # fmt: skip
