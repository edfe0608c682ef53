"""Moving a case's inputs to the device of the function under test."""

from __future__ import annotations

import torch

from winnow.ops.case import to_device
from winnow.ops.case_data import Tokens, filled
from winnow.ops.paged import LayerPages, Paged
from winnow.ops.weights import PlainWeight


def parts(pages: LayerPages) -> list[torch.Tensor]:
    stored: list[Paged | None] = [pages.key, pages.value, pages.index]
    held = [(paged.codes, paged.scales) for paged in stored if paged is not None]
    return [part for pair in held for part in pair if part is not None]


def test_codes_and_scales_of_a_page_stay_views_of_the_same_rows() -> None:
    state = filled((Tokens(200, 2),), "nvfp4", "nvfp4")
    moved = to_device({"pages": state.pages, "batch": state.batch}, "meta")
    before, after = parts(state.pages), parts(moved["pages"])
    assert len(after) == 6
    for old, new in zip(before, after, strict=True):
        assert new.device.type == "meta"
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert new.storage_offset() == old.storage_offset()
    assert len({part.untyped_storage()._cdata for part in after}) == 1
    assert moved["batch"].block_tables.device.type == "meta"
    assert moved["pages"].key.global_scale == state.pages.key.global_scale


def test_gaps_between_values_stay_where_they_were() -> None:
    apart = torch.arange(12.0).view(3, 4)[:, ::2]
    (moved,) = to_device([apart], "meta")
    assert moved.stride() == apart.stride()
    assert moved.untyped_storage().nbytes() == apart.untyped_storage().nbytes()


def test_what_is_there_already_is_not_copied() -> None:
    held = {"weight": PlainWeight(torch.ones(2, 2)), "number": 3, "none": None}
    assert to_device(held, "cpu")["weight"] is held["weight"]
    assert to_device(held, "meta")["number"] == 3
