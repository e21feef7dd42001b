"""The report's page in a real browser: what its scripts draw, and how it looks when narrow, wide, light or dark."""

import json
import re
from html import escape

import pytest
from synthetic_run import write_run

import chromium
from rlox_grpo.run.report import write_report

pytestmark = [pytest.mark.browser, chromium.needed]

HOSTILE = "</pre></style></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&amp;"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "countdown-first")


def test_a_browser_shows_it_and_runs_no_foreign_script(tmp_path):
    path = write_report(write_run(tmp_path / "run", hostile=HOSTILE))
    title, dom = in_chromium(tmp_path, path)
    assert title == "run · rlox_grpo"
    more = dom.partition("<details><summary><h3>")[2].partition("</section>")[0]
    charts, closed = dom.count('<figure class="chart">'), more.count("<figure")
    assert dom.count("<canvas") == charts - closed > 12  # those in a closed <details> are drawn when it opens
    # The same page with a script of a stranger's: the page's policy keeps it from running.
    foreign = tmp_path / "foreign.html"
    foreign.write_text(path.read_text().replace("</body>", "<script>document.title = 'owned'</script></body>"))
    assert in_chromium(tmp_path, foreign)[0] == "run · rlox_grpo"


# The plot shows a value in the animation frame after the event, which may come late: the title says when.
POINTER = """<script>document.title = "none";
const pointing = setInterval(() => {
  const plot = document.querySelector(".plot .u-over");
  if (plot === null) return;
  const box = plot.getBoundingClientRect();
  const at = { clientX: box.left + box.width / 2, clientY: box.top + 20, bubbles: true };
  plot.dispatchEvent(new MouseEvent("mouseenter", at));
  plot.dispatchEvent(new MouseEvent("mousemove", at));
  requestAnimationFrame(() => requestAnimationFrame(() => {
    clearInterval(pointing);
    document.title = "pointed";
  }));
}, 100);</script></body>"""


def test_the_pointer_shows_values(tmp_path, whole_run):
    html = write_report(whole_run).read_text(encoding="utf-8")
    page = tmp_path / "pointer.html"
    page.write_text(without_policy(html).replace("</body>", POINTER), encoding="utf-8")
    dom = in_chromium(tmp_path, page)[1]
    assert re.search(r"<bdi>accuracy</bdi> <b>4\d\.\d%</b>", dom)  # in the middle; 7\d% at the end
    assert dom.count('<li class="at quiet">step 60</li>') > 12  # in every chart that has this step


BANDS = """<script>document.title = "none";
const looking = setInterval(() => {
  const charts = [...document.querySelectorAll("figure.chart")];
  const figure = charts.find((one) => one.querySelector("h3").textContent === "TITLE");
  const canvas = figure.querySelector("canvas");
  if (!canvas) return;
  clearInterval(looking);
  const count = () => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let pale = 0;
    // A band is the colour of its line with an alpha of 0x26.
    for (let k = 3; k < data.length; k += 4) pale += data[k] === 0x26;
    return pale;
  };
  const shown = count();
  figure.querySelector(".legend button").click();
  setTimeout(() => { document.title = `${shown}|${count()}`; }, 200);
}, 100);</script></body>"""


@pytest.mark.parametrize("title", ["Accuracy", "Difference to the start"])
def test_a_browser_draws_the_band_of_an_interval_and_hides_it_with_its_line(tmp_path, whole_run, title):
    html = write_report(whole_run).read_text(encoding="utf-8")
    page = tmp_path / "bands.html"
    page.write_text(without_policy(html).replace("</body>", BANDS.replace("TITLE", title)), encoding="utf-8")
    shown, hidden = map(int, in_chromium(tmp_path, page)[0].split("|"))
    assert shown > 500
    assert hidden < 50  # the edges of letters


MEASURE = """<script>addEventListener("load", () => {
  for (const closed of document.querySelectorAll("details:has(.message)")) closed.open = true;
  const shown = [...document.querySelectorAll(".message")], page = document.documentElement;
  const style = (what) => getComputedStyle(document.querySelector(what));
  const wide = shown.filter((one) => one.getBoundingClientRect().right > page.clientWidth).length;
  const list = [shown.length, page.clientWidth, page.scrollWidth, wide, shown.filter((one) => one.offsetHeight > 20)
    .length, style(".message.sampled").borderLeftWidth, style("body").backgroundColor, style("body").color];
  document.title = list.join("|");
});</script></body>"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 520])
def test_a_browser_shows_a_conversation(tmp_path, width, dark):
    """Every message is visible, nothing is wider than the page, and dark mode has light text on a dark page."""
    run = write_run(tmp_path / "run")
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x" * 300}}}
    messages = [
        {"role": "user", "content": "long " * 200},
        {"role": "assistant", "content": "looking", "tool_calls": [call]},
        {"role": "tool", "name": "search" * 20, "content": "y" * 500 + "<script>document.title = 'owned'</script>"},
        {"role": "assistant", "content": "done"},
    ]
    row = {"step": 1, "prompt": "p", "completion": "c", "rewards": {"r": 1.0}, "reward": 1.0, "advantage": 0.5}
    newest = sorted((run / "completions").glob("step_*.jsonl"))[-1]
    newest.write_text("".join(json.dumps({**row, "messages": messages, "length": n}) + "\n" for n in range(4)))
    page = tmp_path / "page.html"
    html = without_policy(write_report(run).read_text(encoding="utf-8"))
    page.write_text(html.replace("</body>", MEASURE), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    title, _ = in_chromium(tmp_path, page, f"--window-size={width},900", scheme)
    count, inside, scrolled, wide, visible, border, ground, text = title.split("|")
    assert int(count) == int(visible) >= 16
    assert (int(scrolled), int(wide)) == (int(inside), 0)
    assert border == "2px"
    ground, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, text))
    assert (ground < 200 and text > 500) if dark else (ground > 500 and text < 200)


WORDS = """<script>addEventListener("load", () => requestAnimationFrame(() => {
  for (const closed of document.querySelectorAll("details")) closed.open = true;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  const broken = new Set();
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (text.parentElement.closest("script, .model-text")) continue;
    for (const word of text.data.matchAll(/[\\w.]+/g)) {
      if (word[0].length > 40) continue; // it may be wider than the page
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((line) => line.top)).size > 1) broken.add(word[0]);
    }
  }
  const page = document.documentElement;
  const tables = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth).length;
  parent.postMessage([page.scrollWidth - page.clientWidth, tables, ...broken].join("|"), "*");
}));</script></body>"""


def test_a_narrow_page_breaks_no_word_and_scrolls_its_tables(tmp_path):
    """390 px, in a frame: a window of a browser without a screen has at least 500."""
    run = write_run(tmp_path / "run")
    setting = "a_setting_of_a_name_that_is_long"
    with (run / "config.toml").open("a") as config:
        config.write(f"\n[run]\n{setting} = 'one_value_of_the_same_length'\n{'x' * 500} = '{'y' * 500}'\n")
    html = without_policy(write_report(run).read_text(encoding="utf-8"))
    assert setting in html
    frame = tmp_path / "frame.html"
    inside = escape(html.replace("</body>", WORDS))
    frame.write_text(
        "<title>none</title><script>onmessage = (event) => { document.title = event.data; };</script>"
        f'<iframe srcdoc="{inside}" style="width: 390px; height: 900px; border: 0"></iframe>',
        encoding="utf-8",
    )
    beyond, tables, *broken = in_chromium(tmp_path, frame)[0].split("|")
    assert broken == []
    assert int(beyond) == 0
    assert int(tables) > 0


EXTREMES = {
    "constant 1e300": [1e300] * 50,
    "both ends": [1.7e308, -1.7e308] * 25,
    "tiny": [5e-324] * 50,
    "tiny and huge": [1e-300, 1e300] * 25,
    "zeros": [0.0] * 50,
    "nothing": [None] * 50,
    "one value": [None] * 49 + [1.0],
    "constant but for rounding": [1.0, 1.0 - 2**-53] * 25,
}


@pytest.mark.parametrize("num_steps", [50, 1])
def test_a_browser_draws_values_of_any_size(tmp_path, num_steps):
    rows = [{"step": k, **{key: values[-1 - k] for key, values in EXTREMES.items()}} for k in range(num_steps)]
    rows = [{**row, "reward/mean": row["both ends"], "time/update_s": row["tiny and huge"]} for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path)
    page.write_text(page.read_text().replace("<details>", "<details open>"))
    dom = in_chromium(tmp_path, page)[1]
    assert dom.count("<canvas") == dom.count('<figure class="chart">') == len(EXTREMES) + 2


def without_policy(html):
    return re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)


def in_chromium(tmp_path, page, *more):
    """Title and document of a page after its scripts have run.

    On a busy machine chromium may print the document before them, and is asked again.
    """
    for _ in range(10):
        shown = chromium.show(tmp_path, page, *more, "--virtual-time-budget=3000")
        title = re.search("<title>(.*?)</title>", shown)[1]
        if title != "none" and ("<canvas" in shown or '<figure class="chart">' not in shown):
            break
    return title, shown
