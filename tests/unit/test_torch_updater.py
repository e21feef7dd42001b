"""The torch updater: micro-batches, clipping, non-finite values, optimizer state by name."""

import dataclasses

import pytest
import torch
from torch import nn

from rlox_grpo.config.records import OptimizerConfig
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.errors import NonFiniteError
from rlox_grpo.loss import grpo_loss
from rlox_grpo.model.forward import make_forward
from rlox_grpo.model.policy import Policy
from rlox_grpo.types import Batch, StepTotals
from rlox_grpo.update.torch_updater import TorchUpdater
from rlox_grpo.update.updaters import make_updater
from updates import Stepping


class Bigram(nn.Module):
    def __init__(self, vocabulary=7):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 5)
        self.head = nn.Linear(5, vocabulary)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def next_batch(rows, advantages, *, num_loss_tokens, num_sequences, first_row=0):
    """Rows of one prompt token and some completion tokens."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[column < len(row) - 1 for column in range(longest - 1)] for row in rows])
    return Batch(
        input_ids=ids,
        prompt_lengths=torch.ones(len(rows), dtype=torch.int64),
        completion_ids=ids[:, 1:],
        completion_mask=mask,
        loss_mask=mask,
        advantages=torch.tensor(advantages),
        row_index=torch.arange(first_row, first_row + len(rows)),
        prompt_index=torch.arange(first_row, first_row + len(rows)),
        totals=StepTotals(num_loss_tokens=num_loss_tokens, num_sequences=num_sequences),
    )


ROWS, ADVANTAGES = [[1, 2, 3, 4], [1, 5], [2, 6, 6]], [1.0, -1.0, 0.5]


def updater_of(model, how="token_mean", **options):
    loss = lambda log_probs, batch, entropy: grpo_loss(log_probs, batch, loss_aggregation=how)  # noqa: E731
    return Stepping(TorchUpdater(model, make_forward(model), OptimizerConfig(**options)), loss)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean", "sequence_sum"])
def test_micro_batches_make_the_step_of_the_whole(how):
    whole, parts = Bigram(), Bigram()
    one = updater_of(whole, how).step([next_batch(ROWS, ADVANTAGES, num_loss_tokens=6.0, num_sequences=3.0)], 0.01)
    split = [
        next_batch(ROWS[i : i + 1], ADVANTAGES[i : i + 1], num_loss_tokens=6.0, num_sequences=3.0, first_row=i)
        for i in range(3)
    ]
    many = updater_of(parts, how).step(split, 0.01)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for name in one.metrics:
        assert many.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5, abs=1e-7), name
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)  # float32, sums in another order


def test_a_step_raises_the_probability_of_what_was_better():
    model = Bigram()
    batch = next_batch([[1, 2], [1, 3]], [1.0, -1.0], num_loss_tokens=2.0, num_sequences=2.0)
    before = make_forward(model)(batch)[0].detach()
    updater_of(model).step([batch], 0.1)
    after = make_forward(model)(batch)[0].detach()
    assert after[0, 0] > before[0, 0]
    assert after[1, 0] < before[1, 0]


def test_metrics_by_hand():
    model = Bigram()
    stats = updater_of(model).step([next_batch(ROWS, ADVANTAGES, num_loss_tokens=6.0, num_sequences=3.0)], 0.25)
    assert stats.learning_rate == 0.25
    assert stats.metrics["policy/ratio_mean"] == pytest.approx(1.0)
    # token mean of -A over 3, 1 and 2 tokens
    assert stats.metrics["policy/loss"] == pytest.approx(-(3 * 1.0 + 1 * -1.0 + 2 * 0.5) / 6, abs=1e-7)
    log_probs = torch.log_softmax(Bigram()(torch.tensor([1, 2, 3, 1, 2, 6])), -1)
    entropy = float(-(log_probs.exp() * log_probs).sum(-1).mean().detach())
    assert stats.metrics["policy/entropy"] == pytest.approx(entropy, rel=1e-5)


def test_gradients_of_a_step_that_failed_do_not_add_to_the_next():
    batches = [next_batch(ROWS, ADVANTAGES, num_loss_tokens=6.0, num_sequences=3.0)] * 2
    whole, model, calls = Bigram(), Bigram(), []

    def fail_once(log_probs, batch, entropy):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory")
        return grpo_loss(log_probs, batch, loss_aggregation="token_mean")

    updater = Stepping(TorchUpdater(model, make_forward(model)), fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        updater.step(batches, 0.01)
    assert updater.step(batches, 0.01).grad_norm == updater_of(whole).step(batches, 0.01).grad_norm
    assert updater.weights_are_whole


def test_clipping_bounds_the_step_and_reports_the_norm_before_it():
    batch = next_batch(ROWS, [100.0, -100.0, 50.0], num_loss_tokens=6.0, num_sequences=3.0)
    free = updater_of(Bigram(), max_grad_norm=0.0).step([batch], 0.0)
    model = Bigram()
    updater = updater_of(model, max_grad_norm=0.5)
    clipped = updater.step([batch], 0.0)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    # AdamW's first moment after one step is (1 - beta1) times the gradient that it was given.
    moments = [value.ravel() for name, value in updater.state_dict().items() if name.endswith("/exp_avg")]
    norm = torch.linalg.vector_norm(torch.cat(moments)) / 0.1
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_decay_spares_vectors():
    model = Bigram()
    bias, weight = model.head.bias.detach().clone(), model.head.weight.detach().clone()
    updater_of(model, weight_decay=0.5).step(
        [next_batch(ROWS, [0.0, 0.0, 0.0], num_loss_tokens=6.0, num_sequences=3.0)], 0.1
    )
    assert torch.equal(model.head.bias, bias)
    torch.testing.assert_close(model.head.weight, weight * (1 - 0.1 * 0.5))


def test_decay_of_vectors_is_asked_for():
    model = Bigram()
    bias = model.head.bias.detach().clone()
    batch = next_batch(ROWS, [0.0, 0.0, 0.0], num_loss_tokens=6.0, num_sequences=3.0)
    config = GRPOConfig.create(weight_decay=0.5, decay_vectors=True)
    policy = Policy(model, None, (), None)
    updater = make_updater(config.split(), policy, make_forward(model))
    Stepping(updater, lambda log_probs, batch, entropy: grpo_loss(log_probs, batch)).step([batch], 0.1)
    torch.testing.assert_close(model.head.bias, bias * (1 - 0.1 * 0.5))


def test_a_non_finite_log_prob_stops_the_step_and_names_its_row():
    model = Bigram()
    with torch.no_grad():
        model.embedding.weight[2] = float("nan")  # only the third row's prompt
    before = model.head.weight.clone()
    batches = [
        next_batch([[1, 5]], [1.0], num_loss_tokens=2.0, num_sequences=2.0, first_row=10),
        next_batch([[1, 5], [2, 6]], [1.0, 1.0], num_loss_tokens=2.0, num_sequences=2.0, first_row=11),
    ]
    with pytest.raises(NonFiniteError, match=r"rows \[12\]") as caught:
        updater_of(model).step(batches, 0.1)
    assert caught.value.rows == (12,)
    assert torch.equal(model.head.weight, before)


def test_a_non_finite_advantage_is_caught():
    with pytest.raises(NonFiniteError, match=r"rows \[1\]"):
        updater_of(Bigram()).step(
            [next_batch([[1, 5], [1, 4]], [1.0, float("inf")], num_loss_tokens=2.0, num_sequences=2.0)], 0.1
        )


def test_a_non_finite_gradient_names_its_parameter():
    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    class Broken(Bigram):
        def forward(self, input_ids):
            return self.head(Root.apply(self.embedding(input_ids)))

    model = Broken()
    before = model.embedding.weight.clone()
    with pytest.raises(NonFiniteError, match=r"embedding\.weight"):
        updater_of(model).step([next_batch(ROWS, ADVANTAGES, num_loss_tokens=6.0, num_sequences=3.0)], 0.1)
    assert torch.equal(model.embedding.weight, before)


def test_optimizer_state_moves_to_a_new_updater_exactly():
    batch = next_batch(ROWS, ADVANTAGES, num_loss_tokens=6.0, num_sequences=3.0)
    straight = Bigram()
    updater = updater_of(straight)
    updater.step([batch], 0.01)
    weights, state = {n: p.detach().clone() for n, p in straight.named_parameters()}, updater.state_dict()
    state = {name: tensor.clone() for name, tensor in state.items()}
    updater.step([batch], 0.01)
    moved = Bigram()
    moved.load_state_dict(weights)
    other = updater_of(moved)
    other.load_state_dict(state)
    other.step([batch], 0.01)
    for left, right in zip(straight.parameters(), moved.parameters(), strict=True):
        assert torch.equal(left, right)


def test_foreign_optimizer_state_is_refused():
    updater = updater_of(Bigram())
    with pytest.raises(ValueError, match="no trainable parameter 'tail'"):
        updater.load_state_dict({"tail/exp_avg": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(3,\), not \(7,\)"):
        updater.load_state_dict({"head.bias/exp_avg": torch.zeros(3)})


def test_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="nothing to train"):
        updater_of(Bigram().requires_grad_(False))


def test_masked_tokens_do_not_train():
    model, other = Bigram(), Bigram()
    batch = next_batch([[1, 2, 3], [1, 5, 4]], [1.0, -1.0], num_loss_tokens=2.0, num_sequences=2.0)
    mask = torch.tensor([[True, False], [True, False]])
    updater_of(model).step([dataclasses.replace(batch, loss_mask=mask)], 0.1)
    updater_of(other).step([next_batch([[1, 2], [1, 5]], [1.0, -1.0], num_loss_tokens=2.0, num_sequences=2.0)], 0.1)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
