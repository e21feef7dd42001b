"""An optimizer of the user's own: its steps, its schedule, its state over a resume, and what is refused."""

import math
from functools import partial

import pytest
import torch

from rlox_grpo import GRPO
from rlox_grpo.errors import CheckpointError, ConfigError
from rlox_grpo.run.digests import digest_optimizer
from rlox_grpo.update.custom_optimizer import CustomOptimizer, takes_learning_rate
from toy import PROMPTS, ToyLM, options, share_of_target, stop_after

SGD = torch.optim.SGD


def trainer_of(optimizer, **changes):
    settings = options(**{"max_steps": 4, **changes})
    if "learning_rate" not in changes:
        del settings["learning_rate"]
    return GRPO(ToyLM(), share_of_target, optimizer=optimizer, **settings)


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def own(factory, model=None, learning_rate=0.5, **settings):
    named = dict((model or ToyLM()).named_parameters())
    return CustomOptimizer(factory, named, learning_rate, **{"is_sharded": False, **settings})


class Averaging(torch.optim.Optimizer):
    """Keeps every kind of state: a tensor, a number, a flag, nothing, and a number of its groups."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "seen": 0, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("mean", torch.zeros_like(parameter))
                state.setdefault("nothing", None)
                state["count"] = state.get("count", 0) + 1
                state["odd"] = state["count"] % 2 == 1
                state["share"] = 1 / state["count"]
                state["row"] = state.get("row", 0) + parameter.grad.abs().sum(-1)  # another shape than the parameter's
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["mean"] * (group["lr"] * (1 + state["share"]) * (2 if state["odd"] else 1)))
                parameter.sub_(state["row"].sum() * 1e-4 * math.sqrt(group["seen"]))


def test_one_step_of_sgd_is_minus_the_learning_rate_times_the_gradient():
    model = ToyLM()
    optimizer = own(lambda parameters: SGD(parameters, lr=0.25), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    assert optimizer.peak == 0.25
    optimizer.step(0.125)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - 0.25, rtol=0, atol=1e-6)


def test_a_run_takes_the_factorys_learning_rate_and_schedules_it():
    trainer = trainer_of(lambda parameters: SGD(parameters, lr=0.4), lr_schedule="linear")
    rates = []
    before = weights(trainer)
    trainer.progress.total_steps = 4
    for _ in range(4):
        metrics = trainer.train_step(lambda step: trainer.prompts.read(PROMPTS)[:4])
        rates.append(metrics["update/learning_rate"])
        assert all(parameter.grad is None for parameter in trainer.model.parameters())  # freed after each step
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert not torch.equal(before, weights(trainer))


def test_groups_keep_the_ratio_of_their_learning_rates():
    def factory(parameters):
        return SGD([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:], "lr": 0.02}])

    optimizer = own(factory)
    optimizer.step(0.1)
    assert [group["lr"] for group in optimizer._optimizer.param_groups] == pytest.approx([0.1, 0.01])


@pytest.mark.parametrize(
    ("factory", "takes"),
    [
        (SGD, True),
        (partial(SGD, momentum=0.9), True),
        (partial(SGD, lr=0.3), False),
        (lambda parameters: SGD(parameters, lr=0.3), False),
        (lambda parameters, lr: SGD(parameters, lr=lr), True),
    ],
)
def test_a_factory_with_lr_gets_the_option(factory, takes):
    assert takes_learning_rate(factory) == takes
    assert own(factory).peak == (0.5 if takes else 0.3)


@pytest.mark.parametrize(
    "factory",
    [
        partial(SGD, lr=0.05, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.02),
        partial(torch.optim.RAdam, lr=0.01),
        Averaging,
    ],
    ids=["sgd", "adafactor", "radam", "every kind of state"],
)
def test_a_resumed_run_ends_at_the_same_weights(tmp_path, factory):
    whole = trainer_of(factory, output_dir=tmp_path / "whole", checkpoint_steps=0, max_steps=6)
    whole.train(PROMPTS)
    first = trainer_of(factory, output_dir=tmp_path / "run", checkpoint_steps=0, max_steps=6)
    stop_after(first, 3)
    first.train(PROMPTS)
    assert first.step == 3
    again = trainer_of(factory, output_dir=tmp_path / "run", checkpoint_steps=0, max_steps=6)
    metrics = again.train(PROMPTS)
    assert metrics["resumed_from_step"] == 3
    assert torch.equal(weights(whole), weights(again))


def test_another_optimizer_is_refused_unless_it_is_permitted(tmp_path):
    trainer_of(partial(SGD, lr=0.1), output_dir=tmp_path, max_steps=2).train(PROMPTS)
    for other in (partial(SGD, lr=0.2), None):
        with pytest.raises(CheckpointError, match=r"the optimizer is another.*resume_changes=.*'optimizer'"):
            trainer_of(other, output_dir=tmp_path, max_steps=4).train(PROMPTS)
    changed = trainer_of(
        partial(SGD, lr=0.2), output_dir=tmp_path, max_steps=4, resume_changes=("optimizer", "max_steps")
    )
    metrics = changed.train(PROMPTS)
    assert metrics["resumed_from_step"] == 2
    assert metrics["update/learning_rate"] == 0.2


def test_digests():
    assert digest_optimizer(None) == "adamw"
    assert digest_optimizer(SGD) == "class:torch.optim.sgd.SGD"
    assert digest_optimizer(partial(SGD, lr=0.1)) != digest_optimizer(partial(SGD, lr=0.2))
    one, other = (lambda p: SGD(p, lr=0.1)), (lambda p: SGD(p, lr=0.2))
    assert digest_optimizer(one) != digest_optimizer(other)


def some(parameters):
    return SGD(parameters[1:], lr=0.1)


def more(parameters):
    return SGD([*parameters, torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "changes", "error", "message"),
    [
        (3, {}, ConfigError, "optimizer is int: expected a factory"),
        (lambda parameters: "adam", {}, TypeError, "optimizer returned str: expected a torch.optim.Optimizer"),
        (some, {}, ConfigError, r"SGD leaves out 1 of 5 parameters in training, the first is 'embedding.weight'"),
        (more, {}, ConfigError, "SGD has 1 parameters that are not the model's"),
        (torch.optim.LBFGS, {}, ConfigError, "LBFGS.step needs a closure"),
        (partial(SGD, lr=0.0), {}, ConfigError, r"SGD has the learning rates \[0.0\]: the first must be above 0"),
        (SGD, {"updater": "deepspeed"}, ConfigError, "optimizer= needs updater='torch', got 'deepspeed'"),
        (
            SGD,
            {"offload_optimizer": True, "dtype": "bfloat16"},
            ConfigError,
            "optimizer= with offload_optimizer=True: the offloaded step is AdamW's",
        ),
        (SGD, {"adam_beta1": 0.8}, ConfigError, "adam_beta1=0.8 is AdamW's and is ignored with optimizer="),
        (SGD, {"weight_decay": 0.1}, ConfigError, "weight_decay=0.1 is AdamW's and is ignored"),
        (some, {"learning_rate": 0.1}, ConfigError, "learning_rate=0.1 is ignored, as optimizer= sets its own"),
    ],
)
def test_refused(factory, changes, error, message):
    with pytest.raises(error, match=message):
        trainer_of(factory, **changes)


def test_a_presets_own_values_are_no_contradiction():
    trainer_of(partial(SGD, lr=0.1), preset="dapo", mini_batches=1)


class Hoarder(SGD):
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = []


def test_state_that_a_checkpoint_cannot_hold_stops_the_first_step():
    with pytest.raises(ConfigError, match="Hoarder keeps 'history' of embedding.weight as list, and a checkpoint"):
        trainer_of(partial(Hoarder, lr=0.1)).train(PROMPTS)


def test_shards_need_state_of_the_parameters_shape():
    model = ToyLM()
    optimizer = own(Averaging, model, is_sharded=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match=r"Averaging keeps 'row' of embedding.weight with shape \(12,\): with shard"):
        optimizer.step(0.1)


def test_state_of_an_unknown_parameter_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter 'head.wait'"):
        own(SGD).load_state({"head.wait/momentum_buffer": torch.zeros(1)})
