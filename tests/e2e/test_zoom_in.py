"""The example of an episode whose tool shows a picture: its pictures, its examples, and a short run."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from versions import skip_if_no_pictures

skip_if_no_pictures()
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def zoom_in(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import zoom_in

    yield zoom_in
    monkeypatch.delitem(sys.modules, "zoom_in")


def test_only_the_zoom_shows_the_pattern(zoom_in):
    small = {zoom_in.shrink(zoom_in.draw(patterns, 2, 7)).tobytes() for patterns in ("hvcn", "nnnn", "ccvh", "vhhc")}
    assert len(small) == 1
    quarters = {zoom_in.cut({"patterns": pattern * 4, "red": 2, "seed": 7}, 2).tobytes() for pattern in "hvcn"}
    assert len(quarters) == 4


def test_each_quarter_is_that_of_the_small_copy(zoom_in):
    for row in zoom_in.make_rows(8, 3):
        small = np.asarray(row["images"][0]).astype(int)
        for quarter in range(4):
            y, x = (16 * at for at in divmod(quarter, 2))
            shade = np.asarray(zoom_in.cut(row["whole"], quarter)).mean((0, 1))
            np.testing.assert_allclose(small[y : y + 16, x : x + 16].mean((0, 1)), shade, atol=0.01)
            is_red = shade[0] > shade[1] + 30 and shade[0] > shade[2] + 30
            assert is_red == (quarter == row["whole"]["red"])
        assert row["answer"] == row["whole"]["patterns"][row["whole"]["red"]]


def test_the_example_trains_episodes_with_the_pictures_of_its_tool(zoom_in, monkeypatch, capsys):
    shown = []
    cut = zoom_in.cut
    monkeypatch.setattr(zoom_in, "cut", lambda whole, quarter: shown.append(quarter) or cut(whole, quarter))
    words = ["--warm-steps=45", "--steps=1", "--pictures=16", "--held-out=8"]
    monkeypatch.setattr(sys, "argv", ["zoom_in.py", *words])
    zoom_in.main()
    assert len(shown) > 4 * 16 + 20  # the examples of the warm start, and most episodes
    said = capsys.readouterr().out
    assert re.search(r"right answers on held-out pictures \d\.\d\d -> \d\.\d\d, \d+ s of processor time\n$", said), said
