import json
import re

import datasets
import pytest
import word_problems
from word_problems import NAMES, TEMPLATES, THINGS, generate_problems

from rlox_grpo.demo.closed_vocabulary import build_tokenizer
from rlox_grpo.prompts.tasks import gsm8k
from rlox_grpo.prompts.tasks.gsm8k import (
    COMPLETIONS,
    check_rows,
    extract_final_number,
    extract_reasoning,
    load_problems,
    read_problems,
    split_rows,
    write_completion,
)
from rlox_grpo.prompts.templates import apply_template
from rlox_grpo.rewards import GSM8KAnswer, published

CLIPS = {
    "question": "In April there were 48 clips and in May half as many. How many in all?",
    "answer": "In May there were 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72",
}


def test_a_seed_gives_the_same_problems():
    assert generate_problems(50, seed=3) == generate_problems(50, seed=3)
    assert generate_problems(50, seed=3) != generate_problems(50, seed=4)


def test_every_calculation_of_a_worked_solution_is_right_and_leads_to_the_answer():
    rows = generate_problems(1500, seed=0, numbers=(2, 20), largest=60)
    assert len({row["question"] for row in rows}) == 1500
    for row in rows:
        found = re.findall(r"(\d+)([-+*/])(\d+)=<<(\d+[-+*/]\d+)=(\d+)>>(\d+)", row["answer"])
        assert len(found) == len(row["answer"].splitlines()) - 1
        stated = [int(number) for number in re.findall(r"\d+", row["question"])]
        for left, operator, right, inside, value, shown in found:
            assert inside == f"{left}{operator}{right}"
            assert value == shown
            # Multiplication back is exact where `//` would round.
            exact = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) // int(right),
            }[operator]
            assert operator != "/" or exact * int(right) == int(left)
            assert 2 <= exact == int(value) <= 60
            assert {int(left), int(right)} <= {*stated, *(int(step[4]) for step in found)}
        assert extract_final_number(row["answer"]) == found[-1][4]
        assert GSM8KAnswer()(completions=[extract_reasoning(row["answer"])], answer=[row["answer"]]) == [1.0]


def test_every_template_name_and_thing_is_told():
    rows = generate_problems(1500, seed=1)
    text = " ".join(row["question"] for row in rows)
    assert all(word in text for word in (*NAMES, *THINGS))
    told = {re.sub("|".join((*NAMES, *THINGS, r"\d+")), "_", row["question"]) for row in rows}
    assert len(told) == len(TEMPLATES)


def test_the_number_of_steps_can_be_chosen():
    assert {len(row["answer"].splitlines()) for row in generate_problems(80, seed=0, how_many_steps=(1,))} == {2}
    assert {len(row["answer"].splitlines()) for row in generate_problems(80, seed=0, how_many_steps=(2,))} == {3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"how_many_steps": (3,)}, r"how_many_steps is \[3\]"),
        ({"numbers": (1, 5)}, r"numbers .*: \(1, 5\)"),
        ({"numbers": (9, 5)}, r"numbers .*: \(9, 5\)"),
        ({"numbers": (2, 70)}, "largest=60"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generate_problems(2000, seed=0, **options)


def test_fewer_distinct_problems_than_asked_for_are_refused(monkeypatch):
    monkeypatch.setattr(word_problems, "NAMES", NAMES[:2])
    monkeypatch.setattr(word_problems, "THINGS", THINGS[:1])
    with pytest.raises(ValueError, match="distinct problems of the 100 asked for"):
        generate_problems(100, seed=0, numbers=(2, 2), how_many_steps=(1,))


def test_split_shares_no_calculations_and_keeps_every_row():
    rows = generate_problems(2000, seed=0)
    train, held = split_rows(rows, held_out=0.2, seed=7)
    assert (train, held) == split_rows(rows, held_out=0.2, seed=7)
    assert len(train) + len(held) == len(rows)
    sides = [{tuple(gsm8k.ANNOTATION.findall(row["answer"])) for row in side} for side in (train, held)]
    assert not sides[0] & sides[1]
    assert 0.12 < len(held) / len(rows) < 0.28
    # Retold with other words, a problem stays where it was.
    retold = [{"question": f"Again: {row['question']}", "answer": f"So {row['answer']}"} for row in held]
    assert split_rows(retold, held_out=0.2, seed=7) == ([], retold)


def test_a_solution_without_its_annotations():
    assert extract_reasoning(CLIPS["answer"]) == "In May there were 48/2 = 24 clips.\nIn all 48+24 = 72 clips."
    assert extract_final_number(CLIPS["answer"]) == "72"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### 1,200", "1200"),
        ("x\n#### -3", "-3"),
        ("#### $2.50", "2.50"),
        ("####7", "7"),
        ("#### 1\nno\n#### 8 ", "8"),
    ],
)
def test_final_numbers(answer, number):
    assert extract_final_number(answer) == number


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"question": "How many?"}, ValueError, r"row 1 has no column 'answer'; it has \['question'\]"),
        ({"question": " ", "answer": "#### 1"}, ValueError, "row 1: question is blank"),
        ({"question": "How many?", "answer": 4}, TypeError, "row 1: answer must be text, not 4"),
        ({"question": "How many?", "answer": "It is 4"}, ValueError, "row 1: answer must end .* not 'It is 4'"),
        ({"question": "How many?", "answer": "#### four"}, ValueError, "row 1: answer must end .*'#### four'"),
        ({"question": "How many?", "answer": "#### 4 or 5"}, ValueError, "row 1: answer must end .*'#### 4 or 5'"),
    ],
)
def test_a_bad_row_is_named_with_its_value(row, error, message):
    with pytest.raises(error, match=message):
        check_rows([CLIPS, row])


def test_problems_come_from_files_data_sets_and_lists(tmp_path):
    rows = [*generate_problems(5, seed=0), CLIPS]
    jsonl, parquet = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(parquet)
    expected = [{"prompt": apply_template("lm_book", row), **row} for row in rows]
    for source in (rows, jsonl, parquet, dataset):
        assert load_problems(source, template="lm_book") == expected
        assert read_problems(source) == rows
    assert load_problems([{**CLIPS, "prompt": "own"}])[0]["prompt"] == "own"
    with pytest.raises(ValueError, match="no rows"):
        load_problems([])
    with pytest.raises(ValueError, match="prompt_template is 'nano': expected one of"):
        load_problems(rows, template="nano")


@pytest.mark.parametrize(("name", "part"), [("openai/gsm8k", "train"), ("openai/gsm8k:test", "test")])
def test_the_hub_set_is_asked_for_by_its_name(monkeypatch, name, part):
    asked = []

    def load_dataset(*names, **options):
        asked.append((*names, options))
        return datasets.Dataset.from_list([CLIPS])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_problems(name)[0]["answer"] == CLIPS["answer"]
    assert asked == [("openai/gsm8k", "main", {"split": part})]


@pytest.mark.parametrize(
    ("template", "rules", "full"),
    [
        ("r1_think", published("simple_grpo"), (1.0, 1.25)),
        ("lm_book", published("lm_book"), (2.0, 0.8)),
        ("rl_from_scratch", published("rl_from_scratch"), (2.0, 1.0)),
        ("verl_gsm8k", published("verl_gsm8k"), (1.0,)),
        ("r1_think", published("r1_blog", GSM8KAnswer())[:2], (1.0, 0.1)),
    ],
)
def test_a_system_pays_its_worked_examples_in_full(template, rules, full):
    rows = generate_problems(200, seed=2)
    completions = [write_completion(row, template) for row in rows]
    golds = [row["answer"] for row in rows]
    wrong = [f"{row['answer'][: row['answer'].rfind('####')]}#### 61" for row in rows]
    for rule, most in zip(rules, full, strict=True):
        assert rule(completions=completions, answer=golds) == pytest.approx([most] * 200)
    assert max(rules[0](completions=completions, answer=wrong)) < 1


def test_a_tokenizer_of_the_examples_gives_every_text_back():
    rows = generate_problems(300, seed=0)
    texts = [write_completion(row, template) for template in COMPLETIONS for row in rows]
    prompts = [apply_template(template, row) for template in COMPLETIONS for row in rows]
    for prompt in prompts:
        texts += [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    tokenizer = build_tokenizer(texts, 60)
    assert len(tokenizer) == tokenizer.vocab_size
    for text in [*texts[::50], "<think>7+1=8</think>\n<answer>60</answer>"]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template(prompts[0], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(f"<system>{prompts[0][0]['content']}<user>")
    assert rendered.endswith("<assistant>")
    assert tokenizer.decode(tokenizer(rendered, add_special_tokens=False)["input_ids"]) == rendered
    with pytest.raises(Exception, match="UNK"):
        tokenizer("61")


def test_a_prefilled_turn_is_continued():
    tokenizer = build_tokenizer(["2 + 2", "<think>"], 9)
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "<think>"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert rendered == "<user>2 + 2<assistant><think>"
