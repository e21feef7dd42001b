"""Run files and command lines with a mistake: one line of error that says what to write instead, and status 2."""

import pytest

from rlox_grpo.cli import main

MODEL = 'model = "./no-such-model"\ntrain_data = "rows.jsonl"\n'
REWARD = '[[rewards]]\nname = "gsm8k"\n'

ROWS = [
    # label, run file, words of the command line, message
    ("no value", "model = \n", (), "run.toml is not TOML: Invalid value (at line 1, column 9): model ="),
    (
        "text without quotes",
        "model = some/model\n" + REWARD,
        (),
        'Invalid value (at line 1, column 9): model = some/model; text needs quotes: model = "some/model"',
    ),
    (
        "a preset without quotes",
        MODEL + "preset = dapo\n" + REWARD,
        (),
        '(at line 3, column 10): preset = dapo; text needs quotes: preset = "dapo"',
    ),
    (
        "a typo",
        MODEL + "learning_rte = 1.0\n" + REWARD,
        (),
        "unknown key 'learning_rte': did you mean 'learning_rate'?",
    ),
    (
        "an option below the rewards",
        MODEL + REWARD + "learning_rate = 1e-5\n",
        (),
        "rewards[0] (gsm8k): GSM8KAnswer.__init__() got an unexpected keyword argument 'learning_rate'; its "
        "arguments are weight, percent, undecided; in a run file, options of the run stand above the first [[rewards]]",
    ),
    (
        "an unknown key of the layout",
        MODEL + REWARD + "[layout]\nnodes = 2\n",
        (),
        "[layout] unknown option 'nodes'; expected trainers, cpus_per_trainer, engines, cpus_per_engine, "
        "tensor_parallel_size, colocate, reference",
    ),
    (
        "one table in place of a list of tables",
        MODEL + '[rewards]\nname = "gsm8k"\n',
        (),
        "got {'name': 'gsm8k'}; write a table for each reward function, below all other keys: [[rewards]] and",
    ),
    (
        "no rewards",
        MODEL,
        (),
        "rewards: expected at least one reward function, an environment or a teacher; write a table for each reward "
        "function, below all other keys: [[rewards]] and",
    ),
    (
        "a boolean group size",
        MODEL + "group_size = true\n" + REWARD,
        (),
        "group_size: input should be a valid integer, got",
    ),
    (
        "resume false in the file",
        MODEL + "resume = false\n" + REWARD,
        (),
        'resume: input should be a valid string, got False; write "never" to start anew, "auto" to continue',
    ),
    ("resume false as a word", MODEL + REWARD, ("--resume", "false"), 'got False; write "never" to start anew'),
    (
        "a table of options",
        MODEL + "[sampling]\ngroup_size = 4\n" + REWARD,
        (),
        "unknown key 'sampling': there is no table [sampling]; write its options without it, above [[rewards]]",
    ),
    ("a misspelt table", MODEL + '[[reward]]\nname = "gsm8k"\n', (), "unknown key 'reward': did you mean 'rewards'?"),
    ("a number as text", MODEL + 'group_size = "8"\n' + REWARD, (), "group_size: input should be a valid integer, got"),
    ("Python's True", MODEL + "guards = True\n" + REWARD, (), "guards = True; write guards = true"),
    ("Python's None", MODEL + "stop = None\n" + REWARD, (), "stop = None; TOML has no None: leave stop out"),
    (
        "a data set's key",
        MODEL + 'dataset = "a.jsonl"\n' + REWARD,
        (),
        "'dataset': pass it to train() as prompts; in a run file it is train_data",
    ),
    ("a reward's name", MODEL + '[[rewards]]\nname = "gsm8"\n', (), "did you mean 'gsm8k'"),
    ("a missing model folder", MODEL + REWARD, (), "model='./no-such-model': no such folder"),
    # These are right: what is refused is the folder of the model, which is looked for after the options are read.
    (
        "options with dashes and Python's booleans are read",
        MODEL + REWARD,
        ("--learning-rate", "1e-5", "--guards", "False", "--max-steps=3"),
        "model='./no-such-model': no such folder",
    ),
    (
        "one text for a list is read",
        MODEL + 'stop = "</answer>"\nlog_to = "console"\n' + REWARD,
        (),
        "model='./no-such-model': no such folder",
    ),
]


@pytest.mark.parametrize(("text", "words", "message"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_run_files(tmp_path, monkeypatch, capsys, text, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert main(["train", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_data_file(tmp_path, capsys, monkeypatch, make_tiny_model, byte_tokenizer):
    make_tiny_model("qwen2", vocab_size=len(byte_tokenizer), eos_token_id=1).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('model = "model"\ntrain_data = "trian.jsonl"\nmax_steps = 1\n' + REWARD)
    assert main(["train", "run.toml"]) == 2
    assert f"the prompts' file 'trian.jsonl' does not exist (here is {tmp_path})\n" in capsys.readouterr().err
