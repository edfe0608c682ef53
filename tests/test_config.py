import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from winnow.config import MAX_LOGPROBS, MAX_STOPS, Constraint, EngineConfig, SamplingParams
from winnow.errors import RequestError, UnsupportedError

NAN, INF = float("nan"), float("inf")

WRONG_SAMPLING = [
    ("max_tokens", 0, "of at least 1"),
    ("max_tokens", 2.0, "a whole number"),
    ("max_tokens", True, "a whole number"),
    ("max_tokens", "5", "a whole number"),
    ("max_tokens", None, "a whole number"),
    ("temperature", -0.5, "of at least 0"),
    ("temperature", NAN, "a finite number"),
    ("temperature", INF, "a finite number"),
    ("temperature", 10**400, "a finite number"),
    ("temperature", None, "a finite number"),
    ("top_k", -1, "0 is all"),
    ("top_p", 1.5, "0.0 to 1.0"),
    ("top_p", NAN, "0.0 to 1.0"),
    ("min_p", -0.1, "0.0 to 1.0"),
    ("repetition_penalty", 0.0, "0.01 to 100.0"),
    ("repetition_penalty", INF, "0.01 to 100.0"),
    ("presence_penalty", 2.5, "-2.0 to 2.0"),
    ("frequency_penalty", -NAN, "-2.0 to 2.0"),
    ("seed", 2**63, "9223372036854775807 or None"),
    ("seed", 1.0, "a whole number"),
    ("logprobs", -1, f"0 to {MAX_LOGPROBS} or None"),
    ("logprobs", MAX_LOGPROBS + 1, f"0 to {MAX_LOGPROBS} or None"),
    ("min_tokens", -1, "of at least 0"),
    ("ignore_eos", 1, "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("constraint", "json_object", "a Constraint or None"),
    ("stop_ids", (3, -1), "-1; it takes a whole number 0 to"),
    ("stop_ids", "12", "a list of token ids"),
    ("stop_ids", 12, "a list of token ids"),
    ("logit_bias", {-1: 1.0}, "-1; it takes a whole number 0 to"),
    ("logit_bias", {"7": 1.0}, "'7'; it takes a whole number"),
    ("logit_bias", {7: 101.0}, "-100.0 to 100.0"),
    ("logit_bias", {7: NAN}, "logit_bias of token 7 is nan"),
    ("logit_bias", [7], "a map from token id to number"),
    ("stop", ("end", 3), "a list of strings"),
    ("stop", 3, "a list of strings"),
    ("stop", ("",), "empty string"),
    ("stop", ("a\ud83d",), r"'\\ud83d', which is part of a character"),
    ("stop", ("a\ufffd",), "'\ufffd', which is part of a character"),
    ("stop", ("x",) * (MAX_STOPS + 1), f"it takes up to {MAX_STOPS}"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG_SAMPLING)
def test_a_wrong_sampling_value_is_refused_by_name_with_what_it_may_be(name, value, says):
    with pytest.raises(RequestError, match=says.replace("(", r"\(")) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)


def test_the_edges_of_every_range_are_allowed():
    low = SamplingParams(
        max_tokens=1, temperature=0, top_k=0, top_p=0, min_p=0, repetition_penalty=0.01,
        presence_penalty=-2, frequency_penalty=-2, seed=-(2**63), logprobs=0, min_tokens=0,
        logit_bias={0: -100}, stop_ids=(0,),
    )  # fmt: skip
    high = SamplingParams(
        max_tokens=2**40, temperature=sys.float_info.max, top_k=10**9, top_p=1, min_p=1,
        repetition_penalty=100, presence_penalty=2, frequency_penalty=2, seed=2**63 - 1,
        logprobs=MAX_LOGPROBS, min_tokens=2**40, logit_bias={2**31 - 1: 100},
        stop=("x",) * MAX_STOPS,
    )  # fmt: skip
    assert low.seed == -(2**63)
    assert high.logit_bias == {2**31 - 1: 100.0}


def test_numbers_that_are_not_whole_come_out_as_floats():
    params = SamplingParams(temperature=0, top_p=1, logit_bias={5: 2})
    assert [type(v) for v in (params.temperature, params.top_p, params.logit_bias[5])] == [
        float
    ] * 3


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers():
    with pytest.raises(
        RequestError, match="min_tokens is 9, max_tokens is 4: raise max_tokens to 9"
    ):
        SamplingParams(max_tokens=4, min_tokens=9)
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4


def test_what_the_caller_changes_later_does_not_reach_the_params():
    stop, stop_ids, bias = ["end"], [4], {1: 2.0}
    params = SamplingParams(stop=stop, stop_ids=stop_ids, logit_bias=bias)
    stop.append("more")
    stop_ids.append(5)
    bias[6] = 1.0
    assert (params.stop, params.stop_ids, params.logit_bias) == (("end",), (4,), {1: 2.0})
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3


def test_one_stop_string_is_not_taken_for_its_characters():
    assert SamplingParams(stop="end").stop == ("end",)


def test_an_unknown_sampling_option_is_refused_with_the_word_that_was_meant():
    with pytest.raises(RequestError, match="no option 'temprature': did you mean temperature"):
        SamplingParams.from_options({"temprature": 1.0})
    with pytest.raises(RequestError, match="no option 'zzz': known: max_tokens, temperature"):
        SamplingParams.from_options({"zzz": 1})
    assert SamplingParams.from_options({"top_k": 3}) == SamplingParams(top_k=3)


@pytest.mark.parametrize("options", [{"logit_bias": {10: 1.0}}, {"stop_ids": (3, 10)}])
def test_an_id_outside_the_vocabulary_is_refused_with_the_vocabulary_size(options):
    params = SamplingParams(**options)
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match=r"names token 10, the vocabulary has 10: use ids .* 9"):
        params.check_vocabulary(10)


def test_params_travel_between_processes_and_stay_equal():
    params = SamplingParams(logit_bias={3: 1.5}, stop=("a",), seed=4)
    for twin in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), replace(params)):
        assert twin == params
        assert hash(twin) == hash(params)
    assert replace(params, logit_bias={}) != params


WRONG_ENGINE = [
    ("kv_format", "fp4", "use one of model, fp8, nvfp4"),
    ("kv_format", None, "use one of model, fp8, nvfp4"),
    ("index_format", ["fp8"], "use one of model, fp8, nvfp4"),
    ("max_step_tokens", 0, "of at least 1 or None"),
    ("max_running", -4, "of at least 1"),
    ("num_pages", 0, "of at least 1 or None"),
    ("num_pages", 12.0, "a whole number"),
    ("cache_bytes", -1, "of at least 1 or None"),
    ("max_model_len", 0, "of at least 1 or None"),
    ("prefix_caching", "no", "True or False"),
    ("device", "mps", "use cpu, cuda, or cuda:N"),
    ("device", "cuda:", "use cpu, cuda, or cuda:N"),
    ("device", None, "use cpu, cuda, or cuda:N"),
    ("dtype", "float16", "use one of float32, bfloat16"),
    ("backend", 3, "give a name or leave it out"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG_ENGINE)
def test_a_wrong_engine_value_is_refused_by_name_with_what_it_may_be(name, value, says):
    with pytest.raises(UnsupportedError, match=says) as error:
        EngineConfig(**{name: value})
    assert str(error.value).startswith(f"{name} is {value!r}")


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 512),
        ({"device": "cuda"}, 2048),
        ({"device": "cuda:1"}, 2048),
        ({"max_step_tokens": 64}, 64),
        ({"max_step_tokens": 64, "device": "cuda"}, 64),
    ],
)
def test_a_step_has_as_many_tokens_as_asked_for_or_as_suit_the_device(options, tokens):
    assert EngineConfig(**options).step_tokens == tokens


def test_the_cache_is_sized_in_one_way_only():
    with pytest.raises(UnsupportedError, match=r"num_pages is 8 and cache_bytes is 9: .* only one"):
        EngineConfig(num_pages=8, cache_bytes=9)


def test_every_engine_choice_that_is_named_is_allowed():
    for device in ("cpu", "cuda", "cuda:11"):
        assert EngineConfig(device=device).device == device
    for cache in ("model", "fp8", "nvfp4"):
        config = EngineConfig(kv_format=cache, index_format=cache, dtype="bfloat16", num_pages=1)
        assert config.kv_format == config.index_format == cache


def test_an_unknown_engine_option_is_refused():
    with pytest.raises(UnsupportedError, match="no option 'num_page': did you mean num_pages"):
        EngineConfig.from_options({"num_page": 4})
    assert EngineConfig.from_options({"num_pages": 4}).num_pages == 4


def test_config_loads_no_torch():
    code = "import sys, winnow.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", "{}", "use one of json_object, json_schema, regex, structural_tag"),
        ("json_schema", "", "the others need one"),
        ("json_object", "{}", "json_object has none"),
        ("regex", b"a", "give a string"),
    ],
)
def test_a_constraint_that_is_none_is_refused(kind, text, says):
    with pytest.raises(RequestError, match=says):
        Constraint(kind, text)


@pytest.mark.parametrize("options", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_a_constraint_alone_decides_where_the_answer_ends(options):
    with pytest.raises(RequestError, match="give only one"):
        SamplingParams(constraint=Constraint("json_object"), **options)


def test_sampling_with_a_constraint_travels_between_processes():
    params = SamplingParams(constraint=Constraint("regex", "a+"), logit_bias={3: 1.0})
    assert pickle.loads(pickle.dumps(params)) == params
