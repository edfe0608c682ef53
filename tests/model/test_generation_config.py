"""generation_config.json: end tokens beside those of config.json, and how to sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from winnow import LLM, SamplingParams
from winnow.errors import CheckpointError
from winnow.model.checkpoint import read_generation_config, read_spec


def written(tiny: Path, directory: Path, given: dict[str, Any] | str) -> Path:
    """The tiny checkpoint with this generation_config.json."""
    copy = directory / "model"
    shutil.copytree(tiny, copy)
    text = given if isinstance(given, str) else json.dumps(given)
    (copy / "generation_config.json").write_text(text)
    return copy


def test_a_checkpoint_without_the_file_has_no_wishes(tiny: Path, tmp_path: Path) -> None:
    found = read_generation_config(tmp_path)
    assert (found.sampling, found.eos_ids) == ({}, ())


@pytest.mark.parametrize(("eos", "more"), [(7, (7,)), ([7, 9, 7], (7, 9)), (None, ())])
def test_its_end_tokens_count_beside_those_of_config_json(
    tiny: Path, tmp_path: Path, eos: Any, more: tuple[int, ...]
) -> None:
    own = json.loads((tiny / "config.json").read_text())["text_config"]["eos_token_id"]
    assert own not in (7, 9)
    assert read_spec(written(tiny, tmp_path, {"eos_token_id": eos})).eos_ids == (own, *more)


def test_an_answer_ends_at_an_end_token_that_only_this_file_names(
    tiny: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    plain = LLM(str(written(tiny, tmp_path / "a", {})), num_pages=9, progress=False)
    (answer,) = plain.generate("Hello", params)
    third = answer.token_ids[2]
    ends = written(tiny, tmp_path / "b", {"eos_token_id": [third]})
    (cut,) = LLM(str(ends), num_pages=9, progress=False).generate("Hello", params)
    place = answer.token_ids.index(third)
    assert cut.finish_reason == "stop"
    assert cut.token_ids[:place] == answer.token_ids[:place]
    assert len(cut.token_ids) <= place + 1


def test_calls_without_params_are_sampled_as_it_says_and_others_as_they_say(
    tiny: Path, tmp_path: Path
) -> None:
    wishes = {"temperature": 0.0, "top_k": -1, "top_p": 0.9, "min_p": None, "max_length": 20}
    llm = LLM(str(written(tiny, tmp_path, wishes)), num_pages=9, progress=False)
    assert llm.default_params == SamplingParams(temperature=0.0, top_k=0, top_p=0.9)
    greedy = llm.generate("Hello", SamplingParams(temperature=0.0))
    assert llm.generate("Hello") == llm.generate("Hello") == greedy
    drawn = [llm.generate("Hello", SamplingParams(seed=seed))[0] for seed in range(3)]
    assert len({answer.token_ids for answer in drawn}) > 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "is not JSON"),
        ({"eos_token_id": "<end>"}, r"eos_token_id is '<end>': it must be an id, or a list of ids"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\]"),
        ({"temperature": -0.5}, r"temperature is -0.5; it takes a finite number of at least 0"),
        ({"top_p": "most"}, r"top_p is 'most'"),
    ],
)
def test_what_it_cannot_mean_is_told_with_the_name_of_the_file(
    tiny: Path, tmp_path: Path, given: Any, said: str
) -> None:
    model = written(tiny, tmp_path, given)
    with pytest.raises(CheckpointError, match=rf"model/generation_config.json:? {said}"):
        LLM(str(model), num_pages=9, progress=False)
