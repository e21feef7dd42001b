import json
import os
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser

import pytest
from synthetic_run import write_run

from rlox_grpo.run.report import write_report
from rlox_grpo.run.report.charts import Chart, _extremes, _running_mean, _ticks, draw
from rlox_grpo.run.report.text import MAX_CHARACTERS, escape, model_text, number

VOID = {"meta", "link", "br", "img", "input"}
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
    assert page.tags.count("svg") == page.tags.count("figure") == len(page.all("data-chart"))
    assert page.tags.count("svg") > 12
    assert all(label.strip() for label in page.all("aria-label"))


def test_the_page_asks_nothing_of_the_network(whole_run):
    html = write_report(whole_run).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    assert page.all("src") == []
    assert all(href.startswith("#") for href in page.all("href"))
    assert not re.search(r"url\(|@import|https?://|\bfetch\(|XMLHttp", html)
    assert "default-src 'none'" in html
    assert len(html) < 1_000_000


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
        assert "a⟨U+0000⟩b⟨U+001B⟩[31m⟨U+000D⟩⟨U+0085⟩⟨U+D800⟩⟨U+202E⟩evil⟨U+2066⟩⟨U+2028⟩ שלום 👩‍🔬" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_a_run_with_nothing_in_it_says_what_is_missing(tmp_path):
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
    start = time.perf_counter()
    size = write_report(tmp_path).stat().st_size
    assert size < 200_000
    assert time.perf_counter() - start < 10  # 0.5 s when it was written; this guards against quadratic work


def test_thinning_keeps_spikes_and_gaps():
    values = [0.0] * 10_000
    values[1234], values[5678], values[9000] = 9.0, -9.0, None
    places = _extremes(values)
    assert {0, 1234, 5678, 9000, 9999} <= set(places)
    assert len(places) < 1000


def test_running_mean():
    # 40 values: one neighbour on each side counts, two values at an end; a gap stays one and counts nowhere.
    values = [float(k) for k in range(40)]
    values[20] = None
    means = _running_mean(values)
    assert means[0] == 0.5
    assert means[10] == 10.0
    assert means[19] == 18.5
    assert means[20] is None
    assert _running_mean(values[:39]) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
        (-3, 7, [-5, -2.5, 0, 2.5, 5, 7.5]),
        (0, 3e-6, [0, 1e-6, 2e-6, 3e-6]),
        (1 - 2**-53, 1, [0, 0.5, 1, 1.5]),  # a constant but for rounding
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, ticks):
    assert _ticks(low, high) == pytest.approx(ticks, abs=1e-18)


@pytest.mark.parametrize("value", [1e-300, 1e300, -1e300, 5.0, -5.0, 0.0])
def test_a_constant_of_any_size_can_be_drawn(value):
    html = draw(Chart("constant", "", [1, 2, 3], {"x": [value] * 3}), 1, 3)
    assert "nan" not in html
    assert "inf" not in html


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.401234, "", "0.4012"),
        (12345.6, "", "12,346"),
        (1e-6, "", "1e-6"),
        (3.5e12, "", "3.5e12"),
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


def test_long_text_is_cut_and_says_so():
    html = model_text("x" * (MAX_CHARACTERS + 1500))
    assert html.count("x") < MAX_CHARACTERS + 10
    assert "1,500 more characters" in html


@pytest.mark.browser
def test_a_browser_shows_it_and_runs_no_foreign_script(tmp_path):
    path = write_report(write_run(tmp_path / "run", hostile=HOSTILE))
    title, dom = in_chromium(tmp_path, path)
    assert title == "run · rlox_grpo"
    assert dom.count('class="tip"') == dom.count('<figure class="chart">') > 12  # our own script has run
    # The same page with a script of a stranger's: the page's policy keeps it from running.
    foreign = tmp_path / "foreign.html"
    foreign.write_text(path.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    assert in_chromium(tmp_path, foreign)[0] == "run · rlox_grpo"


@pytest.mark.browser
def test_the_pointer_shows_values(tmp_path, whole_run):
    html = write_report(whole_run).read_text(encoding="utf-8")
    move = """<script>for (const plot of document.querySelectorAll(".plot")) {
      const box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top }));
    }</script></body>"""
    html = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("</body>", move)
    page = tmp_path / "pointer.html"
    page.write_text(html, encoding="utf-8")
    dom = in_chromium(tmp_path, page)[1]
    assert re.search(
        r'step 60</div><div class=""><i class="swatch s0"></i><bdi class="">accuracy</bdi> <b class="">4\d\.\d%',
        dom,
    )


def in_chromium(tmp_path, page):
    """Title and document of a page after its scripts have run."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return re.search("<title>(.*?)</title>", shown.stdout)[1], shown.stdout


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


def test_a_step_of_hundreds_of_digits_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {HUGE}}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: 'step' has 401 digits"):
        write_report(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl", "config.toml"])
def test_links_and_pipes_in_a_hostile_folder_are_not_opened(tmp_path, name):
    """A pipe would hang, a link would show what it points to."""
    (tmp_path / "secret").write_text("password\n")
    (tmp_path / "run").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "run" / name)
    with pytest.raises(OSError, match="is a symbolic link") as caught:
        write_report(tmp_path / "run")
    assert "password" not in str(caught.value)
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(OSError, match="is not a regular file"):
        write_report(tmp_path / "run")


@pytest.mark.skipif(os.name != "posix", reason="links")
def test_nothing_is_written_through_planted_links(tmp_path):
    (tmp_path / "mine").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("report.html", f".report.html.{os.getpid()}.part", ".lock"):
        os.symlink(tmp_path / "mine", run / name)
    write_report(run)
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (run / "report.html").is_symlink()
