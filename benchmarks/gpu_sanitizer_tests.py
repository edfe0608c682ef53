"""What `gpu_sanitizer.py` runs under a tool: pytest over the kernels' tests, several processes
dividing them among themselves.

Owns which tests are left out and how a process takes its next one. Knows nothing of the tools.

    gpu_sanitizer_tests.py TOOL SHARE FOLDER SECONDS FILE...

A test belongs to the first process that makes the file of its name in FOLDER. The process begins
after SHARE (0 to 1) of all tests. None begins after SECONDS. Lines of tests begun and ended go to
standard output, marked by `MARK`.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.ops.sparse_attention import hopper as sparse_decode

MARK = "@"
Values = Mapping[str, Any]
Rule = Callable[[Values], bool]
"""Whether a case is left out, of its parameters."""


def always(values: Values) -> bool:
    """For tests that look at bits alone: others launch the same kernels on the same shapes."""
    return True


def _wide(values: Values) -> bool:
    """Of the products of real widths, all but every number of rows at the smallest and a few rows
    of a long sum: the steps of a sum and the strips of an output are each taken in turn there."""
    n, k, rows = (values[name] for name in ("n", "k", "rows"))
    return (n, k) != (384, 256) and not (n == 640 and rows <= 13)


def _tall(values: Values) -> bool:
    """Of the wide experts whose units few CTAs are given: those beside a shared one in NVFP4."""
    wide = values["spec"].expert_width > 128
    return values["multiprocessors"] == 1 and wide and values["shared"] == "nvfp4"


def _expanded(values: Values) -> bool:
    """Of the products, those of weights expanded before: by a kernel without shared memory, and by
    cuBLAS's, which racecheck of CUDA 13.0 ends ("failed to handle a hardware exception")."""
    return values["rows"] > 1024


def _many_requests(values: Values) -> bool:
    """Of the indexer's decode: 430,000 tokens, whose keys all pass through shared memory."""
    return len(values["tokens"]) > 11


TOO_LARGE: dict[tuple[str, str], Rule] = {
    ("linear", "test_real_widths_agree_and_repeat_to_the_bit"): _wide,
    ("linear", "test_clusters_that_take_tiles_in_turn_add_each_of_them"): lambda v: v["rows"] > 1,
    ("linear", "test_tiles_that_several_ctas_have_agree_and_repeat_to_the_bit"): lambda v: (
        v["k"] == 6144
    ),
    ("moe", "test_the_same_rows_give_the_same_bits"): always,
    ("moe", "test_a_row_does_not_hang_on_the_rows_beside_it"): always,
    ("moe", "test_calls_behind_each_other_give_what_each_gives_alone"): always,
    ("moe", "test_long_units_equal_the_reference"): _tall,
    ("moe", "test_who_computes_a_unit_changes_no_bit"): always,
    ("moe_prefill", "test_both_products_are_those_of_the_dequantised_weights"): lambda v: (
        v["rows"] not in (1, 110)
    ),
    ("moe_route", "test_a_choice_does_not_hang_on_the_number_of_rows"): lambda v: (
        v["hidden_size"] != 384
    ),
    ("moe_prefill", "test_no_shape_changes_a_bit"): always,
    ("moe_prefill", "test_nan_stays_in_its_row"): always,
    ("moe_prefill", "test_callers_on_two_streams_get_what_each_gets_alone"): always,
    ("moe_prefill", "test_a_shared_expert_that_fails_leaves_the_next_call_alone"): always,
    ("moe_prefill", "test_output_is_plain_arithmetics_within_bf16"): lambda v: v["rows"] > 257,
    ("prefill", "test_small_scratch_gives_the_same_bits"): lambda v: v["rows_at_a_time"] < 37,
    ("prefill", "test_a_row_gives_the_same_bits_beside_any_others"): always,
    ("prefill", "test_queries_of_any_size_keep_their_bits"): always,
    ("select", "test_a_row_selects_the_same_whatever_rows_stand_beside_it"): always,
    ("select", "test_a_table_wider_than_its_sequences_changes_nothing"): lambda v: (
        v["columns"] > 5000
    ),
    ("sparse", "test_queries_of_any_size_keep_their_bits"): always,
}
"""By file and test: what no kernel and no path needs, since smaller cases take the same.
`gpu_sanitizer.py` fails if a kernel is never launched."""
TOO_MUCH_SHARED_MEMORY: dict[tuple[str, str], Rule] = {
    ("linear", "test_clusters_that_take_tiles_in_turn_add_each_of_them"): always,
    ("linear", "test_real_widths_agree_and_repeat_to_the_bit"): lambda v: (
        (v["n"] == 640 and v["rows"] != 8) or _expanded(v)
    ),
    ("linear", "test_nan_and_the_smallest_and_largest_scales_reach_the_result"): _expanded,
    ("linear", "test_tiles_that_several_ctas_have_agree_and_repeat_to_the_bit"): lambda v: (
        v["n"] not in (8448, 4352) or not v["woven"]
    ),
    ("moe", "test_long_units_equal_the_reference"): lambda v: v["shared"] != "mxfp8",
    ("moe_prefill", "test_both_products_are_those_of_the_dequantised_weights"): lambda v: (
        v["rows"] == 1
    ),
    ("moe_route", "test_a_choice_does_not_hang_on_the_number_of_rows"): lambda v: (
        v["experts"] not in (128, 256) or v["most"] > 65
    ),
    ("moe_route", "test_few_rows_are_ordered_by_what_has_just_been_chosen"): always,
    ("moe_prefill", "test_calls_behind_each_other_give_what_each_gives_alone"): always,
    ("moe_route", "test_one_launch_orders_and_gathers_to_the_same_bits"): lambda v: (
        v["hidden_size"] > 512
    ),
    ("moe_prefill", "test_a_replayed_graph_serves_another_routing"): always,
    ("moe_prefill", "test_all_rows_may_go_to_the_same_experts_and_reach_the_clamp"): always,
    ("moe_prefill", "test_rows_need_not_lie_one_after_another"): always,
    ("prefill", "test_a_graph_follows_lengths_and_ids_and_repeats_bit_for_bit"): always,
    ("prefill", "test_a_nan_stays_with_its_request"): always,
    ("prefill", "test_output_is_the_references_in_every_format"): lambda v: (
        v["name"] == "early and late rows"
    ),
    ("prefill", "test_pages_beyond_two_gigabytes_are_found"): always,
    ("prefill", "test_queries_between_others_in_memory"): always,
    ("select", "test_long_and_ragged_batches_select_what_the_reference_selects"): _many_requests,
    ("select", "test_wider_keys_select_what_the_reference_selects"): _many_requests,
    ("select", "test_a_captured_call_follows_lengths_that_change_on_the_device"): always,
    ("select", "test_hundreds_of_requests_that_share_pages_select_each_for_itself"): always,
    ("select", "test_ties_among_thousands_of_blocks_go_to_the_lowest_ids"): always,
    ("select_prefill", "test_ragged_batches_select_what_the_general_kernels_do"): lambda v: (
        sum(one.num_rows for one in v["tokens"]) > 1000
    ),
    ("sparse", "test_a_graph_follows_lengths_and_ids_and_repeats_bit_for_bit"): always,
    ("sparse", "test_a_nan_stays_with_its_request"): always,
    ("sparse", "test_global_scales_of_k_and_v_count"): always,
    ("sparse", "test_output_is_the_references_within_bf16_whatever_the_shares"): lambda v: (
        v["name"] in ("few blocks", "more than one round")
    ),
    ("sparse", "test_a_row_has_the_same_bits_in_the_kernel_for_few_pairs_and_for_many"): always,
    ("sparse", "test_pages_beyond_two_gigabytes_are_found"): always,
    ("sparse", "test_values_across_the_range_of_the_format_are_exact"): always,
}
"""The same of racecheck, which looks at each access to shared memory on the host, some
microseconds each, and does not look at values and addresses elsewhere."""
MANY_PAIRS = "many short rows"
"""Of sparse decode's tests: what has a kernel of its own, without clusters."""
SLOW = ("moe", "moe_prefill", "moe_route", "prefill", "select", "sparse")
"""Files whose tests take several times as long as the others'."""


def name_of(path: Path) -> str:
    """`sparse` of tests/ops/test_sparse_hopper.py."""
    return path.name[5:-10]


def needs_gpu(item: pytest.Function) -> bool:
    """By the reason for which it is skipped elsewhere; other tests launch nothing."""
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
    return any("H100" in reason or "Hopper" in reason for reason in reasons)


def left_out(item: pytest.Function, tool: str) -> bool:
    key = (name_of(item.path), item.originalname)
    values = item.callspec.params if hasattr(item, "callspec") else {}
    tables = (TOO_LARGE, TOO_MUCH_SHARED_MEMORY)[: 2 if tool == "racecheck" else 1]
    return any(key in table and table[key](values) for table in tables)


def turned(items: list[pytest.Function], share: float) -> list[pytest.Function]:
    """`items`, from after this share of their time: a kernel is prepared for a tool anew in each
    process, so processes begin with different files and take what others have left at the end."""
    weights = [4 if name_of(item.path) in SLOW else 1 for item in items]
    passed = list(accumulate(weights, initial=0))[:-1]
    first = sum(before < share * sum(weights) for before in passed)
    return items[first:] + items[:first]


def few_splits(item: pytest.Function) -> tuple[int, ...]:
    """CTAs that share a row and KV head of sparse decode, under racecheck: its time grows with the
    clusters, in which CTAs wait for each other, and only whether there is one is another path."""
    return (1,) if MANY_PAIRS in item.name else (1, 4)


class Shared:
    """A pytest plugin: runs the tests that no other process has taken."""

    def __init__(self, tool: str, share: float, folder: Path, seconds: float) -> None:
        self.tool = tool
        self.share = share
        self.folder = folder
        self.end = time.monotonic() + seconds
        self.outcomes: set[str] = set()
        """Of the parts of the test that runs; one that is skipped has not passed."""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Function]
    ) -> None:
        tests = {(name_of(item.path), item.originalname) for item in items}
        for file, test in (*TOO_LARGE, *TOO_MUCH_SHARED_MEMORY):
            if any(file == name for name, _ in tests) and (file, test) not in tests:
                raise pytest.UsageError(f"there is no {test} in {file}: nothing to leave out")
        on_gpu = [item for item in items if needs_gpu(item)]
        wanted = [item for item in on_gpu if not left_out(item, self.tool)]
        for item in on_gpu:
            say("wanted" if item in set(wanted) else "left out", item)
        items[:] = turned(wanted, self.share)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            if time.monotonic() > self.end:
                break
            assert isinstance(item, pytest.Function)
            if self._take(item):
                say("begins", item)
                self.outcomes.clear()
                if self.tool == "racecheck":
                    sparse_decode.SPLITS = few_splits(item)
                begun, cpu = time.monotonic(), time.process_time()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                spent = f"{time.monotonic() - begun:.1f} {time.process_time() - cpu:.1f}"
                if self.outcomes == {"passed"}:
                    say(f"passed {spent}", item)
                    continue
                say(f"FAILED {spent}", item)
                if not answers():
                    break
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)

    def _take(self, item: pytest.Item) -> bool:
        name = hashlib.blake2b(item.nodeid.encode(), digest_size=8).hexdigest()
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def answers() -> bool:
    """Whether this process may still use the device: after some errors no call succeeds, and tests
    that another process could run would fail."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"\n{MARK} ends: {error}", flush=True)
        return False
    return True


def say(what: str, item: pytest.Function) -> None:
    print(f"\n{MARK} {what} {name_of(item.path)}::{item.name}", flush=True)


if __name__ == "__main__":
    tool, share, folder, seconds, *files = sys.argv[1:]
    shared = Shared(tool, float(share), Path(folder), float(seconds))
    options = ["-q", "-s", "--tb=short", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, *files], plugins=[shared]))
