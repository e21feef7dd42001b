"""The command line: parsing, overrides, errors on one line."""

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from word_problems import generate_problems

from rlox_grpo import EvalSet, TrainSource, rewards
from rlox_grpo.cli import _make_parser, main, parse_overrides, parse_reward
from rlox_grpo.cli.evaluate import _list_sets
from rlox_grpo.cli.train import _record_sources
from rlox_grpo.cli.values import import_sets, import_sources
from rlox_grpo.config.run_file import load_data, read_run_file
from rlox_grpo.config.schema import GRPOConfig
from rlox_grpo.config.tiers import COMMON, START
from rlox_grpo.demo import episodes
from rlox_grpo.demo import run as countdown_demo
from rlox_grpo.errors import ConfigError
from rlox_grpo.loss.policies import find_policy_loss
from rlox_grpo.prompts.tasks import countdown, reasoning_gym
from rlox_grpo.prompts.templates import apply_template
from rlox_grpo.rewards.registry import make_rewards
from rlox_grpo.rewards.workers import closing_workers, in_workers
from rlox_grpo.run.recorded import RecordedRun

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_overrides_are_toml_or_text():
    words = [
        "--learning_rate",
        "1e-5",
        "--group-size=4",
        "--stop",
        '["x", "y"]',
        "--output_dir",
        "runs/a",
        "--seed",
        "3",
        "--guards",
        "False",
    ]
    assert parse_overrides(words) == {
        "learning_rate": 1e-5,
        "group_size": 4,
        "stop": ["x", "y"],
        "output_dir": "runs/a",
        "seed": 3,
        "guards": False,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr"], "expected --key value"),
        (["--lr"], "--lr has no value"),
        (["--top-k", "1", "--top_k=2"], "--top_k is given twice, as 1 and 2: it takes one value"),
    ],
)
def test_broken_overrides(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides(words)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "--temperature", "0.6", "model", "--data", "rows.jsonl", "--top-k=5", "--greedy"],
        ["eval", "--greed", "model", "--temperature", "0.6", "--data", "rows.jsonl", "--top-k=5"],
    ],
)
def test_options_of_a_run_may_stand_before_the_arguments_of_the_command(words):
    """argparse would read the value of an option that it does not know as the checkpoint."""
    arguments, rest = _make_parser().parse_known_args(words)
    assert (arguments.checkpoint, arguments.data, arguments.greedy) == (["model"], "rows.jsonl", True)
    assert parse_overrides(rest) == {"temperature": 0.6, "top_k": 5}


def test_arguments_that_a_command_does_not_take(capsys):
    with pytest.raises(SystemExit):
        main(["presets", "--temperature=0.6"])
    assert "rlox-grpo presets: error: unrecognised arguments: --temperature=0.6" in capsys.readouterr().err
    _, rest = _make_parser().parse_known_args(["serve", "--enable-prefix-caching", "model", "--seed", "1"])
    assert rest == ["--enable-prefix-caching", "--seed", "1"]  # vLLM's, with values or without


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "some/model"\ntrain_data = "rows.jsonl"\ngroup_size = 4\n'
        '[[rewards]]\nname = "countdown"\n[[rewards]]\nname = "tag_format"\nweight = 0.1\n'
    )
    return path


def test_a_run_file(run_file):
    origin, config = read_run_file(run_file, {"group_size": 2, "model": "other"})
    assert (origin.model, origin.train_data, origin.n_epochs) == ("other", "rows.jsonl", 1)
    assert config.group_size == 2
    rewards = make_rewards(origin.rewards)
    assert [reward.__name__ for reward in rewards] == ["countdown", "tag_format"] or len(rewards) == 2
    assert rewards[1].weight == 0.1


SOURCES = (
    '[[train]]\nname = "math"\ndata = "rows.jsonl"\nweight = 2.0\ntask = "countdown"\n'
    '[[train]]\nname = "code"\ndata = "b.jsonl"\nrewards = ["exact", {name = "tag_count"}]\nprompt_column = "q"\n'
)


@pytest.fixture
def mixture_file(tmp_path):
    path = tmp_path / "mixture.toml"
    path.write_text(f'model = "some/model"\n[[rewards]]\nname = "countdown"\n{SOURCES}')
    return path


def test_a_run_file_with_sources(mixture_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"nums": [1, 2], "target": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    origin, config = read_run_file(mixture_file, {})
    assert origin.train_data is None
    sources, _ = load_data(origin, config)
    math, code = sources.values()
    assert list(sources) == ["math", "code"]
    assert (math.weight, math.prompts) == (2.0, [{"prompt": countdown.format_chat_prompt([1, 2], 3), **row}])
    assert (code.prompts, code.prompt_column) == ("b.jsonl", "q")
    imported = import_sources(sources, [])
    assert [reward.__name__ for reward in imported["code"].rewards] == ["exact_answer", "tag_count"]
    assert imported["math"].rewards is None


def test_generated_tasks_and_files_are_sources_of_one_run(mixture_file, monkeypatch):
    """The arguments of a table are its own; those of the run are for the generated tasks without any."""
    loaded = []
    monkeypatch.setattr(reasoning_gym, "load_split", lambda *words, **keywords: loaded.append((words, keywords)) or [])
    text = mixture_file.read_text().replace(SOURCES, "")
    tables = '[[train]]\nname = "sums"\ndata = "reasoning_gym:chain_sum"\ndata_args = {size = 5}\n'
    tables += '[[train]]\nname = "gcd"\ndata = "reasoning_gym:gcd"\n[[train]]\nname = "file"\ndata = "a.jsonl"\n'
    mixture_file.write_text(text.replace("[[rewards]]", "data_args = {size = 9}\n[[rewards]]") + tables)
    load_data(*read_run_file(mixture_file, {}))
    assert loaded == [
        (("reasoning_gym:chain_sum", {"size": 5}), {"held_out": False}),
        (("reasoning_gym:gcd", {"size": 9}), {"held_out": False}),
    ]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("", r"train_data and \[\[train\]\] are both missing; write a table for each source"),
        (f'{SOURCES}[[train]]\ndata = "a"\n', r'train\[2\] has no name: write name = "math"'),
        ('[[train]]\nname = "a"\ndata = "a"\n' * 2, r"train\[1\] \(a\): the name 'a' is there twice"),
        ('[[train]]\nname = "a"\n', r"train\[0\] \(a\): its rows are its data"),
        ('[[train]]\nname = "a/b"\ndata = "a"\n', r"train\[0\].name: 'a/b' is not the name of a source"),
        ('[[train]]\nname = ""\ndata = "a"\n', r"train\[0\].name: '' is not the name of a source"),
        ('[[train]]\nname = "a"\ndata = "a"\nweight = -1.0\n', r"train\[0\] \(a\): weight: .*greater than 0, got -1.0"),
        ('[[train]]\nname = "a"\ndata = "a"\nwight = 1.0\n', r"\(a\): unknown option 'wight': did you mean 'weight'"),
        ('[[train]]\nname = "a"\ndata = "a"\ntask = "chess"\n', r"train\[0\] \(a\): task: .*got 'chess'"),
        ('[[train]]\nname = "a"\ndata = "a"\ndata_args = {size = 5}\n', r"\(a\): data_args is ignored: data is 'a'"),
        ('[[train]]\nname = "a"\ndata = "a"\nquota = 3\n', r"the quotas 3 \(a\) sum to 3, and prompts_per_step="),
        ('[[train]]\nname = "a"\ndata = "a"\nmodel = "m"\n', r"\(a\): unknown option 'model'"),
    ],
)
def test_sources_that_cannot_be_meant(mixture_file, tables, message):
    mixture_file.write_text(mixture_file.read_text().replace(SOURCES, tables))
    with pytest.raises(ConfigError, match=message):
        read_run_file(mixture_file, {})


def test_data_beside_sources_and_a_wrong_rule_are_refused(mixture_file):
    with pytest.raises(ConfigError, match=r"train_data and \[\[train\]\] are both there: make train_data a table too"):
        read_run_file(mixture_file, {"train_data": "a.jsonl"})
    sources = {"math": TrainSource("rows.jsonl", rewards=["exakt"])}
    with pytest.raises(ConfigError, match=r"\[\[train\]\] math: rewards\[0\].name is 'exakt'.*'exact'"):
        import_sources(sources, [])


@pytest.mark.parametrize("template", ["lm_book", None])
def test_a_task_gives_rows_their_prompts_unless_a_template_does(run_file, tmp_path, template):
    rows = [dict(row) for row in generate_problems(3, seed=0)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train_data": str(tmp_path / "rows.jsonl"), "eval_data": str(tmp_path / "rows.jsonl")}
    changes = {} if template is None else {"prompt_template": template}
    prompted = [{"prompt": apply_template("r1_think", row), **row} for row in rows]
    assert load_data(*read_run_file(run_file, {**data, **changes, "task": "gsm8k"})) == (
        (prompted, prompted) if template is None else (rows, rows)
    )
    row = {"nums": [1, 2], "target": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    prompted = [{"prompt": countdown.format_chat_prompt([1, 2], 3), **row}]
    assert load_data(*read_run_file(run_file, {**data, **changes, "task": "countdown"})) == (
        (prompted, prompted) if template is None else ([row], [row])
    )
    assert load_data(*read_run_file(run_file, {})) == ("rows.jsonl", None)


SETS = (
    '[[eval]]\nname = "often"\ndata = "a.jsonl"\nsamples = 2\ntemperature = 0.6\nevery = 5\n'
    '[[eval]]\nname = "exact"\ndata = "b.jsonl"\nrewards = ["exact", {name = "tag_count"}]\nstop = "x"\n'
)


def test_a_run_file_with_evaluation_sets(run_file, tmp_path):
    run_file.write_text(run_file.read_text() + SETS)
    origin, config = read_run_file(run_file, {})
    _, sets = load_data(origin, config)
    assert sets == {
        "often": EvalSet("a.jsonl", samples=2, temperature=0.6, every=5),
        "exact": EvalSet("b.jsonl", rewards=["exact", {"name": "tag_count"}], stop="x"),
    }
    imported = import_sets(sets, ())
    assert [rule.__name__ for rule in imported["exact"].rewards] == ["exact_answer", "tag_count"]
    assert imported["often"] == sets["often"]
    resolved = tmp_path / "config.toml"
    resolved.write_text(config.to_toml(origin.model_dump(exclude_none=True)))
    assert read_run_file(resolved, {}) == (origin, config)
    with pytest.raises(ConfigError, match=r"\[\[eval\]\] exact: rewards\[0\].name is 'exct'"):
        import_sets({"exact": EvalSet("b.jsonl", rewards=["exct"])}, ())


def test_a_single_set_of_a_run_file_needs_no_name(run_file):
    run_file.write_text(run_file.read_text() + '[[eval]]\ndata = "a.jsonl"\ntop_k = 5\n')
    assert load_data(*read_run_file(run_file, {}))[1] == EvalSet("a.jsonl", top_k=5)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ('[[eval]]\ndata = "a"\n[[eval]]\nname = "b"\ndata = "b"\n', r"eval\[0\] has no name, and there are 2 sets"),
        ('[[eval]]\nname = "a"\ndata = "a"\n' * 2, r"eval\[1\] \(a\): the name 'a' is there twice"),
        ('[[eval]]\nname = "a"\n', r"eval\[0\] \(a\): its rows are its data"),
        ('[[eval]]\nname = "a b"\ndata = "a"\n', r"eval\[0\].name: 'a b' is not the name of a set"),
        ('[[eval]]\nname = "a"\ndata = "a"\ntemprature = 1.0\n', r"\(a\): unknown option 'temprature': did you mean"),
        ('[[eval]]\nname = "a"\ndata = "a"\ntop_p = 0\n', r"eval\[0\] \(a\): top_p: .*greater than 0"),
        ('[[eval]]\nname = "a"\ndata = "a"\nenvironment = 3\n', r"eval\[0\] \(a\): environment is 3; write module:"),
        ('[[eval]]\nname = "a"\ndata = "a"\nmodel = "m"\n', r"eval\[0\] \(a\): unknown option 'model'"),
        ('[eval]\nname = "a"\ndata = "a"\n', r"eval: .*write a table for each set, below all other keys: \[\[eval\]\]"),
    ],
)
def test_evaluation_sets_that_cannot_be_meant(run_file, tables, message):
    run_file.write_text(run_file.read_text() + tables)
    with pytest.raises(ConfigError, match=message):
        read_run_file(run_file, {})


def test_a_run_records_the_absolute_paths_of_its_reward_models(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("judge", "other", "rows"):
        (tmp_path / name).mkdir()
    model = "{name = 'reward_model', path = 'judge'}"
    lines = f"[[rewards]]\nname = 'composite'\nrules = ['exact', {model}]\n[[rewards]]\nname = 'reward_model'\n"
    table = f"[[eval]]\ndata = 'rows'\nrewards = ['exact', {model}, {{name = 'reward_model', path = 'owner/hub'}}]\n"
    run_file.write_text(f"{run_file.read_text()}\n{lines}path = 'other'\n{table}")
    origin, _ = read_run_file(run_file, {})
    recorded = _record_sources(origin, str(run_file)).evaluation
    judge = {"name": "reward_model", "path": str(tmp_path / "judge")}
    assert recorded["rewards"][-2]["rules"] == ["exact", judge]
    assert recorded["rewards"][-1]["path"] == str(tmp_path / "other")
    hub = {"name": "reward_model", "path": "owner/hub"}
    assert recorded["eval"] == [{"data": str(tmp_path / "rows"), "rewards": ["exact", judge, hub]}]


def test_a_run_file_has_evaluation_data_in_a_single_place(run_file):
    run_file.write_text(run_file.read_text() + SETS)
    with pytest.raises(ConfigError, match=r"eval_data and \[\[eval\]\] are both there"):
        read_run_file(run_file, {"eval_data": "c.jsonl"})


def test_the_resolved_file_can_be_read_again(run_file, tmp_path):
    origin, config = read_run_file(run_file, {})
    resolved = tmp_path / "config.toml"
    resolved.write_text(config.to_toml(origin.model_dump(exclude_none=True)))
    assert read_run_file(resolved, {}) == (origin, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1.0}, "unknown key 'learning_rat': did you mean 'learning_rate'"),
        ({"train_dat": "x"}, "did you mean 'train_data'"),
        ({"n_epochs": 0}, "n_epochs"),
        ({"rewards": []}, r"rewards: expected at least one .*; write a table for each .* \[\[rewards\]\]"),
        ({"rewards": {"name": "gsm8k"}}, r"rewards: .*\[\[rewards\]\]"),
        ({"num_train_epochs": 2}, "pass n_epochs to train"),
        ({"n_epochs": True}, "n_epochs: .*valid integer, got True"),
        ({"task": "gsm8"}, "task"),
    ],
)
def test_keys_that_cannot_be_meant(run_file, change, message):
    with pytest.raises(ConfigError, match=message):
        read_run_file(run_file, change)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "cuntdown"}, "did you mean 'countdown'"),
        ({}, r"rewards\[0\] has no name"),
        ({"name": "tag_format", "wieght": 1.0}, r"rewards\[0\] \(tag_format\).*wieght"),
        (
            {"name": "gsm8k", "learning_rate": 1.0},
            r"learning_rate.*; in a run file, .* stand above the first \[\[rewards",
        ),
        ({"name": "math:fsum", "seed": 1}, r"takes no arguments in the file, got seed: .* above the first \[\[rewards"),
        ({"name": "math:fsum", "weight": 0.1}, "got weight: .*; reward_weights there lists the weight of each"),
        ({"name": "no_such_module:f"}, "No module named 'no_such_module'"),
        ({"name": "math:no_such_name"}, "no_such_name"),
        ({"name": "math:pi"}, r"rewards\[0\] \(math:pi\) is 3.14.*, expected a function"),
        ({"name": "fractions:Fraction"}, r"is a class, expected a function or an instance: create one in fractions"),
        ({"name": "rlox_grpo.rewards:MathAnswer"}, r'is a rule of this library: write name = "math"'),
        ({"name": "rlox_grpo.rewards:published"}, r'write name = "published"'),
        ({"name": "cosine_length", "rule": "mth"}, r"rewards\[0\].rule.name is 'mth': did you mean 'math'"),
        ({"name": "cosine_length", "rule": 3}, r"rewards\[0\].rule is 3, expected a rule's name or a table"),
        ({"name": "cosine_length", "rule": {"name": "published", "system": "nano_aha"}}, "gives 2 rules: expected one"),
        ({"name": "composite", "rules": "math"}, r"rewards\[0\].rules is 'math', expected a list"),
        ({"name": "composite", "rules": ["math", {}]}, r"rewards\[0\].rules\[1\] has no name"),
        ({"name": "exact", "case_sensitive": "no"}, r"\(exact\): case_sensitive is 'no', expected a valid boolean"),
        ({"name": "math", "tolerance": "0.1"}, r"\(math\): tolerance is '0.1', expected a valid number"),
        ({"name": "gsm8k", "weight": True}, r"\(gsm8k\): weight is True, expected a valid number"),
        ({"name": "composite", "rules": ["math"], "weights": ["1"]}, r"weights is \['1'\], expected a valid number"),
        ({"name": "reasoning_gym:chain_sum", "workers": 1.5}, "workers is 1.5, expected a valid integer"),
    ],
)
def test_rewards_that_do_not_exist(table, message):
    with pytest.raises(ConfigError, match=message):
        make_rewards([table])


def test_a_published_reward_is_all_its_parts():
    rewards = make_rewards([{"name": "published", "system": "grpo_zero"}, {"name": "reasoning_length", "weight": 0.5}])
    assert [(reward.__name__, reward.weight) for reward in rewards] == [
        ("published_countdown", 1.0),
        ("tag_format", 0.1),
        ("reasoning_length", 0.5),
    ]


def test_a_users_own_reward_by_import_path():
    (reward,) = make_rewards([{"name": "math:fsum"}])
    import math

    assert reward is math.fsum


def test_rules_inside_rules():
    tables = [
        {"name": "cosine_length", "rule": {"name": "math", "tolerance": 0.01}, "max_length": 50},
        {"name": "composite", "rules": ["gsm8k", {"name": "tag_format", "weight": 0.5}], "weights": [1.0, 0.25]},
        {"name": "published", "system": "open_r1", "accuracy": "gsm8k"},
    ]
    cosine, composite, *published = make_rewards(tables)
    assert cosine == rewards.CosineLength(rule=rewards.MathAnswer(tolerance=0.01), max_length=50)
    assert composite.rules == (rewards.GSM8KAnswer(), rewards.TagFormat(weight=0.5))
    assert composite.weights == (1.0, 0.25)
    assert published[0] == rewards.GSM8KAnswer()


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A folder with a reward in ``own_rewards_of_a_test.py``, which imports its neighbour, and a file named as json."""
    (tmp_path / "neighbour_of_a_test.py").write_text("SCORE = 0.5\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('it stands before the installed modules')\n")
    (tmp_path / "own_rewards_of_a_test.py").write_text(
        "import json\nfrom neighbour_of_a_test import SCORE\n\n"
        "def half(completions):\n    return [SCORE for _ in completions]\n"
    )
    yield tmp_path
    for name in ("neighbour_of_a_test", "own_rewards_of_a_test"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("../my_rw:r", None, "'../my_rw' is no name of a module: write it without a path and without .py"),
        ("my_rw.py:r", None, "No module named 'my_rw'"),
        ("..:r", None, "'..' is no name of a module"),
        ("broken_of_a_test:r", "def r(:\n", "failed with SyntaxError: invalid syntax (broken_of_a_test.py, line 1)"),
        ("broken_of_a_test:r", "x = 1\ny = {}['z']\n", "failed with KeyError: 'z' (broken_of_a_test.py, line 2)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(name, source, message, tmp_path):
    if source is not None:
        (tmp_path / "broken_of_a_test.py").write_text(source)
    with pytest.raises(ConfigError, match=r"^rewards\[0\] \(") as caught:
        make_rewards([{"name": name}], [tmp_path])
    assert message in str(caught.value)


def test_a_module_beside_the_run_file_is_found_and_the_import_path_is_put_back(own_module):
    before = list(sys.path)
    table = {"name": "own_rewards_of_a_test:half"}
    with pytest.raises(ConfigError, match="No module named 'own_rewards_of_a_test'"):
        make_rewards([table])
    (reward,) = make_rewards([table], [own_module])
    assert reward(["a", "b"]) == [0.5, 0.5]
    assert sys.path == before
    (inside,) = in_workers([reward], 30.0, 1, "stop")
    with closing_workers([inside]):
        assert inside(completions=["a"]) == [0.5]  # a worker is another process: it has to find the module too


def test_rewards_of_the_command_line():
    assert parse_reward("math") == {"name": "math"}
    assert parse_reward(" {name = 'exact', tag = 'answer'}") == {"name": "exact", "tag": "answer"}
    with pytest.raises(ConfigError, match=r"--reward '\{name' is not a TOML table"):
        parse_reward("{name")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            '[[rewards]]\nname = "math"\nmodel = "m"\ntrain_data = "r"\n',
            "model stands below [[rewards]], train_data stands",
        ),
        ('model = "m"\n[[rewards]]\nname = "math"\ntrain_data = "r"\n', "train_data stands below [[rewards]]"),
        ('model = "m"\ntrain_data = "r"\n[layout]\ntrainers = 2\ngroup_size = 4\n', "group_size stands below [layout]"),
    ],
)
def test_keys_that_toml_reads_into_a_table(document, message, run_file):
    run_file.write_text(document)
    with pytest.raises(ConfigError) as caught:
        read_run_file(run_file, {})
    assert message in str(caught.value)
    assert "write the keys of the run above the first table" in str(caught.value)


def test_a_run_file_with_a_byte_order_mark(run_file):
    before = read_run_file(run_file, {})
    run_file.write_bytes(b"\xef\xbb\xbf" + run_file.read_bytes())
    assert read_run_file(run_file, {}) == before


def test_a_run_file_without_output_dir_gets_a_folder_by_its_name(run_file):
    assert read_run_file(run_file, {})[1].output_dir == "runs/run"
    assert read_run_file(run_file, {"output_dir": "mine"})[1].output_dir == "mine"
    assert GRPOConfig().output_dir is None


def test_a_run_file_without_rewards(run_file):
    run_file.write_text('model = "m"\ntrain_data = "rows.jsonl"\n')
    with pytest.raises(ConfigError) as caught:
        read_run_file(run_file, {})
    assert str(caught.value) == (
        f"{run_file}: rewards: expected at least one reward function, an environment or a teacher; write a table for "
        'each reward function, below all other keys: [[rewards]] and then name = "gsm8k"'
    )


def test_options_lists_and_shows(capsys):
    assert main(["options", "--tier", "all"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in GRPOConfig.model_fields)
    of_tiers = []
    for tier in ("start", "common", "special"):
        assert main(["options", "--tier", tier]) == 0
        shown = capsys.readouterr().out
        of_tiers += [name for name in GRPOConfig.model_fields if f"\n  {name} " in shown]
    assert sorted(of_tiers) == sorted(GRPOConfig.model_fields)  # each in one tier
    assert (len(START) <= 12, len(COMMON) <= 40) == (True, True)
    assert main(["options"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in GRPOConfig.model_fields if f"\n  {name} " in shown] == of_tiers[: len(START)]
    assert main(["options", "clip_high"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "clip_high: Upper clipping range ε: the ratio is clipped at 1 + clip_high.",
        "stage: Loss",
        "default: 0.2",
        "values: number ≥ 0",
        "source: PPO, arXiv:1707.06347, section 6.1",
        "a resumed run may change it: no",
        "TRL: epsilon_high",
        "verl: clip_ratio_high",
    ):
        assert f"{line}\n" in shown
    assert "dapo 0.28" in shown
    assert main(["options", "beta"]) == 2
    assert "unknown option 'beta': did you mean 'kl_coef'" in capsys.readouterr().err


def test_options_lists_those_with_a_word(capsys):
    assert main(["options", "LoRA"]) == 0
    found = capsys.readouterr().out
    assert "  lora_rank = 0" in found
    assert "  group_size" not in found
    assert main(["options", "checkpointing"]) == 0  # a part of a name
    assert "  gradient_checkpointing = " in capsys.readouterr().out
    assert main(["options", "AdamW"]) == 0  # a word of a meaning
    assert "  weight_decay = " in capsys.readouterr().out
    assert main(["options", "no_such_word"]) == 2


def test_options_lists_those_of_a_value_a_stage_or_a_source(capsys):
    for word, listed, left_out in (
        ("gspo_token", "policy_loss", "kl_coef"),
        ("sampling", "group_size", "kl_coef"),
        ("TR-DPO", "reference_mix", "kl_coef"),
    ):
        assert main(["options", word]) == 0
        found = capsys.readouterr().out
        assert f"\n  {listed} = " in found
        assert f"\n  {left_out} = " not in found
    assert main(["options", "grpo_zero"]) == 2
    assert "'grpo_zero' is a preset: set preset='grpo_zero'; `rlox-grpo presets grpo_zero`" in capsys.readouterr().err


def test_options_takes_several_names(capsys):
    shown = []
    for name in ("clip_high", "lora"):
        assert main(["options", name]) == 0
        shown.append(capsys.readouterr().out)
    assert main(["options", "clip-high", "lora"]) == 0
    assert capsys.readouterr().out == "\n".join(shown)
    assert main(["options", "lerning_rate", "clip_high", "beta"]) == 2
    both = capsys.readouterr()
    assert both.out.strip() == shown[0].strip()
    assert both.err == (
        "rlox-grpo: unknown option 'lerning_rate': did you mean 'learning_rate'?\n"
        "unknown option 'beta': did you mean 'kl_coef'? (TRL's beta)\n"
    )


def test_output_that_nobody_reads_any_more_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlox_grpo", "options"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_the_options_page_is_up_to_date(capsys):
    assert main(["options", "--markdown"]) == 0
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    assert page == capsys.readouterr().out, "run: rlox-grpo options --markdown > docs/reference/options.md"


def test_train_help_lists_the_options_of_a_first_run_by_group(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "rlox-grpo options" in " ".join(shown.split())
    assert "--ray ADDRESS" in shown
    groups = shown.partition("options of a run")[2]
    assert groups.index("\nSampling:") < groups.index("\n  group_size = 8    integer ≥ 1\n")
    assert all(f"\n  {name} = " in groups for name in START)
    assert "rlox-grpo options --tier common" in groups
    assert "\n      Weight β of the KL penalty against the reference policy.\n" in groups


def test_presets_lists_and_shows(capsys):
    assert main(["presets"]) == 0
    assert "dr_grpo" in capsys.readouterr().out
    assert main(["presets", "dr_grpo"]) == 0
    shown = capsys.readouterr().out
    assert "arXiv:2503.20783" in shown
    assert "loss_aggregation = 'fixed_length'" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["presets", "dr_grp"], "did you mean 'dr_grpo'"),
        (["train", "no.toml"], "cannot read the configuration no.toml"),
        (["report", "no/such/run"], "no/such/run"),
        (["memory", "./no"], "model='./no': no such folder"),
        (["eval", "model", "--greedy", "--samples", "8"], "--greedy ignores --samples"),
        (["eval", "model", "--greedy", "--temperature", "0.5"], "--greedy ignores --temperature"),
        (["eval", "model", "--samples", "2", "--eval_samples", "4"], "--samples and --eval_samples are both there"),
        (
            ["eval", "model", "--data", "rows.jsonl", "--data-args", "{held_out = 3}"],
            "--data-args is ignored: the data is 'rows.jsonl', not reasoning_gym:<task>",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlox-grpo: ")
    assert message in error
    assert "Traceback" not in error


def test_the_demo_imports_a_loss_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "loss_of_a_demo.py").write_text("def soft_clip(inputs):\n    return inputs.ratios\n")
    monkeypatch.chdir(tmp_path)
    losses = []
    monkeypatch.setattr(
        countdown_demo, "run_demo", lambda *_, settings, **__: losses.append(find_policy_loss(settings["policy_loss"]))
    )
    assert main(["demo", "--policy_loss", "loss_of_a_demo:soft_clip"]) == 0
    assert losses == [sys.modules.pop("loss_of_a_demo").soft_clip]


@pytest.mark.parametrize("task", ["countdown", "guess_the_number"])
def test_the_demo_refuses_a_wrong_option_before_its_warm_start(task, tmp_path, monkeypatch, capsys):
    for module in (countdown_demo, episodes):
        monkeypatch.setattr(module, "warm_start", lambda *given, **settings: pytest.fail("the warm start began"))
    for word, message in (
        ("--max_step", "unknown option 'max_step': did you mean 'max_steps'?"),
        ("--model", "unknown option 'model'"),
    ):
        assert main(["demo", "--task", task, "--out", str(tmp_path), word, "2"]) == 2
        assert message in capsys.readouterr().err


def list_one_value_arguments():
    """Every argument of every command that takes one value, as argparse's own table has it."""
    (commands,) = (
        action for action in _make_parser()._actions if hasattr(action, "choices") and action.dest == "command"
    )
    for command, parser in commands.choices.items():
        for action in parser._actions:
            if action.option_strings and action.nargs is None and not isinstance(action, argparse._AppendAction):
                yield command, action.option_strings[-1], next(iter(action.choices or ("1",)))


@pytest.mark.parametrize(("command", "flag", "value"), list(list_one_value_arguments()))
def test_an_argument_with_one_value_is_refused_when_it_is_given_twice(command, flag, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, flag, value, flag, value, "x", "y"])
    assert f"argument {flag}: given twice" in capsys.readouterr().err


def test_eval_names_data_that_is_given_twice(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "model", "--data", "none.jsonl", "--data", "rows.jsonl", "--reward", "math", "--reward", "gsm8k"])
    assert "argument --data: given twice, as 'none.jsonl' and 'rows.jsonl'" in capsys.readouterr().err


def test_eval_takes_the_set_of_the_hub_that_the_run_had():
    sources = {"task": "gsm8k", "eval_data": "openai/gsm8k:test", "rewards": [{"name": "gsm8k"}]}
    nothing = RecordedRun({}, {})
    assert _list_sets(RecordedRun({}, sources), nothing, True)[""].prompts == "openai/gsm8k:test"
    for other in ({"task": None}, {"eval_data": "openai/other:test"}):
        with pytest.raises(ConfigError, match="is not there: pass --data"):
            _list_sets(RecordedRun({}, {**sources, **other}), nothing, True)


@pytest.mark.parametrize("flags", [[], ["--cpu"]])
def test_memory_estimates_the_usual_precision_for_dtype_auto(make_tiny_model, tmp_path, capsys, flags):
    make_tiny_model("qwen2").config.save_pretrained(tmp_path)
    words = ["memory", str(tmp_path), "--max_new_tokens", "65536", *flags]
    assert main(words) == 0
    usual = capsys.readouterr().out
    assert main([*words, "--dtype", "auto"]) == 0
    assert capsys.readouterr().out == usual


def test_memory_counts_a_teacher(make_tiny_model, tmp_path, capsys):
    make_tiny_model("qwen2", vocab_size=2**20, hidden_size=64).config.save_pretrained(tmp_path / "teacher")
    make_tiny_model("qwen2").config.save_pretrained(tmp_path / "policy")
    words = ["memory", str(tmp_path / "policy"), "--teacher", str(tmp_path / "teacher"), "--cpu"]
    assert main(words) == 0
    (_, row) = capsys.readouterr().out.splitlines()[-2:]
    assert row.split()[5] == "0.5"  # the column reference: 2 · 2^20 · 64 float32 weights are 0.5 GiB
    assert main([*words, "--teacher_offload", "true"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[5] == "0.0"
    assert main([*words[:2], "--teacher", "./none", "--cpu"]) == 2
    assert "teacher='./none': no such folder" in capsys.readouterr().err


def test_memory_counts_a_reward_model(make_tiny_model, tmp_path, capsys):
    settings = make_tiny_model("qwen2", vocab_size=2**20, hidden_size=64).config
    settings.num_labels = 1
    settings.save_pretrained(tmp_path / "scorer")
    make_tiny_model("qwen2").config.save_pretrained(tmp_path / "policy")
    words = ["memory", str(tmp_path / "policy"), "--cpu", "--reward-model"]
    assert main([*words, str(tmp_path / "scorer")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[5] == "0.3"  # 2^20 · 64 float32 weights, without a head
    assert main([*words, "./none"]) == 2
    assert "--reward-model './none': expected a folder or a hub id of a reward model" in capsys.readouterr().err


def test_data_that_are_missing_are_named_before_the_model_is_loaded(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    head, reward = f'model = "{tmp_path}/none"\n', '[[rewards]]\nname = "exact"\n'
    for data in (
        f'train_data = "{tmp_path}/absent.jsonl"\n{reward}',
        f'train_data = "{rows}"\neval_data = "{tmp_path}/absent.jsonl"\n{reward}',
        f'{reward}[[train]]\nname = "one"\ndata = "{tmp_path}/absent.jsonl"\n',
    ):
        (tmp_path / "run.toml").write_text(head + data)
        assert main(["train", str(tmp_path / "run.toml")]) == 2
        assert "absent.jsonl' does not exist" in capsys.readouterr().err


def test_memory_of_the_folder_of_a_run_names_its_newest_checkpoint(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    assert main(["memory", str(tmp_path)]) == 2
    assert f"it is the folder of a run: pass {str(checkpoint)!r}" in capsys.readouterr().err


def test_unknown_words_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["presets", "--verbos"])
    assert "unrecognised arguments: --verbos" in capsys.readouterr().err


def test_serve_without_vllm_names_the_extra(capsys, monkeypatch):
    import importlib.metadata

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["serve", "model", "--tensor-parallel-size", "2"]) == 2
    assert "pip install vllm (the extra 'vllm' of rlox-grpo)" in capsys.readouterr().err


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("words", [[], ["--no-fp32-lm-head"]])
def test_serve_gives_a_tied_model_an_output_layer_of_its_own(is_tied, words, make_tiny_model, tmp_path, monkeypatch):
    """And float32 logits unless they are not wanted: vLLM takes one argument with all changes of the config."""
    from rlox_grpo.rollout.engines.vllm import server_process
    from rlox_grpo.rollout.engines.vllm.serve import find_device_settings

    make_tiny_model("qwen2", tie_word_embeddings=is_tied).config.save_pretrained(tmp_path)
    expected = {"tie_word_embeddings": False} if is_tied else {}
    expected |= {} if words else {"head_dtype": "float32"}
    found, _ = find_device_settings(["--model", str(tmp_path), *words])
    given = [json.loads(after) for word, after in pairwise(found) if word == "--hf-overrides"]
    assert given == ([expected] if expected else [])
    assert ("dummy" in found) is is_tied
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(server_process, "fork_engine", lambda: None)
    monkeypatch.setattr("sys.argv", ["server", "--model", str(tmp_path), *words])
    server_process.use_device_settings()
    assert "--no-fp32-lm-head" not in sys.argv
    assert sys.argv[-2:] == ["--model", str(tmp_path)]


def test_serve_refuses_a_port_that_is_taken(capsys, monkeypatch):
    import socket

    from rlox_grpo.rollout.engines.vllm import serve

    monkeypatch.setattr(serve, "check_vllm_version", lambda: None)
    monkeypatch.setenv("RLOX_GRPO_SERVER_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "model", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_check_says_that_all_rows_fit(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "3 + 3?", "answer": "6"}\n')
    assert main(["check", str(file), "--reward", "math_answer", "--reward", "{name='math', tolerance=0.1}"]) == 0
    assert "all 2 rows fit math_answer" in capsys.readouterr().out


def test_check_names_every_row_whose_gold_cannot_be_read(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    answers = ["4", r"\\int_0^1 x dx", "6", r"\\lim_{x\\to 0} x"]
    file.write_text("".join(f'{{"answer": "{answer}"}}\n' for answer in answers))
    assert main(["check", str(file), "--reward", "math"]) == 2
    error = capsys.readouterr().err
    assert "answer[1] is" in error
    assert "answer[3] is" in error
    assert "2 of 4 golds cannot be read" in error


def test_check_reads_rows_as_training_does(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2 + 2?", "answer": "4", "video": "a.mp4"}\n')
    arguments = ["check", str(file), "--reward", "math"]
    assert main(arguments) == 2
    assert "prompts[0], column 'video' holds the path 'a.mp4'" in capsys.readouterr().err
    renamed = [*arguments, "--columns", "{drawn='video'}"]
    assert main([*renamed, "--prompt_column", "problem"]) == 2
    assert "prompt_column='problem': prompts[0] has no 'problem' column" in capsys.readouterr().err
    assert main([*renamed, "--prompt_template", "countdown_think"]) == 2
    assert "prompt_template 'countdown_think' reads nums" in capsys.readouterr().err
    assert main([*renamed, "--prompt_template", "boxed"]) == 0


def test_check_takes_pictures_as_training_of_a_vision_model_does(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "2 + 2?", "answer": "4", "images": ["a.png"]}\n')
    assert main(["check", str(file), "--reward", "math"]) == 0
    assert "all 1 rows fit math" in capsys.readouterr().out


def test_check_names_a_missing_column(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "2 + 2?"}\n')
    assert main(["check", str(file), "--reward", "gsm8k"]) == 2
    assert "'answer' is missing" in capsys.readouterr().err
