"""``generation_kwargs``: what an engine knows it honours, and everything else is an error that names the engine."""

import numpy as np
import pytest

from rlox_grpo import GRPO, GRPOConfig
from rlox_grpo.config.generation_kwargs import list_honoured
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.rollout.engines.hf.engine import HFEngine
from rlox_grpo.rollout.engines.vllm.requests import EXTRA, make_request_fields
from rlox_grpo.rollout.sampler import make_sampling
from rlox_grpo.types import Prompt, Sampling
from toy import PROMPTS, ToyLM, options

PENALTY = {"repetition_penalty": 1.2}
SERVER = {"engine": "vllm_server", "server_urls": ["http://127.0.0.1:8000"]}


def completions_of(**changes):
    """Every completion of one step: its tokens and log-probs."""
    seen = []

    def record(completion_ids):
        return [float(index) for index, _ in enumerate(completion_ids)]

    trainer = GRPO(ToyLM(), record, **options(**{"max_steps": 1, "learning_rate": 1e-9, **changes}))
    take = trainer.train_step

    def train_step(*given):
        metrics = take(*given)
        scored, _ = trainer.last_rollout
        seen.extend(completion for group in scored for completion in group.group.completions)
        return metrics

    trainer.train_step = train_step
    trainer.train(PROMPTS)
    return [(completion.token_ids.tolist(), completion.log_probs.tolist()) for completion in seen]


@pytest.mark.parametrize("given", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 3, "min_p": 0.2}])
def test_filters_are_the_options_of_the_same_names(given):
    assert completions_of(generation_kwargs=given) == completions_of(**given) != completions_of()


def test_log_probs_are_those_of_the_distribution_sampled_from():
    for token_ids, log_probs in completions_of(generation_kwargs={"top_k": 1}):
        assert len(token_ids) == 6
        assert log_probs == [0.0] * 6


def test_stop_token_ids_end_a_completion():
    stopped = completions_of(generation_kwargs={"stop_token_ids": [3, 7]})
    assert any(len(token_ids) < 6 for token_ids, _ in stopped)
    for token_ids, _ in stopped:
        assert not {3, 7}.intersection(token_ids[:-1])
        assert len(token_ids) == 6 or token_ids[-1] in (3, 7)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (
            PENALTY,
            {},
            r"'repetition_penalty', which engine='hf' does not honour: it knows top_p, top_k, min_p",
        ),
        (
            {"best_of": 2},
            {"engine": "vllm"},
            r"has 'best_of', which engine='vllm' does not honour: .*presence",
        ),
        ({"bad_words": ["a"]}, SERVER, "has 'bad_words', which engine='vllm_server' does not honour"),
        ({"logit_bias": 1}, SERVER, "has 'logit_bias', which engine='vllm_server' does not honour"),
        ({"temperature": 0.5}, {}, "generation_kwargs has 'temperature': set temperature, which the update reads too"),
        ({"max_tokens": 5}, {}, "generation_kwargs has 'max_tokens': set max_new_tokens"),
        ({"n": 5}, {}, "generation_kwargs has 'n': set group_size"),
        ({"top_p": 0.5}, {"top_p": 0.9}, "top_p is set twice, as an option and in generation_kwargs"),
        ({"top_p": "x"}, {}, r"generation_kwargs\['top_p'\] is 'x': expected a number"),
        ({"top_k": 1.5}, {}, r"generation_kwargs\['top_k'\] is 1.5: expected a whole number of at least 0"),
        ({"top_k": True}, {}, r"generation_kwargs\['top_k'\] is True: expected a whole number"),
        ({"stop_token_ids": []}, {}, r"generation_kwargs\['stop_token_ids'\] is \[\]: expected a list of token ids"),
        ({"stop": 3}, {}, r"generation_kwargs\['stop'\] is 3: expected a text or a list of texts"),
    ],
)
def test_refused(given, changes, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(generation_kwargs=given, **changes)


def test_an_engine_without_parameters_of_its_own_honours_those_of_sampling():
    assert list_honoured("another") == list_honoured("hf")
    assert set(list_honoured("another")) == {"top_p", "top_k", "min_p", "stop", "stop_token_ids"}


def test_a_value_out_of_range_is_refused_before_sampling():
    with pytest.raises(ValueError, match=r"top_p is 3, expected above 0"):
        completions_of(generation_kwargs={"top_p": 3})


@pytest.mark.parametrize("changes", [{"engine": "vllm"}, SERVER])
def test_vllm_gets_every_parameter_by_its_name(changes):
    given = {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_tokens": 3,
        "allowed_token_ids": [1, 2], "stop_token_ids": [9], "min_p": 0.1, "stop": "end",
    }  # fmt: skip
    config = GRPOConfig.create(generation_kwargs=given, **changes)
    fields = make_request_fields(make_sampling(config.split().sampling), 4, 0, (5,))
    for name, value in {**given, "stop_token_ids": [5, 9], "stop": ["end"]}.items():
        assert fields[name] == value, name
    assert set(list_honoured(config.engine)) == {"top_p", "top_k", "min_p", "stop", "stop_token_ids", *EXTRA}


def test_an_engine_called_directly_refuses_what_it_does_not_know():
    engine = HFEngine(ToyLM())
    prompt = Prompt(np.array([1, 2]), 0)
    with pytest.raises(ValueError, match=r"repetition_penalty is 1.2, and this engine does not honour it"):
        engine.generate([prompt], 2, Sampling(4, extra=(("repetition_penalty", 1.2),)), 0)


def test_a_resumed_run_keeps_them(tmp_path):
    GRPO(ToyLM(), len_of, **options(output_dir=tmp_path, max_steps=1)).train(PROMPTS)
    with pytest.raises(CheckpointError, match=r"generation_kwargs: \{\} there, \{'top_k': 2\} here"):
        GRPO(ToyLM(), len_of, **options(output_dir=tmp_path, max_steps=2, generation_kwargs={"top_k": 2})).train(
            PROMPTS
        )


def len_of(completion_ids):
    return [float(len(ids)) for ids in completion_ids]
