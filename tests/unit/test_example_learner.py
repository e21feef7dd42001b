"""What the examples' careless teacher writes, and the model that it teaches."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from word_problems import generate_problems

from rlox_grpo.demo.closed_vocabulary import build_tokenizer
from rlox_grpo.demo.warm_start import make_model, teach
from rlox_grpo.prompts.tasks.gsm8k import extract_final_number, extract_reasoning
from rlox_grpo.rewards import GSM8KAnswer


@pytest.fixture(scope="module")
def learner():
    examples = Path(__file__).parents[2] / "examples"
    file = examples / "learner.py"
    specification = importlib.util.spec_from_file_location("learner", file)
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(examples))  # as for a script that runs there
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(examples))
    return module


def test_a_wrong_operation_is_carried_out_rightly_and_misses_the_answer(learner):
    rng = np.random.default_rng(0)
    rows = generate_problems(300, seed=0, numbers=(2, 9), largest=learner.LARGEST)
    told = [learner.with_wrong_operation(row["answer"], rng) for row in rows]
    changed = [(row["answer"], answer) for row, answer in zip(rows, told, strict=True) if answer != row["answer"]]
    assert len(changed) > 240  # for the others no operation stays within the numbers
    for right, wrong in changed:
        left, operator, other, value = re.findall(r"(\d+)([-+*])(\d+)=<<[^>]*>>(\d+)", wrong)[-1]
        assert int(value) == {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(left), int(other))
        assert extract_final_number(wrong) == value
        assert wrong.splitlines()[:-2] == right.splitlines()[:-2]
    # 2 + 2 = 2 * 2: a wrong operation may still hit.
    scores = GSM8KAnswer()(
        completions=[extract_reasoning(wrong) for _, wrong in changed], answer=[right for right, _ in changed]
    )
    assert np.mean(scores) < 0.02


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("3 + 9 - 1", "3 - 9 - 1"),
        ("3 - 1 + 9", "3 - 1 - 9"),
        ("20 - 7 - 2", "20 - 7 + 2"),
        ("9 - ( 4 + 2 )", "9 - ( 4 - 2 )"),
        ("9 - ( 4 - 2 ) </answer>", "9 - ( 4 + 2 ) </answer>"),
    ],
)
def test_a_wrong_sign_keeps_the_numbers_and_their_order(learner, right, wrong):
    assert learner.with_wrong_sign(right) == wrong


def test_a_number_starts_out_alike_with_and_without_a_blank_before_it():
    tokenizer = build_tokenizer(["1 + 2"], 9)
    torch.manual_seed(0)
    weight = make_model(tokenizer, positions=16).get_input_embeddings().weight.detach()
    words = tokenizer.get_vocab()
    assert torch.equal(weight[words["7"], :40], weight[words[" 7"], :40])
    assert not torch.equal(weight[words["7"], :40], weight[words["8"], :40])
    # Period 2 is the first: 7 and 9 differ by a whole one, 7 and 8 by half.
    assert weight[words["7"], 20] == pytest.approx(float(weight[words["9"], 20]), abs=1e-6)
    assert weight[words["7"], 20] == pytest.approx(-float(weight[words["8"], 20]), abs=1e-6)


def test_teaching_lowers_the_loss_of_completions_alone():
    tokenizer = build_tokenizer(["1 + 2 = 3 ?"], 9)
    torch.manual_seed(0)
    model = make_model(tokenizer, positions=16)

    @torch.no_grad()
    def log_prob(text, start, stop=None):
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        return float(log_probs[start - 1 : stop].sum())

    def draw(rng, count):
        return [("1 + 2 =", " 3")] * count

    before = log_prob("1 + 2 = 3", 4)
    teach(model, tokenizer, draw, seed=0, steps=30, rows=4, learning_rate=1e-2)
    assert log_prob("1 + 2 = 3", 4) > -0.5 > before
    assert log_prob("1 + 2", 1, 1) < -1  # " +" after "1": the prompt's own tokens are not taught
