"""Configuration: nearest names, ranges, presets, TOML."""

import dataclasses
import json
import re
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlox_grpo import GRPO
from rlox_grpo.config.foreign_names import advise, read_foreign_names
from rlox_grpo.config.records import RECORDS, LossConfig, Options
from rlox_grpo.config.records.option import read_metadata
from rlox_grpo.config.run_file import Origin
from rlox_grpo.config.schema import (
    GRPOConfig,
    choose_config,
    find_changed_options,
    is_resumable,
    list_other_options,
)
from rlox_grpo.config.toml import parse_toml, read_toml
from rlox_grpo.errors import ConfigError
from rlox_grpo.presets import PRESETS
from rlox_grpo.update.custom_optimizer import refuse_unread_options

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOREIGN = read_foreign_names()
TRL, VERL = FOREIGN.trl, FOREIGN.verl


def test_defaults_are_those_of_the_default_preset():
    config = GRPOConfig()
    for name, value in PRESETS["grpo"].values.items():
        assert getattr(config, name) == value, name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown option 'group_sze': did you mean 'group_size'"):
        GRPOConfig.create(group_sze=4)
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(num_generations=4)
    assert str(caught.value) == "unknown option 'num_generations': did you mean 'group_size'? (TRL's num_generations)"
    with pytest.raises(ConfigError, match=r"^group_size: .* valid integer.*, got 'many'$"):
        GRPOConfig(group_size="many")


def test_every_bad_value_is_named():
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.create(group_size="many", temperature=-1.0)
    assert "group_size" in str(caught.value)
    assert "'many'" in str(caught.value)
    assert "temperature" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "dr_gpro"}, "did you mean 'dr_grpo'"),
        ({"preset": ["dapo"]}, r"unknown preset \['dapo'\]"),
        ({"group_size": 1, "baseline": "leave_one_out"}, "group_size of at least 2"),
        ({"turn_credit": "turn", "baseline": "batch", "reward_scaling": "none"}, "compares the turns of a group"),
        ({"turn_credit": "turn", "reward_scaling": "whiten"}, "needs reward_scaling='group' or 'none', got 'whiten'"),
        ({"turn_credit": "turn", "reward_aggregation": "normalize_then_sum"}, "needs the total reward of each turn"),
        ({"turn_credit": "turn", "policy_loss": "gspo"}, "with policy_loss='gspo': its ratio is one for the sequence"),
        (
            {"turn_credit": "gae", "baseline": "leave_one_out"},
            "needs baseline='mean', got 'leave_one_out'; it subtracts the mean",
        ),
        (
            {"turn_credit": "gae", "baseline": "batch", "reward_scaling": "none"},
            "turn_credit='gae' needs baseline='mean', got 'batch'",
        ),
        ({"turn_credit": "gae", "max_turns": 1}, "turn_credit='gae' with max_turns=1 has no later turns to read"),
        ({"turn_credit": "turn", "turn_lambda": 0.5}, "turn_lambda=0.5 is read only with turn_credit='gae'"),
        ({"policy_loss": "gspo_turn", "delta": 1.1}, "it would undo the clip"),
        ({"reward_scaling": "mean", "baseline": "leave_one_out"}, "divides by the mean that it subtracts"),
        (
            {"reward_scaling": "mean", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
            "needs rewards of at least 0, and kl_in='reward' subtracts from them",
        ),
        ({"kl_coef": 0.1, "reference": "none"}, "nothing to be measured against"),
        ({"log_to": ["tensorboard"]}, "set output_dir"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"group_size": 0}, "group_size"),
        ({"policy_loss": "ppo"}, "policy_loss.*got 'ppo'"),
        (
            {"dual_clip": 3.0, "policy_loss": "sapo"},
            "dual_clip=3.0 is read only with policy_loss='clip'; here policy_loss='sapo'",
        ),
        ({"dual_clip": 1.0}, "dual_clip"),
        (
            {"delta": 4.0, "policy_loss": "cispo_clip"},
            "delta=4.0 is read only with policy_loss='clip' or .*; here policy_loss='cispo_clip'",
        ),
        ({"delta": 1.1}, "delta=1.1 is no more than 1 \\+ clip_high=1.2"),
        (
            {"baseline": "batch", "reward_scaling": "batch", "group_size": 1, "reward_variance_share": 0.5},
            "the reward of a single completion has no variance",
        ),
        ({"policy_loss": "cispo_cap"}, "takes clip_high as the cap itself, about 5, got 0.2"),
        (
            {"policy_loss": "gmpo", "loss_aggregation": "token_mean"},
            "loss_aggregation='sequence_mean', got 'token_mean'",
        ),
        ({"sapo_temperatures": (0.0, 1.0)}, "sapo_temperatures=\\(0.0, 1.0\\)"),
        ({"vespo_shape": (1.0, 1.0, -1.0, 1.0)}, "vespo_shape"),
        ({"kl_in": "reward", "kl_coef": 0.1, "reward_aggregation": "normalize_then_sum"}, "needs a summed reward"),
        ({"kl_in": "reward", "kl_coef": 0.1, "kl_bias_correction": True}, "kl_bias_correction=True"),
        ({"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k3+"}, "differs only in its gradient"),
        ({"kl_schedule": "cosine"}, "kl_schedule='cosine' is read only with kl_coef above 0; here kl_coef=0.0"),
        ({"kl_schedule": "adaptive", "kl_coef": 0.1}, "kl_schedule='adaptive' needs kl_target, got None"),
        ({"kl_target": 0.1}, "kl_target=0.1 is read only with kl_schedule='adaptive'; here kl_schedule='constant'"),
        ({"baseline": "batch"}, "reward_scaling='batch' or 'none', got 'group'"),
        ({"mini_batches": 17}, "mini_batches=17 is more than prompts_per_step=16"),
        ({"top_entropy_share": 0.0}, "top_entropy_share"),
        (
            {"gpu_memory_utilization": 0.5},
            "gpu_memory_utilization=0.5 is read only with engine='vllm'; here engine='hf'",
        ),
        ({"engine": "vllm_server"}, "needs server_urls"),
        ({"engine": "vllm_server", "server_urls": ["localhost"]}, "server_urls holds 'localhost'"),
        ({"server_timeout": 5}, "server_timeout=5.0 is read only with engine='vllm_server'; here engine='hf'"),
        ({"importance_cap": 0.5, "importance_floor": 0.5}, "importance_floor=0.5 is not below importance_cap=0.5"),
        ({"bypass_old_log_probs": True, "importance_correction": "sequence"}, "nothing to correct"),
        (
            {"bypass_old_log_probs": True, "policy_loss": "kl_cov"},
            "policy_loss='kl_cov' with bypass_old_log_probs=True",
        ),
        ({"group_size": 2, "ddof": 2}, "ddof=2 is no less than group_size=2"),
        ({"group_size": 8, "max_group_size": 15}, "no group would be larger; set max_group_size to at least 16"),
        ({"group_size": 4, "ddof": 5, "reward_scaling": "whiten"}, "ddof=5 is no less than group_size=4"),
        (
            {"group_size": 1, "prompts_per_step": 2, "ddof": 2, "baseline": "batch", "reward_scaling": "batch"},
            "ddof=2 is no less than prompts_per_step · group_size=2",
        ),
    ],
)
def test_values_that_cannot_be_meant(options, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(**options)


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_set_their_fields_and_can_be_overridden(name):
    config = GRPOConfig.create(preset=name)
    for field, value in PRESETS[name].values.items():
        assert getattr(config, field) == value
    assert GRPOConfig.create(preset=name, adam_beta1=0.05).adam_beta1 == 0.05


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError):
        GRPOConfig().group_size = 3


def test_toml_round_trip(tmp_path):
    config = GRPOConfig.create(preset="dr_grpo", output_dir=tmp_path, stop=["</answer>"], learning_rate=3e-6)
    assert GRPOConfig.create(**tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_comes_back_from_its_toml(name):
    config = GRPOConfig.create(preset=name)
    assert GRPOConfig.create(**tomllib.loads(config.to_toml())) == config


def test_a_preset_is_cleared_of_a_choice_by_a_word():
    config = GRPOConfig.create(preset="verl", dual_clip=None, prompt_template="none")
    assert config.dual_clip is None
    assert config.prompt_template is None
    assert 'dual_clip = "none"' in config.to_toml()
    assert GRPOConfig.create(**tomllib.loads(config.to_toml())) == config
    assert GRPOConfig.create(preset="verl", dual_clip="none") == GRPOConfig.create(preset="verl", dual_clip=None)


def test_broken_toml_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("group_size = \n")
    (tmp_path / "run.yaml").write_text("data:\n  train_batch_size: 16\n")
    with pytest.raises(ConfigError, match=r"run\.yaml is not TOML.*line 1.*; a run file is TOML: docs/migration"):
        read_toml(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML.*line 1"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_toml(tmp_path / "none.toml")


# --- records ---


def test_every_option_is_declared_by_one_record():
    names = [name for record in RECORDS for name in record.model_fields]
    assert sorted(names) == sorted(set(names)) == sorted(GRPOConfig.model_fields)
    assert list(GRPOConfig.model_fields) == names  # config.toml has the order of the page
    assert all(field.description for field in GRPOConfig.model_fields.values())


def test_a_stage_gets_its_record():
    config = GRPOConfig.create(clip_high=0.28, loss_aggregation="token_mean", kl_coef=0.1)
    assert config.split().loss == LossConfig(clip_high=0.28, loss_aggregation="token_mean", kl_coef=0.1)
    stages = config.split()
    assert [type(record) for record in vars(stages).values()] == [*RECORDS]
    for name, record in vars(stages).items():
        assert dict(record) == {field: getattr(config, field) for field in type(record).model_fields}, name
    assert len(GRPOConfig.__mro__) < 8  # no base for each record


def test_conditions_name_options_or_arguments_and_possible_values():
    arguments = {"ref_model", "eval_prompts", "environment", "tools", "teacher"}
    for name, field in GRPOConfig.model_fields.items():
        for condition in read_metadata(field)["only_with"]:
            for other, wanted in condition.items():
                assert other in GRPOConfig.model_fields or other in arguments, (name, other)
                for value in wanted if wanted != "set" else ():
                    Options(**{other: value})


# --- types ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": True}, "group_size: .*valid integer, got True"),
        ({"group_size": 4.0}, "group_size: .*valid integer, got 4.0"),
        ({"group_size": "4"}, "group_size: .*valid integer, got '4'"),
        ({"learning_rate": True}, "learning_rate: .*valid number, got True"),
        ({"updater": "deepspeed", "zero_stage": True}, "zero_stage: .*valid integer, got True"),
        ({"reward_weights": [True]}, "reward_weights.0: .*got True"),
        ({"guards": 1}, "guards: .*valid boolean, got 1"),
        (
            {"temperature": 0},
            r"temperature: .*greater than 0, got 0; .*eval_greedy=True or call evaluate\(greedy=True\)",
        ),
        ({"resume": False}, 'resume: .*got False; write "never"'),
        ({"log_to": "wandbb"}, "log_to.0: .*got 'wandbb'"),
        ({"stop": [1]}, "stop.0: .*valid string, got 1"),
    ],
)
def test_types_are_strict(options, message):
    with pytest.raises(ConfigError, match=message):
        GRPOConfig.create(**options)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"learning_rate": 1}, 1.0),
        ({"learning_rate": np.float32(0.5)}, 0.5),
        ({"group_size": np.int64(4)}, 4),
        ({"stop": "</answer>"}, ("</answer>",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"log_to": "console"}, ("console",)),
        ({"reward_weights": [1, 0.5]}, (1.0, 0.5)),
        ({"lora_target_modules": "q_proj", "lora_rank": 2}, "q_proj"),
        ({"lora_target_modules": ["q_proj"], "lora_rank": 2}, ("q_proj",)),
    ],
)
def test_values_that_are_converted(options, value):
    config = GRPOConfig.create(**options)
    found = getattr(config, next(iter(options)))
    assert (found, type(found)) == (value, type(value))


# --- unknown names ---


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("beta", ": did you mean 'kl_coef'? (TRL's beta)"),
        ("epsilon_high", ": did you mean 'clip_high'? (TRL's epsilon_high)"),
        ("max_completion_length", ": did you mean 'max_new_tokens'? (TRL's max_completion_length)"),
        ("num_generations", ": did you mean 'group_size'? (TRL's num_generations)"),
        ("save_steps", ": did you mean 'checkpoint_steps'? (TRL's save_steps)"),
        ("logging_steps", " (TRL's): there is none: metrics are logged every step"),
        ("deepspeed", " (TRL's): set updater='deepspeed' and zero_stage"),
        # Names with another unit or meaning: the unit or the formula, and never the option alone.
        ("epsilon", " (TRL's): set clip_low and clip_high: it is both bounds if epsilon_high is not set"),
        (
            "data.train_batch_size",
            ": did you mean 'prompts_per_step'? (verl's train_batch_size)",
        ),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            " (verl's): it is a number of prompts, and mini_batches a number of parts: mini_batches = "
            "train_batch_size / ppo_mini_batch_size",
        ),
        (
            "ppo_micro_batch_size_per_gpu",
            " (verl's): it is a number of sequences, and micro_batch_tokens of tokens: micro_batch_tokens = "
            "sequences · (longest prompt + max_new_tokens)",
        ),
        (
            "generation_batch_size",
            " (TRL's): it counts completions, and prompts_per_step prompts: prompts_per_step = generation_batch_size / "
            "num_generations",
        ),
        (
            "steps_per_generation",
            " (TRL's): it counts micro-batches, and mini_batches optimizer steps: mini_batches = steps_per_generation "
            "/ gradient_accumulation_steps",
        ),
        (
            "warmup_ratio",
            " (TRL's): it is a share, and warmup_steps a number of steps: warmup_steps = share · the steps of the run",
        ),
        (
            "max_tool_calling_iterations",
            " (TRL's): it counts rounds of calls, and max_turns replies: max_turns = max_tool_calling_iterations + 1",
        ),
        (
            "max_num_gen_batches",
            " (verl's): it counts the first batch too: max_refills = max_num_gen_batches - 1",
        ),
        (
            "trainer.project_name",
            " (verl's): there is none: trackers name a run by its output_dir, and WANDB_PROJECT in the environment is "
            "the project",
        ),
        (
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            " (verl's): there is none: a frozen reference computes with the policy's options; reference chooses it, "
            "and reference='server' keeps it elsewhere",
        ),
        (
            "actor_rollout_ref.actor.fsdp_config.param_offload",
            " (verl's): set updater='deepspeed', zero_stage=3 and offload_params=true",
        ),
        ("data.shuffle", " (verl's): there is none: prompts are always shuffled, by seed"),
        (
            "actor_rollout_ref.rollout.load_format",
            " (verl's): there is none: engines get the trainer's weights before the first completion",
        ),
        (
            "actor_rollout_ref.rollout.multi_turn.enable",
            " (verl's): there is none: environment or tools make a run of several turns",
        ),
        ("algorithm.kl_ctrl.kl_coef", " (verl's): set kl_in='reward' and kl_coef"),
        ("GRPOTrainer", ": it is rlox_grpo.GRPO, and its train() gets the prompts"),
        ("save_model", ": call trainer.save(path)"),
        ("resume_from_checkpoint", ": did you mean 'resume'? (TRL's resume_from_checkpoint)"),
        ("actor_rollout_ref.actor.ppo_epochs", ": did you mean 'updates_per_batch'? (verl's ppo_epochs)"),
        ("actor_rollout_ref.rollout.name", ": did you mean 'engine'? (verl's rollout.name)"),
        ("actor_rollout_ref.rollout.temperature", ": did you mean 'temperature'? (verl's temperature)"),
        ("critic.optim.lr", " (verl's): there is none: GRPO has no critic"),
        ("trainer.default_hdfs_dir", " (verl's): there is no such option; `rlox-grpo options` lists the options"),
        (
            "enforce_eager",
            " (verl's): there is none: start `rlox-grpo serve` with vLLM's own flags and set engine='vllm_server'",
        ),
        ("hub_private_repo", " (TRL's): call trainer.push_to_hub(repo_id, private=True) after training"),
        ("log_metric", " (TRL's): return (scores, metrics) from the reward function"),
        ("learning_rte", ": did you mean 'learning_rate'?"),
        ("colour", "; `rlox-grpo options` lists the options"),
        ("max_things", "; `rlox-grpo options` lists the options"),
    ],
)
def test_advice_for_an_unknown_option(name, said):
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.create(**{name: 1})
    assert str(caught.value) == f"unknown option {name!r}{said}"


def test_advice_names_options_that_exist():
    known = {*GRPOConfig.model_fields, *Origin.model_fields}
    for name, advice in {**TRL, **VERL}.items():
        assert " " in advice or advice in known, (name, advice)
        assert name not in known, name


def test_a_suggested_option_has_the_type_of_trls():
    """A bool is not a number, and a share is not a count: TRL's own types say so."""
    trl = pytest.importorskip("trl")
    kinds = {"bool", "int", "float", "str"}
    for field in dataclasses.fields(trl.GRPOConfig):
        option = TRL.get(field.name)
        theirs = kinds & set(re.findall(r"\w+", str(field.type)))
        # A float of save_steps below 1 is a share of the run; the strict integer here refuses it.
        if option not in GRPOConfig.model_fields or len(theirs) != 1 or field.name == "save_steps":
            continue
        ours = set(re.findall(r"\w+", str(GRPOConfig.model_fields[option].annotation)))
        if theirs <= {"bool", "float"}:
            assert theirs & ours, (field.name, option)


def test_keywords_and_methods_of_trl_that_the_trainer_does_not_have():
    with pytest.raises(
        TypeError, match=r"^evaluate\(\) takes prompts, samples, greedy, and no 'temperature': it is an "
    ):
        GRPO.evaluate(None, [], temperature=0.5)
    with pytest.raises(
        TypeError, match=r"^train\(\) takes prompts, n_epochs, eval_prompts, and no .*did you mean 'resume'"
    ):
        GRPO.train(None, [], resume_from_checkpoint=True)
    with pytest.raises(TypeError, match=r"^save\(\) takes path, merged, best, and no 'folder'"):
        GRPO.save(None, folder="out")
    with pytest.raises(AttributeError, match=r"no attribute 'save_model' \(TRL's\): call trainer.save\(path\)$"):
        _ = GRPO.__new__(GRPO).save_model
    with pytest.raises(ImportError, match=r"no GRPOTrainer \(TRL's\): the trainer is rlox_grpo.GRPO"):
        from rlox_grpo import GRPOTrainer  # noqa: F401


def test_every_option_of_trl_has_advice():
    """TRL's own options and those of transformers: none is guessed by its spelling, and none is left without a word."""
    trl = pytest.importorskip("trl", reason="needs TRL, and so Python 3.11")
    names = {field.name for field in dataclasses.fields(trl.GRPOConfig)} - GRPOConfig.model_fields.keys()
    assert len(names) > 150
    assert not names - TRL.keys()
    for name in names:
        assert "(TRL's" in advise(name, GRPOConfig.model_fields), name


def test_a_configuration_reads_its_preset_and_no_foreign_names():
    program = (
        "from rlox_grpo.config.schema import GRPOConfig, PRESETS\n"
        "from rlox_grpo.config.foreign_names import read_foreign_names\n"
        "GRPOConfig.create(preset='dapo')\n"
        "print(list(PRESETS._read), read_foreign_names.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['dapo']", "0"]


def test_the_nearest_name_of_a_foreign_option_is_never_shown():
    """By spelling alone, `optim_target_modules` is near `lora_target_modules`, which has another meaning."""
    for library, names in (("TRL", TRL), ("verl", VERL)):
        for name, advice in names.items():
            said = advise(name, GRPOConfig.model_fields)
            assert f"({library}'s" in said or (library == "verl" and name in TRL), name
            shown = re.findall(r"did you mean '(\w+)'", said)
            assert shown in ([], [TRL.get(name, advice)]), name


def test_no_key_of_verls_parts_is_guessed_by_its_spelling():
    """verl's `actor_rollout_ref.actor.qat.group_size` is a size of quantization blocks."""
    for key in ("actor_rollout_ref.actor.qat.group_size", "reward.reward_model.rollout.temperature"):
        assert "did you mean" not in advise(key, GRPOConfig.model_fields), key
    for group in FOREIGN.verl_first_words:
        assert advise(f"{group}.dype", GRPOConfig.model_fields).startswith(" (verl's): "), group
    assert not VERL.keys() & FOREIGN.verl_sections.keys() - {"custom_reward_function", "reward_manager"}


def test_what_there_is_not_says_why():
    for name, advice in {**TRL, **VERL}.items():
        assert advice != "there is none", name


@pytest.mark.parametrize("name", ["launcher", "layout"])
def test_the_launcher_of_run_files_is_no_option(name):
    with pytest.raises(ConfigError, match=rf"unknown option '{name}': it is a key of run files.*train run.toml --ray"):
        choose_config(None, {name: "ray"})


def test_a_configuration_that_is_a_dict():
    with pytest.raises(
        ConfigError, match=r"config is dict: expected a rlox_grpo.GRPOConfig; give the options as keywords"
    ):
        GRPO("model", len, config={"group_size": 4})


NUMBERS = [
    (name, field.default if field.default is not None else 0)
    for name, field in Options.model_fields.items()
    if {"int", "float"} & set(re.findall(r"\w+", str(field.annotation))) and "dict" not in str(field.annotation)
]


@pytest.mark.parametrize(("name", "default"), NUMBERS)
def test_every_number_has_limits_that_torch_and_the_system_can_use(name, default):
    """delta=1e308 and micro_batch_tokens=2**63 were errors of torch, reward_timeout=1e10 one of the reward."""
    for value in (1e308, -1e308, 1e39, 10**39, 10**70, -(10**70), 1e-300):
        own = (value,) * len(default) if isinstance(default, tuple) else (value,) if "tuple" in str(
            Options.model_fields[name].annotation
        ) else value  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            GRPOConfig.create(**{name: own})


@pytest.mark.parametrize("name", [name for name, _ in NUMBERS if name.endswith("_timeout")])
def test_no_timeout_is_longer_than_the_system_can_wait(name):
    with pytest.raises(ConfigError, match=rf"{name}: input should be less than or equal to 1000000"):
        GRPOConfig.create(**{name: 1e7})


@pytest.mark.parametrize("ahead", [{"async_steps": 1}, {"partial_rollout_turns": 2}])
def test_the_cap_of_the_correction_is_read_where_completions_are_stale(ahead):
    assert GRPOConfig.create(importance_cap=5.0, **ahead).importance_cap == 5.0


# --- options that would be ignored ---


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"engine_sleep": False}, "engine='vllm'"),
        ({"max_rollout_rows": 4, "engine": "vllm_server", "server_urls": "http://a:1"}, "engine='hf' or 'vllm'"),
        ({"importance_cap": 3.0}, "importance_correction='token' or 'sequence' or 'sequence_mean', or "),
        ({"importance_mode": "mask", "importance_correction": "none"}, "importance_correction='token'"),
        ({"reward_workers": 2}, "reward_timeout"),
        ({"std_epsilon": 1e-3, "reward_scaling": "none"}, "reward_scaling='group' or 'batch' or 'whiten'"),
        ({"max_refills": 2}, "zero_variance='refill'"),
        ({"curriculum_floor": 0.2}, "curriculum='pass_rate'"),
        ({"clip_low": 0.1, "policy_loss": "reinforce"}, "policy_loss='clip' or "),
        ({"kl_estimator": "k2"}, "kl_coef above 0, or reference='frozen' or "),
        ({"kl_in": "reward"}, "kl_coef above 0"),
        ({"kl_coef_end": 0.1, "kl_coef": 0.2}, "kl_schedule='linear' or 'cosine' or 'cosine_inverted'"),
        ({"reference_timeout": 5.0}, "reference='server'"),
        ({"reference_offload": True}, "reference='frozen' or 'periodic', or reference='auto' and kl_coef above 0"),
        ({"zero_stage": 3}, "updater='deepspeed'"),
        ({"min_lr_ratio": 0.1}, "lr_schedule='linear' or 'cosine'"),
        ({"decay_vectors": True}, "weight_decay above 0"),
        ({"lora_alpha": 8.0}, "lora_rank above 0"),
        ({"checkpoint_steps": 10}, "output_dir"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(options, needed):
    name = next(iter(options))
    with pytest.raises(ConfigError) as caught:
        GRPOConfig.create(**options).refuse_ignored(ref_model=False)  # as GRPO does
    assert f"{name}={options[name]!r} is read only with {needed}" in str(caught.value)
    default = GRPOConfig.model_fields[name].default
    GRPOConfig.create(**{**options, name: default}).refuse_ignored(
        ref_model=False
    )  # the default, given in so many words, is none


def test_the_presets_values_are_never_refused():
    assert GRPOConfig.create(preset="verl", policy_loss="sapo").dual_clip == 3.0
    config = GRPOConfig.create(preset="r1_blog", kl_coef=0.0)
    assert config.kl_estimator == "k1+"
    assert GRPOConfig.create(**tomllib.loads(config.to_toml())) == config
    with pytest.raises(ConfigError, match="kl_estimator='k2' is read only with"):
        GRPOConfig.create(preset="r1_blog", kl_coef=0.0, kl_estimator="k2", reference="none")


def test_conditions_on_arguments_hold_until_the_argument_is_known():
    GRPOConfig.create(kl_estimator="k2").refuse_ignored(ref_model=True)
    with pytest.raises(ConfigError, match="kl_estimator='k2' is read only with .*; here .*no ref_model"):
        GRPOConfig.create(kl_estimator="k2").refuse_ignored(ref_model=False)
    config = GRPOConfig.create(eval_steps=5)
    config.refuse_ignored(eval_prompts=True)
    with pytest.raises(ConfigError, match="eval_steps=5 is read only with eval_prompts; here no eval_prompts"):
        config.refuse_ignored(eval_prompts=False)


def test_every_ignored_option_is_named():
    with pytest.raises(ConfigError, match=r"(?s)engine_sleep=False.*max_refills=2"):
        GRPOConfig.create(engine_sleep=False, max_refills=2)


# --- what a resumed run may change ---


def saved(**options):
    return json.loads(json.dumps(GRPOConfig.create(**options).model_dump(mode="json")))


def fixed_changes(then, now):
    """The differences that a resumed run may not have."""
    return {name: values for name, values in find_changed_options(then, now).items() if not is_resumable(name)}


def test_a_resumed_run_may_change_only_what_its_fields_say():
    then = saved(output_dir="a")
    assert fixed_changes(then, GRPOConfig.create(output_dir="b", max_steps=9, guards=False)) == {}
    changed = GRPOConfig.create(output_dir="a", clip_high=0.3, group_size=4)
    assert fixed_changes(then, changed) == {"clip_high": (0.2, 0.3), "group_size": (8, 4)}


def test_an_option_that_only_a_checkpoint_or_only_this_version_has():
    assert list_other_options(saved(preset="dapo")) == []
    then = {**saved(preset="dapo"), "kl_magic": 3}
    del then["stop"], then["clip_high"]
    assert list_other_options(then) == [
        "kl_magic: 3 there, and this version has no such option",
        "clip_high: missing there",
        "stop: missing there",
    ]
    assert find_changed_options(then, GRPOConfig.create(preset="dapo", clip_high=0.2)) == {}


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 1e-6),
        ({"lora_rank": 0}, 1e-6),
        ({"lora_rank": 8}, 1e-5),
        ({"lora_rank": 8, "preset": "recommended"}, 1e-5),
        ({"lora_rank": 8, "preset": "trl"}, 1e-6),  # a published system's own rate stays
        ({"lora_rank": 8, "preset": "rlox"}, 1e-4),
        ({"lora_rank": 8, "learning_rate": 1e-6}, 1e-6),
        ({"lora_rank": 8, "learning_rate": 3e-4}, 3e-4),
    ],
)
def test_the_default_learning_rate_of_lora_is_ten_times_that_of_all_weights(options, rate):
    config = GRPOConfig.create(**options)
    assert config.learning_rate == rate
    assert GRPOConfig.create(**tomllib.loads(config.to_toml())) == config


def test_an_optimizer_of_ones_own_goes_with_the_default_rate_of_lora():
    refuse_unread_options(GRPOConfig.create(lora_rank=8), lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_none_survives_config_toml():
    """TOML has no null: wherever None differs from the preset's value and the default, it is written."""
    for preset, values in PRESETS.items():
        for name, field in Options.model_fields.items():
            usual = values.values.get(name, field.default)
            if usual is None or type(None) not in get_args(field.annotation):
                continue
            try:
                config = GRPOConfig.create(preset=preset, **{name: None})
            except ConfigError:
                continue  # another option of the preset needs it
            assert getattr(GRPOConfig.create(**parse_toml(config.to_toml())), name) is None, (preset, name)
