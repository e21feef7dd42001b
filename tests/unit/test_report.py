import json
import os
import re
import shutil
import time
from html import unescape
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import write_run

from rlox_grpo.cli import main
from rlox_grpo.run.guards import write_warnings
from rlox_grpo.run.report import read, watch_report, write_comparison, write_report
from rlox_grpo.run.report.charts import Chart, _running_means, _thin, compare, draw
from rlox_grpo.run.report.text import MAX_CHARACTERS, escape, model_text, number, visible

UPLOT = Path(find_spec("uplot").origin).parent / "static" / "uPlot.iife.js"
VOID = {"meta", "link", "br", "img", "input", "wbr"}
HOSTILE = "</pre></style></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&amp;"
UNPRINTABLE = "a\x00b\x1b[31m\r\x85\ud800\u202eevil\u2066\u2028 שלום 👩‍🔬"


class Page(HTMLParser):
    """A page as a browser's parser would see it: tags balanced, attributes, text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text.append(data)

    def all(self, name):
        return [value for key, value in self.attributes if key == name]


def read_tables(html):
    """Each table as ``{row: {column: text}}``."""

    def text(cell):
        return unescape(re.sub(r"<[^>]*>", "", cell))

    tables = []
    for table in re.findall(r"<table>.*?</table>", html, re.DOTALL):
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", table)]
        head = list(map(text, rows[0][1:]))
        assert all(len(row) == len(rows[0]) for row in rows)
        tables.append({text(row[0]): dict(zip(head, map(text, row[1:]), strict=True)) for row in rows[1:]})
    return tables


def page_of(run_dir):
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "countdown-first")


def test_a_whole_run(whole_run):
    page = page_of(whole_run)
    text = " ".join(page.text)
    for title in (
        "Held-out accuracy",
        "Reward components",
        "Unscored samples",
        "Completion length",
        "Zero-variance groups",
        "KL",
        "Clipped tokens",
        "Gradient norm",
        "Learning rate",
        "Time of each reward",
        "Time of a step",
        "Before and after",
        "Training completions",
        "Configuration",
    ):
        assert title in text
    assert "Not in this folder" not in text
    assert "countdown-first" in text
    assert "loss.clip_high" in text
    assert re.search(r"3\.\d% → 7\d\.\d%", text)  # the accuracy that the generator was told to reach
    assert "of 150" in text
    assert "countdown: no answer" in text
    assert "countdown: undecided" not in text  # it never happened
    assert page.tags.count("figure") == len(page.all("data-chart")) > 12
    assert all(label.strip() for label in page.all("aria-label"))


def test_the_page_asks_nothing_of_the_network(whole_run):
    html = write_report(whole_run).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert page.all("src") == []
    assert all(href.startswith("#") for href in page.all("href"))
    library = UPLOT.read_text(encoding="utf-8")
    assert html.count(library) == 1
    own = html.replace(library, re.sub(r"//.*", "", library))  # its comments have links
    assert not re.search(r"url\(|@import|\bfetch\(|XMLHttp", own)
    assert not re.search(r"https?://", html.replace(library, ""))
    assert not re.search(r"\beval\(|\bFunction\(|innerHTML|insertAdjacent|document\.write", html)
    assert "default-src 'none'" in html
    assert len(html) < 1_000_000


def test_uplots_notice_is_on_the_page(whole_run):
    html = write_report(whole_run).read_text(encoding="utf-8")
    assert "Leon Sorokin" in html
    assert "MIT Licensed" in html


def test_charts_without_uplot_name_the_package_to_install(whole_run, monkeypatch):
    monkeypatch.setattr("rlox_grpo.run.report.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install uplot-python"):
        write_report(whole_run)


def test_every_link_and_chart_has_its_target(whole_run):
    page = page_of(whole_run)
    assert {href[1:] for href in page.all("href")} <= set(page.all("id"))
    for data in map(json.loads, page.all("data-chart")):
        assert all(len(series["values"]) == len(data["steps"]) for series in data["series"])


def test_values_that_were_not_finite_leave_a_gap(whole_run):
    data = next(json.loads(data) for data in page_of(whole_run).all("data-chart") if '"name":"KL"' in data)
    values = dict(zip(data["steps"], data["series"][0]["values"], strict=True))
    assert values[31] is None  # the generator reports NaN there
    assert values[30] > 0


@pytest.mark.parametrize("hostile", [HOSTILE, UNPRINTABLE])
def test_what_a_run_says_is_text_and_nothing_else(tmp_path, whole_run, hostile):
    page, plain = page_of(write_run(tmp_path / "run", hostile=hostile)), page_of(whole_run)
    assert set(page.tags) == set(plain.tags)
    assert page.tags.count("script") == 1
    assert {name for name, _ in page.attributes} == {name for name, _ in plain.attributes}
    text = "".join(page.text)
    if hostile == HOSTILE:
        assert HOSTILE in text  # read back exactly as it was written
    else:
        data = [json.loads(chart) for chart in page.all("data-chart")]
        names = "".join(series["name"] for chart in data for series in chart["series"])
        assert "⟨U+202E⟩evil" in names
        assert "\u202e" not in names
        assert "a⟨U+0000⟩b⟨U+001B⟩[31m⟨U+000D⟩⟨U+0085⟩⟨U+D800⟩⟨U+202E⟩evil⟨U+2066⟩⟨U+2028⟩ שלום 👩‍🔬" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_samples_that_became_right_or_wrong_come_first(tmp_path):
    """Two prompts of three samples; the first reward decides, and one sample has none."""
    (tmp_path / "completions").mkdir()
    for step, rewards in ((0, [[0, 1, 1], [0, None, 0]]), (8, [[1, 1, 0], [1, 1, 0.5]])):
        lines = [
            {"step": step, "prompt": f"p{prompt}", "completion": f"s{step} p{prompt} {index}"}
            | {"rewards": {"answer": reward, "format": 1.0}, "reward": 1.0}
            for prompt, row in enumerate(rewards)
            for index, reward in enumerate(row)
        ]
        path = tmp_path / "completions" / f"eval_step_{step:06d}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = " ".join("".join(page_of(tmp_path).text).split())
    assert "Of 6 samples in both files, 2 became right and 1 became wrong" in text
    learned = text.index("Wrong before, right after: 2")
    lost, firsts = text.index("Right before, wrong after: 1"), text.index("All 2 held-out prompts")
    assert learned < lost < firsts
    assert re.findall(r"s\d p\d \d", text[learned:lost]) == ["s0 p0 0", "s8 p0 0", "s0 p1 0", "s8 p1 0"]
    assert re.findall(r"s\d p\d \d", text[lost:firsts]) == ["s0 p0 2", "s8 p0 2"]
    assert re.findall(r"s\d p\d \d", text[firsts:]) == ["s0 p0 0", "s8 p0 0", "s0 p1 0", "s8 p1 0"]


def test_every_evaluation_set_has_its_interval_its_difference_and_its_samples(tmp_path):
    (tmp_path / "completions").mkdir()
    for step, reward in ((0, 0), (8, 1)):
        for name in ("code", "math"):
            line = {"prompt": name, "completion": f"{name} {step}", "rewards": {"answer": reward}, "reward": reward}
            path = tmp_path / "completions" / f"eval_{name}_step_{step:06d}.jsonl"
            path.write_text(json.dumps(line) + "\n")
    first = {"step": 0, "math/accuracy": 0.25, "math/accuracy_low": 0.2, "math/accuracy_high": 0.3, "code/accuracy": 0}
    last = {"step": 8, "math/accuracy": 0.5, "math/accuracy_low": 0.4, "math/accuracy_high": 0.6, "code/accuracy": 1}
    last |= {"math/accuracy_vs_start": 0.25, "math/accuracy_vs_start_low": -0.1, "math/accuracy_vs_start_high": 0.6}
    (tmp_path / "evaluations.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")
    page = page_of(tmp_path)
    text = " ".join(" ".join(page.text).split())
    row = "math 0.250 [0.200, 0.300], step 0 0.500 [0.400, 0.600], step 8 +0.250 [-0.100, +0.600] —"
    assert row in text
    assert "code 0.000, step 0 1.000, step 8 — —" in text
    code, math = text.index("Set code"), text.index("Set math")
    assert text[code:math].count("became right") == text[math:].count("became right") == 1
    assert re.findall(r"(?:code|math) [08]\b", text[math:])[:2] == ["math 0", "math 8"]


def charts_of(page):
    """The data of each chart by its title."""
    shown = re.findall(r'<figure class="chart"><figcaption><h3>(.*?)</h3>.*?data-chart="(.*?)"', page, re.DOTALL)
    return {re.sub(r"<wbr>", "", title): json.loads(unescape(data)) for title, data in shown}


def write_evaluations(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_evaluation_set_has_its_curve_with_a_band_and_its_difference_to_the_start(tmp_path):
    math = {"math/accuracy": 0.25, "math/accuracy_low": 0.2, "math/accuracy_high": 0.3, "math/pass@4": 0.5}
    code = {"code/accuracy": 0.0, "code/mean_reward": 0.5, "code/mean_reward_low": 0.4, "code/mean_reward_high": 0.6}
    change = {"math/accuracy_vs_start": 0.25, "math/accuracy_vs_start_low": -0.1, "math/accuracy_vs_start_high": 0.6}
    graded = {"code/rewards/judge": 0.5}
    write_evaluations(
        tmp_path,
        [{"step": 0, **math, **code, **graded}, {"step": 5, **graded}, {"step": 8, **math, **change, **code, **graded}],
    )
    html = write_report(tmp_path).read_text(encoding="utf-8")
    charts = charts_of(html)
    assert [title for title in charts if title.startswith(("math:", "code:"))] == [
        *("math: accuracy", "math: difference to the start", "code: mean reward"),
    ]
    accuracy, passed = charts["math: accuracy"]["series"]
    assert accuracy == {
        "name": "accuracy",
        "values": [0.25, None, 0.25],
        "low": [0.2, None, 0.2],
        "high": [0.3, None, 0.3],
    }
    assert passed == {"name": "pass@4", "values": [0.5, None, 0.5]}
    (difference,) = charts["math: difference to the start"]["series"]
    assert (difference["values"], difference["low"], difference["high"]) == (
        *([None, None, 0.25], [None, None, -0.1], [None, None, 0.6]),
    )
    (reward,) = charts["code: mean reward"]["series"]
    assert (reward["low"], reward["high"]) == ([0.4, None, 0.4], [0.6, None, 0.6])
    (table,) = (table for table in read_tables(html) if "accuracy" in table.get("8", {}))
    assert table["8"] == {"accuracy": "25.0% [20.0%, 30.0%]", "pass@4": "50.0%"}


def test_the_set_without_a_name_has_a_band(tmp_path):
    write_evaluations(tmp_path, [{"step": 0, "accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}])
    (series,) = charts_of(write_report(tmp_path).read_text(encoding="utf-8"))["Accuracy"]["series"]
    assert (series["low"], series["high"]) == ([0.4], [0.6])


@pytest.mark.parametrize("sets", [("",), ("accuracy_check/", "a_vs_b/")])
def test_only_the_accuracy_of_a_set_is_drawn_as_accuracy(tmp_path, sets):
    """A reward, an environment's metric and a set may have any name."""
    measured = {"accuracy": 0.5, "mean_reward": 0.7, "mean_length": 300.0, "time_s": 9.0}
    measured |= {"rewards/accuracy": 0.5, "rewards/mean_reward": 0.2, "environment/accuracy": 3.0}
    write_evaluations(tmp_path, [{"step": 0, **{f"{name}{key}": measured[key] for name in sets for key in measured}}])
    charts = charts_of(write_report(tmp_path).read_text(encoding="utf-8"))
    titles = {f"{name.removesuffix('/')}: accuracy" if name else "Accuracy" for name in sets}
    assert {title for title in charts if ": " in title or title == "Accuracy"} == titles
    for title, metric in (("Held-out accuracy", "accuracy"), ("Held-out reward", "mean reward")):
        names = [f"{name}{metric}".replace("_", " ") for name in sets]
        assert [series["name"] for series in charts[title]["series"]] == names


def test_runs_have_a_band_each(tmp_path):
    for name, low in (("a", 0.1), ("b", 0.2)):
        row = {
            "step": 2 if name == "a" else 4,
            "math/accuracy": 0.5,
            "math/accuracy_low": low,
            "math/accuracy_high": 0.9,
        }
        write_evaluations(tmp_path / name, [row])
    html = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8")
    chart = charts_of(html)["math: accuracy"]
    assert chart["steps"] == [2, 4]
    assert [(series["name"], series["low"], series["high"]) for series in chart["series"]] == [
        ("a", [0.1, None], [0.9, None]),
        ("b", [None, 0.2], [None, 0.9]),
    ]


def test_criteria_of_a_judge_have_a_chart(tmp_path):
    """Other functions may have measures of the same name, which are no criteria."""
    costs = dict.fromkeys(("requests", "tokens", "retries", "latency_s", "cached", "mean", "std", "agreement"), 0.5)
    judge = {f"rewards/judge/{name}": value for name, value in {**costs, "clear": 0.25, "not rude": 0.75}.items()}
    row = {"step": 1, "reward/mean": 0.5, **judge, "rewards/other/clear": 0.125}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    measured = {f"math/{key}": value for key, value in judge.items()}
    write_evaluations(tmp_path, [{"step": 0, **measured, **{key: value / 2 for key, value in judge.items()}}])
    charts = charts_of(write_report(tmp_path).read_text(encoding="utf-8"))
    training, held_out = (
        {series["name"]: series["values"] for series in charts[title]["series"]}
        for title in ("Criteria of judges", "Held-out criteria of judges")
    )
    assert training == {"judge: clear": [0.25], "judge: not rude": [0.75]}
    assert held_out == {
        "math, judge: clear": [0.25],
        "math, judge: not rude": [0.75],
        "judge: clear": [0.125],
        "judge: not rude": [0.375],
    }
    assert "rewards/judge/clear" not in charts


@pytest.mark.parametrize("hostile", [HOSTILE, UNPRINTABLE])
def test_a_judges_reasons_and_scores_are_beside_each_completion(tmp_path, hostile):
    (tmp_path / "completions").mkdir()
    row = {"prompt": "p", "completion": "c", "rewards": {"judge": 0.5}, "reward": 0.5}
    row |= {"measures": {f"judge/{hostile}": 0.125}, "feedback": {f"judge{hostile}": f"It is rude.{hostile}"}}
    odd = {**row, "measures": [1], "feedback": {"judge": {"a": hostile}, "b": None}}
    for name in ("step_000001", "eval_step_000000", "eval_step_000001"):
        (tmp_path / "completions" / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(odd)}\n")
    page = page_of(tmp_path)
    text = "".join(page.text)
    assert text.count("It is rude.") == 3
    assert text.count("0.125") == 3
    assert page.tags.count("script") == 1
    assert "img" not in page.tags
    if hostile == HOSTILE:
        assert f"It is rude.{HOSTILE}" in text
        assert f"judge/{HOSTILE}" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_a_run_with_nothing_in_it_says_what_is_missing(tmp_path):
    (tmp_path / "config.toml").touch()
    text = "".join(page_of(tmp_path).text)
    for name in ("config.toml", "metrics.jsonl", "evaluations.jsonl", "completions/step_*.jsonl", "eval_step_*.jsonl"):
        assert name in text


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl", "evaluations.jsonl", "completions"])
def test_any_one_part_is_enough(tmp_path, whole_run, left):
    run = shutil.copytree(whole_run, tmp_path / "run")
    for path in run.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = "".join(page_of(run).text)
    assert "Not in this folder" in text
    assert f"{left}: " not in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="no file of a run in this folder"):
        write_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file of a run in this folder"):
        write_comparison([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_single_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0, "time/update_s": 0.0}\n')
    assert "Reward" in "".join(page_of(tmp_path).text)


def test_an_evaluation_among_the_metrics_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.25}\n{"step": 2, "eval/accuracy": 0.5}\n')
    assert "25.0% → 50.0%" in "".join(page_of(tmp_path).text)


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "rew\n{"step": 3}\n', r"metrics\.jsonl:2: not a JSON object"),
        ("metrics.jsonl", '{"step": 1}\n{"reward/mean": 2}\n', r"metrics\.jsonl:2: no integer 'step'"),
        ("metrics.jsonl", '{"step": 1, "reward/mean": "high"}\n', r"metrics\.jsonl:1: 'reward/mean' is not a number"),
        ("evaluations.jsonl", "[]\n", r"evaluations\.jsonl:1: not a JSON object"),
        ("config.toml", "model = \n", r"config\.toml: "),
        ("completions/step_000001.jsonl", "{\n", r"step_000001\.jsonl:1: not a JSON object"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / "completions").mkdir()
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_torn_last_line_is_passed_over(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    assert "so far" in "".join(page_of(tmp_path).text)


def test_rows_of_other_shapes_do_not_stop_the_report(tmp_path):
    (tmp_path / "completions").mkdir()
    rows = [
        {},
        {"prompt": [1, 2], "completion": [3], "rewards": 5, "advantage": "x"},
        {"prompt": {"a": 1}, "length": None},
    ]
    (tmp_path / "completions" / "step_1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "1 2" in page_of(tmp_path).text


def test_a_long_run_stays_a_small_page(tmp_path):
    lines = (
        f'{{"step": {k}, "reward/mean": {k % 97 / 97}, "time/update_s": 1.0, "time/rollout_s": 2.0}}\n'
        for k in range(20_000)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    start = time.process_time()
    size = write_report(tmp_path).stat().st_size
    assert size < 200_000
    assert time.process_time() - start < 20  # 0.5 s when it was written; this guards against quadratic work


def test_thinning_keeps_spikes_and_gaps():
    values = np.zeros((2, 10_000))
    values[0, 1234], values[1, 5678], values[0, 9000] = 9.0, -9.0, np.nan
    places = _thin(values)
    assert {0, 1234, 5678, 9000, 9999} <= set(places)
    assert places == sorted(places)
    assert len(places) <= 1203
    assert _thin(values[:, :1200]) == list(range(1200))


def test_running_means():
    # 40 values: one neighbour on each side counts, two values at an end; a gap stays one and counts nowhere.
    values = np.arange(40.0)[None]
    values[0, 20] = np.nan
    means = _running_means(values)
    assert means[0, [0, 10, 19, 39]].tolist() == [0.5, 10.0, 18.5, 38.5]
    assert np.isnan(means[0]).tolist() == np.isnan(values[0]).tolist()
    assert _running_means(values[:, :39]) is None


@pytest.mark.parametrize("value", [1e-300, 1e300, -1e300, 1.7e308, 5.0, -5.0, 0.0])
@pytest.mark.parametrize("kind", ["line", "stack"])
def test_values_of_any_size_can_be_drawn(value, kind):
    steps = list(range(100))
    html = draw(Chart("any size", "", steps, {"x": [value, -value] * 50, "y": [value] * 100}, kind=kind), 0, 99)
    (data,) = map(json.loads, Page(html).all("data-chart"))
    assert all(abs(value) <= 1e30 for series in data["series"] for value in series["values"])


def test_charts_of_several_runs_have_a_line_for_each_run():
    first = [Chart("A", "", [1, 3], {"x": [0.1, 0.3]}), Chart("B", "", [1, 3], {"x": [1, 2], "y": [3, None]})]
    second = [Chart("A", "", [2, 3], {"x": [0.2, 0.4]}), Chart("B", "", [2, 3], {"y": [5, 6]})]
    together = {chart.title: (chart.steps, chart.series) for chart in compare({"one": first, "two": second})}
    assert together == {
        "A": ([1, 2, 3], {"one": [0.1, None, 0.3], "two": [None, 0.2, 0.4]}),
        "B: x": ([1, 3], {"one": [1, 2]}),
        "B: y": ([1, 2, 3], {"one": [3, None, None], "two": [None, 5, 6]}),
    }


def test_the_numbers_behind_a_chart_stand_under_the_name_of_their_series():
    chart = Chart("Reward", "", [1, 2, 30], {"first": [0.25, 0.5, 0.75], "<second>": [4, None, 6]})
    (table,) = read_tables(draw(chart, 1, 30))
    assert table == {
        "1": {"first": "0.25", "<second>": "4"},
        "2": {"first": "0.5", "<second>": number(None)},
        "30": {"first": "0.75", "<second>": "6"},
    }


def test_the_table_of_runs_has_each_value_in_its_column(tmp_path):
    """Two runs that differ in every column."""
    for name, steps, reward, held_out in (("a", 2, 0.25, 0.5), ("b", 3, 0.75, 1)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.toml").write_text(f"[optimizer]\nlearning_rate = {steps}e-4\n")
        metrics = [{"step": step, "reward/mean": reward} for step in range(1, steps + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        (run / "evaluations.jsonl").write_text(json.dumps({"step": 1, "mean_reward": held_out}) + "\n")
    write_warnings(tmp_path / "b", 2, {"kl_runaway": "the message"})
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8")
    runs, *others = read_tables(page)
    settings = next(table for table in others if "optimizer.learning_rate" in table)
    columns = ("steps", "reward, last 10%", "last held-out reward", "warnings")
    assert runs == {
        "a": dict(zip(columns, ("2", "0.25", "0.5", "none"), strict=True)),
        "b": dict(zip(columns, ("3", "0.75", "1", "kl_runaway"), strict=True)),
    }
    assert settings == {"optimizer.learning_rate": {"a": "0.0002", "b": "0.0003"}}


def test_sets_of_two_runs_are_compared_prompt_by_prompt(tmp_path):
    """Of four prompts, the second run solves one more; the others and a prompt of one run alone make no pair."""
    solved = {"a": {"p": [0, 0], "q": [1, 0], "r": [1, 1], "s": [1, 1], "of a": [0, 0]}}
    solved["b"] = {**solved["a"], "p": [1, 1], "of b": [1, 1]}
    del solved["b"]["of a"]
    for name, prompts in solved.items():
        folder = tmp_path / name / "completions"
        folder.mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        rows = [
            {"prompt": prompt, "completion": "text", "reward": reward, "rewards": {"rule": reward}}
            for prompt, rewards in prompts.items()
            for reward in rewards
        ]
        for set_name, step in (("eval_math_step_000003", 3), ("eval_math_step_000007", 7), ("eval_step_000007", 7)):
            lines = rows if step == 7 else [{**row, "rewards": {"rule": 0}} for row in rows]
            (folder / f"{set_name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8")
    # The differences 1, 0, 0, 0 of two samples each: total 4 + 1/2 = 4.5, mean 0.2222, variance
    # (1 + 1/4)/4.5 - 0.2222^2 = 0.2284, and 3.182446 * sqrt(0.2284 / 4.5) = 0.7170 on each side.
    cells = {"a": "0.500, step 7", "b": "0.900, step 7; +0.250 [-0.495, +0.939] over 4 prompts"}
    assert read_tables(page)[1] == {"math": cells, "evaluation": cells}


@pytest.mark.parametrize(("old", "num_prompts"), [((), 4), (("a",), 1), (("a", "b"), 1)])
def test_prompts_of_one_text_are_compared_by_their_numbers(tmp_path, old, num_prompts):
    """Four episodes with the same first message, of two samples each. The runs ``old`` did not number prompts yet."""
    for name, solved in (("a", [0, 1, 1, 1]), ("b", [1, 1, 1, 1])):
        folder = tmp_path / name / "completions"
        folder.mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
        rows = [
            {"prompt": "guess", "completion": "text", "reward": reward, "rewards": {"rule": reward}}
            | ({} if name in old else {"prompt_index": index})
            for index, reward in enumerate(solved)
            for _ in range(2)
        ]
        for step in (3, 7):
            (folder / f"eval_step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(encoding="utf-8")
    cell = read_tables(page)[1]["evaluation"]["b"]
    assert cell.startswith("1.000, step 7; +0.250 [")
    assert cell.endswith(f"] over {num_prompts} prompts")
    count = 1 if "b" in old else 4
    assert f"All {count} held-out prompts in both files" in " ".join("".join(page_of(tmp_path / "b").text).split())


def test_a_comparison_of_runs(tmp_path, whole_run):
    other = write_run(tmp_path / "other", num_steps=60, hostile=HOSTILE)
    config = other / "config.toml"
    config.write_text(config.read_text().replace("3e-4", "1e-4"))
    write_warnings(other, 20, {"kl_runaway": "the message"})
    page = Page(write_comparison([whole_run, other], tmp_path / "both.html").read_text(encoding="utf-8"))
    text = " ".join(page.text)
    for part in (
        "2 runs",
        "countdown-first",
        "other",
        "last held-out reward",
        "0.8583",
        "optimizer.learning_rate",
        "0.0001",
        "kl_runaway",
        "KL",
    ):
        assert part in text
    assert "max_new_tokens" not in text  # the same in both
    assert page.tags.count("script") == 1
    reward = next(json.loads(data) for data in page.all("data-chart") if "countdown-first" in data)
    assert [series["name"] for series in reward["series"]] == ["countdown-first", "other"]
    assert (reward["first"], reward["last"]) == (0, 120)


def test_runs_that_differ_in_the_number_at_their_end_share_a_line(tmp_path):
    """The second run of mine has one step less: that step has no mean."""
    rewards = {"mine_0": [0.0, 0.5], "mine_1": [0.5], "other": [0.25, 0.75]}
    for name, values in rewards.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"step": step, "reward/mean": value}) for step, value in enumerate(values, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mine_1" / "evaluations.jsonl").write_text('{"step": 1, "mean_reward": 0.5}\n')
    runs = [str(tmp_path / name) for name in rewards]
    assert main(["report", "--mean", *runs, "--out", str(tmp_path / "all.html")]) == 0
    html = (tmp_path / "all.html").read_text(encoding="utf-8")
    charts = [json.loads(data) for data in Page(html).all("data-chart")]
    mine, other = next(chart for chart in charts if len(chart["series"]) == 2)["series"]
    assert (mine["name"], mine["values"]) == ("mine, mean of 2", [0.25, None])
    assert (mine["low"], mine["high"]) == ([0.0, None], [0.5, None])
    assert other == {"name": "other", "values": [0.25, 0.75]}
    # The means of the last steps: (0.5 + 0.5)/2, and 0.75. One run of mine has no evaluation.
    means = read_tables(html)[0]
    assert means["mine"] == {"runs": "2", "reward, last 10%": "0.5 [0.5, 0.5]", "last held-out reward": "—"} | {
        "last held-out accuracy": "—"
    }
    assert means["other"]["reward, last 10%"] == "0.75"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("a/run", "b/run"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    page = Page(write_comparison([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "both.html").read_text())
    assert {str(tmp_path / "a/run"), str(tmp_path / "b/run")} <= set(page.text)
    with pytest.raises(ValueError, match="named twice"):
        write_comparison([tmp_path / "a/run"] * 2, tmp_path / "both.html")


def test_the_command_compares_runs(tmp_path, whole_run, capsys):
    other = write_run(tmp_path / "other", num_steps=20)
    assert main(["report", str(whole_run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both.html'}\n"
    assert main(["report", str(other), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").exists()
    assert not (other / "report.html").exists()
    assert main(["report", str(other), "--mean"]) == 2
    assert "--mean is of several runs" in capsys.readouterr().err
    assert main(["report", str(other), "--watch", "0"]) == 2
    assert "at least 1 second" in capsys.readouterr().err


def test_a_watched_report_reloads_itself_until_it_is_stopped(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    pages, said = [], []

    def sleep(seconds):
        pages.append((tmp_path / "report.html").read_text())
        if len(pages) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    watch_report(lambda seconds: write_report(tmp_path, refresh_s=seconds), 7, say=said.append)
    assert said == [tmp_path / "report.html"]
    assert len(pages) == 3
    assert all('<meta http-equiv="refresh" content="7">' in page for page in pages)
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()


def test_a_watched_report_outlives_a_broken_file(tmp_path, monkeypatch, caplog):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    turns = iter(["{broken\n{}\n", '{"step": 7, "reward/mean": 0.75}\n', None])

    def sleep(seconds):
        content = next(turns)
        if content is None:
            raise KeyboardInterrupt
        metrics.write_text(content)

    monkeypatch.setattr(time, "sleep", sleep)
    watch_report(lambda seconds: write_report(tmp_path, refresh_s=seconds), 7, say=lambda path: None)
    assert "metrics.jsonl" in caplog.text
    assert "next attempt in 7 s" in caplog.text
    assert "All metrics of step 7" in (tmp_path / "report.html").read_text()


def test_warnings_of_guards_are_on_the_page(tmp_path):
    for step in range(120):
        write_warnings(tmp_path, step, {f"guard_{step}": f"advice {step}"})
    page = page_of(tmp_path)
    text = " ".join(page.text)
    assert "Warnings" in text
    assert re.search(r"Step 7 · \s*guard_7\s+advice 7", text)
    assert "guard_99" in text
    assert "guard_100" not in text
    assert "and 20 more" in text


@pytest.mark.parametrize(
    "number",
    ["1" * 400, "-" + "1" * 400, "1" * 4000, "1e308", "-1e308", "1e400", "NaN", "-Infinity", "5e-324", "1.7e308"],
)
def test_a_number_of_any_size_breaks_no_report(tmp_path, number):
    keys = ("reward/mean", "time/update_s", "time/step_s", "rollout/frac_reward_zero_std", "policy/clip_fraction")
    row = ", ".join(f'"{key}": {number}' for key in keys)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, {row}}}\n{{"step": 2, {row}}}\n')
    evaluation = f'"accuracy": {number}, "mean_reward": {number}, "rewards/x": {number}'
    (tmp_path / "evaluations.jsonl").write_text("".join(f'{{"step": {k}, {evaluation}}}\n' for k in (0, 1)))
    (tmp_path / "warnings.jsonl").write_text(f'{{"step": {number}, "guard": {number}, "message": 3}}\n')
    (tmp_path / "completions").mkdir()
    sample = f'{{"prompt": "p", "completion": "c", "reward": {number}, "advantage": {number}, "length": {number}}}\n'
    for name in ("step_1", "eval_step_0", "eval_step_1"):
        (tmp_path / "completions" / f"{name}.jsonl").write_text(sample)
    if number.lstrip("-").isdigit():
        (tmp_path / "config.toml").write_text(f"max_steps = {number}\n")
    page_of(tmp_path)
    write_comparison([tmp_path], tmp_path / "comparison.html")


@pytest.mark.parametrize("step", ["true", "-1", "1.5", "9007199254740993", "1" * 400])
def test_a_step_is_a_number_that_a_browser_can_hold(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "reward/mean": 1}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: no integer 'step' of 0 to 2\*\*53"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["config.toml", "metrics.jsonl", "evaluations.jsonl", "warnings.jsonl", "completions/step_1.jsonl", "completions"],
)
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "folder"])
def test_only_regular_files_are_read(tmp_path, name, kind):
    run, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("the secret\n")
    path = run / name
    path.parent.mkdir(parents=True)
    if kind.endswith("link"):
        path.symlink_to(secret if kind == "link" else tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    if name == "completions" and kind in ("pipe", "folder"):
        write_report(run)  # there is nothing in it
        return
    with pytest.raises(OSError, match=f"{name}: (not a regular file|a symbolic link)") as caught:
        write_report(run)
    assert "the secret" not in str(caught.value)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_BYTES", 100)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n' * 4)
    with pytest.raises(OSError, match=r"metrics\.jsonl: 128 bytes, expected at most 100"):
        write_report(tmp_path)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": ' + "[" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("accuracy", "mean", "shown"),
    [
        (0.0, 0.0, True),  # right or wrong, and all are wrong
        (0.5, 0.5, True),
        (0.4, 0.5, True),  # some samples have no score
        (0.0, 0.3, False),  # a graded reward
        (0.8, 2.5, False),  # a count
        (0.5, None, True),
        (None, 0.5, False),
    ],
)
def test_accuracy_is_shown_for_rewards_of_0_and_1(tmp_path, accuracy, mean, shown):
    evaluation = {"accuracy": accuracy, "mean_reward": 0.25, "rewards/x": mean}
    evaluation = {key: value for key, value in evaluation.items() if value is not None}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": 0, **evaluation}) + "\n")
    text = " ".join(page_of(tmp_path).text)
    assert ("Held-out accuracy" in text) == shown
    assert "Held-out reward" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.401234, "", "0.4012"),
        (12345.6, "", "12,346"),
        (1e-6, "", "1e-6"),
        (3.5e12, "", "3.5e12"),
        (10**400, "", "over 1.8e308"),
        (1e300, "%", "1e+302%"),
        (0, "", "0"),
        (0.125, "%", "12.5%"),
        (1.5, "s", "1.5 s"),
        (None, "", "—"),
        (True, "", "True"),
        ("<b>", "", "&lt;b&gt;"),
    ],
)
def test_number(value, unit, text):
    assert number(value, unit) == text


def test_escape_is_for_elements_and_attributes():
    assert escape("<a href='x' b=\"y\">&") == "&lt;a href=&#x27;x&#x27; b=&quot;y&quot;&gt;&amp;"
    assert escape("tab\tline\n") == "tab\tline\n"


def test_visible_text_is_not_escaped():
    assert visible("<a>\u202e\n") == "<a>⟨U+202E⟩\n"


def test_long_text_is_cut_and_says_so():
    html = model_text("x" * (MAX_CHARACTERS + 1500))
    assert html.count("x") < MAX_CHARACTERS + 10
    assert "1,500 more characters" in html


HUGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "values",
    [
        [HUGE, "0.5"],
        [f"-{HUGE}", HUGE],
        ["1e308", "-1e308", "1e99"],
        ["1e-320", "-5e-324"],
        ["1e99", "-1e99"],
        ["true", "1"],
    ],
    ids=["digits", "both signs", "largest", "smallest", "1e99", "bool"],
)
def test_numbers_of_any_size_make_a_report(tmp_path, values):
    (tmp_path / "completions").mkdir()
    for name, keys in (("metrics", ("reward/mean", "time/step_s")), ("evaluations", ("accuracy", "greedy_accuracy"))):
        lines = [json.loads(f'{{"step": {step}}}') for step in range(len(values))]
        text = "".join(
            json.dumps(line)[:-1] + "".join(f', "{key}": {value}' for key in keys) + "}\n"
            for line, value in zip(lines, values, strict=True)
        )
        (tmp_path / f"{name}.jsonl").write_text(text)
    row = ", ".join(f'"{name}": {values[0]}' for name in ("reward", "advantage", "length"))
    for kind in ("step", "eval_step"):
        for step in (0, 1):
            line = f'{{"step": {step}, "prompt": "a", "completion": "b", "rewards": {{"r": {values[0]}}}, {row}}}\n'
            (tmp_path / "completions" / f"{kind}_{step:06d}.jsonl").write_text(line)
    (tmp_path / "config.toml").write_text(f"max_steps = {'9' * 19}\n")
    assert write_report(tmp_path).exists()


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_nothing_is_written_through_planted_links(tmp_path):
    (tmp_path / "mine").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("report.html", f".report.html.{os.getpid()}.part", ".lock"):
        os.symlink(tmp_path / "mine", run / name)
    (run / "config.toml").touch()
    write_report(run)
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (run / "report.html").is_symlink()
