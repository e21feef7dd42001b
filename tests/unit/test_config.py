"""Configuration: nearest names, ranges, presets, TOML."""

import pytest
import tomllib
from pydantic import ValidationError

from rlox_grpo.config.schema import GRPOConfig, read_toml
from rlox_grpo.errors import ConfigError
from rlox_grpo.presets import PRESETS


def test_defaults_are_those_of_the_default_preset():
    config = GRPOConfig()
    for name, value in PRESETS["grpo"].values.items():
        assert getattr(config, name) == value, name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown option 'group_sze': did you mean 'group_size'"):
        GRPOConfig.create(group_sze=4)
    with pytest.raises(ValidationError, match="did you mean 'group_size'"):
        GRPOConfig(group_sze=4)


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
        ({"group_size": 1, "baseline": "leave_one_out"}, "group_size of at least 2"),
        ({"kl_coef": 0.1, "reference": "none"}, "nothing to be measured against"),
        ({"reference": "adapter_off"}, "set lora_rank"),
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
        ({"kl_schedule": "adaptive", "kl_coef": 0.1}, "with kl_target=None: adaptive needs one"),
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
    with pytest.raises(ConfigError, match=r"run\.toml is not TOML.*line 1"):
        read_toml(path)
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_toml(tmp_path / "none.toml")
