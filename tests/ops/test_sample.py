import math
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from winnow.ops.case import judge
from winnow.ops.sample import Logprobs, SampleRow, cpu, reference, uniform
from winnow.ops.sample.cases import CASES

NAN, INF = float("nan"), float("inf")
VERSIONS = pytest.mark.parametrize("sample", [reference.sample, cpu.sample])


def row(**options):
    return SampleRow(**{"seed": 7, "index": 0, **options})


def chosen(sample, logits, request, draws=1):
    """How often each id comes, over consecutive indices."""
    logits = torch.tensor([logits] * draws, dtype=torch.float32)
    return Counter(sample(logits, [replace(request, index=i) for i in range(draws)]).ids.tolist())


def oracle(logits, request):
    """The contract in plain Python: one id, or -1 for a bad row."""
    values = [np.float32(v) for v in logits]

    def is_bad():
        return any(math.isnan(v) or v == INF for v in values) or max(values) == -INF

    if is_bad():
        return -1
    for i, bias in request.logit_bias.items():
        values[i] += np.float32(bias)
    for i in request.banned:
        values[i] = np.float32(-INF)
    if request.allowed is not None:
        for i in range(len(values)):
            if not request.allowed[i // 32].item() >> i % 32 & 1:
                values[i] = np.float32(-INF)
    for i in {*request.prompt_ids, *request.output_ids}:
        penalty = np.float32(request.repetition_penalty)
        values[i] = values[i] / penalty if values[i] > 0 else values[i] * penalty
    for i, times in Counter(request.output_ids).items():
        values[i] -= np.float32(request.frequency_penalty) * np.float32(times) + np.float32(
            request.presence_penalty
        )
    if is_bad():
        return -1
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if request.temperature == 0:
        return ranked[0]
    largest = float(values[ranked[0]])
    weight = [math.exp((float(v) - largest) / request.temperature) for v in values]
    if request.top_k:
        ranked = ranked[: request.top_k]
    enough = request.top_p * sum(weight[i] for i in sorted(ranked))
    mass, nucleus = 0.0, []
    for i in ranked:
        if nucleus and request.top_p < 1 and mass >= enough:
            break
        nucleus.append(i)
        mass += weight[i]
    kept = sorted(i for i in nucleus if weight[i] >= request.min_p)
    target = uniform(request.seed, request.index) * sum(weight[i] for i in kept)
    running = 0.0
    for i in kept:
        running += weight[i]
        if running > target:
            return i
    raise AssertionError("the uniform lies below 1")


@st.composite
def problems(draw, *, hostile=True):
    """Logits with many ties, now and then bad, and a request with any stages on."""
    values = [-INF, -2.5, -1.0, -0.0, 0.0, 0.5, 3.0] + [NAN, INF] * hostile
    ordinary = st.floats(-20, 20, width=32)
    value = st.sampled_from(values[:7]) | ordinary if draw(st.booleans()) else ordinary
    logits = draw(st.lists(value, min_size=1, max_size=40))
    if hostile and draw(st.integers(0, 9)) == 0:
        logits[draw(st.integers(0, len(logits) - 1))] = draw(st.sampled_from([NAN, INF]))
    ids = st.integers(0, len(logits) - 1)
    off = {
        "temperature": st.sampled_from([0.0, 5e-324, 0.3, 1.0, 7.0]),
        "top_k": st.integers(0, 45),
        "top_p": st.sampled_from([0.0, 0.37, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.07, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.7]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 0.25]),
        "frequency_penalty": st.sampled_from([0.0, -0.5, 1.25]),
        "logit_bias": st.dictionaries(ids, st.floats(-9, 9, width=32), max_size=4),
        "banned": st.lists(ids, max_size=4),
        "allowed": st.lists(
            st.integers(-(2**31), 2**31 - 1),
            min_size=-(-len(logits) // 32),
            max_size=-(-len(logits) // 32),
        ).map(lambda words: torch.tensor(words, dtype=torch.int32)),
        "logprobs": st.none() | st.integers(0, 45),
    }
    options = {name: draw(strategy) for name, strategy in off.items() if draw(st.booleans())}
    return logits, SampleRow(
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        index=draw(st.integers(0, 10**6)),
        prompt_ids=draw(st.lists(ids, max_size=5)),
        output_ids=draw(st.lists(ids, max_size=5)),
        **options,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_version_agrees_with_the_reference(case):
    failed = [v for v in judge(case, cpu.sample, reference.sample) if not v.passed]
    assert not failed


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_cpu_version_chooses_the_references_ids_for_any_row(problem):
    logits, request = problem
    logits = torch.tensor([logits])
    got, want = cpu.sample(logits, [request]), reference.sample(logits, [request])
    assert got.ids.tolist() == want.ids.tolist()
    assert got.bad.tolist() == want.bad.tolist()
    [a], [b] = got.logprobs, want.logprobs
    assert (a is None) == (b is None)
    if a is not None and b is not None:
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        ours, theirs = [a.chosen, *dict(a.top).values()], [b.chosen, *dict(b.top).values()]
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12)


# Derandomised: the oracle's exp may differ in the last bit, which could in principle move a draw.
@settings(max_examples=400, deadline=None, derandomize=True)
@given(problems())
def test_the_reference_is_its_contract_step_by_step(problem):
    logits, request = problem
    with np.errstate(all="ignore"):
        want = oracle(logits, request)
    assert reference.sample(torch.tensor([logits]), [request]).ids.tolist() == [want]


def widened(logits, request, width):
    """The same problem over more ids, none of which can be chosen."""
    if request.allowed is not None:
        words = torch.zeros(-(-width // 32), dtype=torch.int32)
        words[: len(request.allowed)] = request.allowed
        request = replace(request, allowed=words)
    return logits + [-INF] * (width - len(logits)), request


@settings(max_examples=60, deadline=None)
@given(st.lists(problems(), min_size=1, max_size=6), st.randoms())
@example(
    [([0.0], row(allowed=torch.tensor([1], dtype=torch.int32))), ([0.0] * 33, row())], Random(0)
)
def test_a_request_gets_the_same_token_alone_and_in_any_batch(problem_list, random):
    width = max(len(logits) for logits, _ in problem_list)
    rows = [widened(logits, request, width) for logits, request in problem_list]
    alone = [cpu.sample(torch.tensor([x]), [r]).ids.item() for x, r in rows]
    order = random.sample(range(len(rows)), len(rows))
    together = cpu.sample(torch.tensor([rows[i][0] for i in order]), [rows[i][1] for i in order])
    assert together.ids.tolist() == [alone[i] for i in order]


@VERSIONS
def test_draws_follow_the_probabilities(sample):
    probabilities = [0.5, 0.25, 0.15, 0.1]
    counts = chosen(sample, [math.log(p) for p in probabilities], row(), draws=4000)
    chi_squared = sum((counts[i] - 4000 * p) ** 2 / (4000 * p) for i, p in enumerate(probabilities))
    assert chi_squared < 11.3  # 3 degrees of freedom, 1 in 100


@VERSIONS
def test_temperature_sharpens_and_flattens(sample):
    cold = chosen(sample, [1.0, 0.0], row(temperature=0.25), draws=2000)[0] / 2000
    hot = chosen(sample, [1.0, 0.0], row(temperature=4.0), draws=2000)[0] / 2000
    assert cold == pytest.approx(1 / (1 + math.exp(-4)), abs=0.02)
    assert hot == pytest.approx(1 / (1 + math.exp(-0.25)), abs=0.03)


@VERSIONS
def test_ties_go_to_the_lower_id_at_every_cut(sample):
    equal = [1.0, 2.0, 2.0, 2.0, 2.0, -0.0, 0.0]
    assert set(chosen(sample, equal, row(temperature=0.0))) == {1}
    assert set(chosen(sample, equal, row(top_k=3), draws=200)) == {1, 2, 3}
    assert set(chosen(sample, [0.0] * 8, row(top_p=0.5), draws=200)) == {0, 1, 2, 3}
    assert set(chosen(sample, [0.0] * 8, row(top_p=0.51), draws=200)) == {0, 1, 2, 3, 4}
    assert set(chosen(sample, [-0.0, 0.0], row(top_k=1), draws=9)) == {0}
    assert set(chosen(sample, [0.0, -0.0], row(temperature=0.0))) == {0}


@VERSIONS
def test_top_p_counts_the_share_of_what_top_k_kept(sample):
    # Of four equal tokens top_k keeps two, and half of those is one.
    assert set(chosen(sample, [0.0] * 4, row(top_k=2, top_p=0.5), draws=100)) == {0}


@VERSIONS
def test_min_p_is_relative_to_the_most_likely_token(sample):
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(chosen(sample, logits, row(min_p=0.45), draws=300)) == {0, 1, 2}
    assert set(chosen(sample, logits, row(min_p=1.0), draws=30)) == {0}


@VERSIONS
def test_filters_that_would_keep_nothing_keep_the_most_likely_token(sample):
    assert set(chosen(sample, [0.0, 3.0, 1.0], row(top_p=0.0), draws=50)) == {1}
    assert set(chosen(sample, [0.0, 3.0, 1.0], row(temperature=5e-324), draws=50)) == {1}


@VERSIONS
def test_a_bad_row_is_flagged_and_leaves_the_others_alone(sample):
    good = [0.0, 5.0, 1.0]
    rows = [good, [0.0, NAN, 1.0], good, [INF, 0.0, 0.0], [-INF] * 3, [-INF, NAN, INF], good]
    for request in (row(temperature=0.0, logprobs=1), row(top_k=1, logprobs=1)):
        sampled = sample(torch.tensor(rows), [request] * len(rows))
        assert sampled.ids.tolist() == [1, -1, 1, -1, -1, -1, 1]
        assert sampled.bad.tolist() == [False, True, False, True, True, True, False]
        assert [entry is None for entry in sampled.logprobs] == sampled.bad.tolist()


@VERSIONS
def test_a_row_whose_every_possible_token_is_banned_is_bad(sample):
    logits = torch.tensor([[1.0, -INF, 2.0]] * 2)
    sampled = sample(logits, [row(banned=(0, 2)), row(temperature=0.0, banned=(2,))])
    assert sampled.ids.tolist() == [-1, 0]


@VERSIONS
def test_a_token_that_is_not_allowed_is_never_chosen_however_likely(sample):
    mask = torch.tensor([0b01010, -1], dtype=torch.int32)
    logits = [9.0, 0.0, 99.0, 0.5, 9.0, *[9.0] * 27, -5.0]
    assert set(chosen(sample, logits, row(allowed=mask, top_k=1), draws=20)) == {3}
    assert set(chosen(sample, logits, row(allowed=mask), draws=300)) == {1, 3, 32}
    assert set(chosen(sample, logits, row(allowed=mask, temperature=0.0))) == {3}
    assert set(chosen(sample, logits, row(allowed=mask, logit_bias={0: 99.0}), draws=20)) <= {1, 3}


@VERSIONS
def test_a_row_whose_every_possible_token_is_outside_the_mask_is_bad(sample):
    mask = torch.tensor([0b10], dtype=torch.int32)
    sampled = sample(torch.tensor([[1.0, -INF], [1.0, 0.0]]), [row(allowed=mask, logprobs=0)] * 2)
    assert sampled.ids.tolist() == [-1, 1]
    assert sampled.bad.tolist() == [True, False]


@VERSIONS
def test_a_mask_of_another_vocabulary_is_refused(sample):
    for words in (1, 3):
        with pytest.raises(ValueError, match="33 ids"):
            sample(torch.zeros(1, 33), [row(allowed=torch.zeros(words, dtype=torch.int32))])


@VERSIONS
def test_a_masked_token_is_never_drawn(sample):
    counts = chosen(sample, [-INF, 0.0, -INF, 0.0, -INF], row(), draws=300)
    assert set(counts) == {1, 3}


@VERSIONS
def test_a_uniform_on_an_edge_takes_the_next_possible_token(sample, monkeypatch):
    for value, token in ((0.0, 1), (0.5, 3), (1 - 2.0**-53, 3)):
        monkeypatch.setattr(reference, "uniform", lambda *_, value=value: value)
        assert set(chosen(sample, [-INF, 0.0, -INF, 0.0, -INF], row())) == {token}


@VERSIONS
def test_the_logits_are_left_as_they_are(sample):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sample(logits, [row(logit_bias={3: 9.0}, banned=(1,), top_k=5), row(temperature=0.0)])
    assert torch.equal(logits, before)


@VERSIONS
def test_logprobs_are_those_of_the_model_whatever_shapes_the_choice(sample):
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0]])
    want = logits[0].double().log_softmax(0).tolist()
    request = row(temperature=0.0, banned=(1, 2), logit_bias={3: 50.0}, logprobs=3)
    sampled = sample(logits, [request])
    assert sampled.ids.tolist() == [3]
    assert sampled.logprobs[0].chosen == pytest.approx(want[3])
    assert [i for i, _ in sampled.logprobs[0].top] == [1, 2, 0]
    assert dict(sampled.logprobs[0].top) == pytest.approx({i: want[i] for i in (1, 2, 0)})


@VERSIONS
def test_zero_logprobs_report_the_chosen_token_alone(sample):
    one = sample(torch.tensor([[0.0, 0.0]]), [row(temperature=0.0, logprobs=0)])
    assert one.logprobs == (Logprobs(pytest.approx(-math.log(2)), ()),)
    assert sample(torch.tensor([[0.0, 0.0]]), [row()]).logprobs == (None,)


@VERSIONS
def test_rows_and_requests_must_be_as_many(sample):
    for count in (1, 3):
        with pytest.raises(ValueError):
            sample(torch.zeros(2, 4), [row()] * count)


def test_repetition_penalises_each_seen_id_once_and_by_its_sign():
    request = row(repetition_penalty=2.0, prompt_ids=(0, 0, 1), output_ids=(1, 2))
    got = reference.edited(torch.tensor([0.5, -4.0, 0.0, 4.0]), request)
    assert got.tolist() == [0.25, -8.0, 0.0, 4.0]


def test_presence_counts_an_output_id_once_and_frequency_every_time():
    request = row(
        presence_penalty=0.5, frequency_penalty=0.25, prompt_ids=(3,), output_ids=(0, 2, 2, 2)
    )
    assert reference.edited(torch.zeros(4), request).tolist() == [-0.75, 0.0, -1.25, 0.0]


def test_bias_comes_before_the_ban_and_both_before_the_penalties():
    request = row(
        logit_bias={0: 3.0, 1: 100.0}, banned=(1,), repetition_penalty=2.0, output_ids=(0, 1)
    )
    assert reference.edited(torch.tensor([1.0, 1.0]), request).tolist() == [2.0, -INF]


def test_plain_greedy_rows_are_decided_together(monkeypatch):
    monkeypatch.setattr(cpu, "_choose", lambda *_: pytest.fail("a row was looked at alone"))
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    sampled = cpu.sample(logits, [row(temperature=0.0, top_k=3, top_p=0.5)] * 5)
    assert torch.equal(sampled.ids, logits.argmax(1))


def test_the_uniform_of_a_seed_and_index_never_changes():
    # A release that changes these changes what every seeded request answers.
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(-1, 1) == 0.4076662817373935
    assert uniform(2**63 - 1, 2**40) == 0.7939291875438194


def test_uniforms_are_spread_evenly_and_differ_by_seed_and_by_index():
    values = [uniform(seed, index) for seed in range(-20, 20) for index in range(50)]
    assert len(set(values)) == 2000
    assert all(0 <= value < 1 for value in values)
    tenths = Counter(int(10 * value) for value in values)
    assert all(150 < tenths[i] < 250 for i in range(10))
