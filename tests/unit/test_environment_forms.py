"""The same game in every form of an environment: the same tokens and the same weights."""

from __future__ import annotations

from typing import Any

import pytest

import lake

pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    return lake.make_tokenizer(byte_tokenizer)


@pytest.fixture(scope="module")
def model(make_tiny_model: Any, tokenizer: Any) -> Any:
    return lake.make_model(make_tiny_model, tokenizer)


@pytest.fixture(scope="module")
def expected(model: Any, tokenizer: Any, tmp_path_factory: Any) -> Any:
    """Of the async function."""
    return lake.train(lake.walk, model, tokenizer, tmp_path_factory.mktemp("function"))


def test_the_game_has_episodes_of_every_kind(expected: Any, model: Any) -> None:
    """Otherwise the comparison below would show little."""
    episodes, weights = expected
    assert len(episodes) == 16
    assert {reason for *_, reason in episodes} == {"completed", "max_turns"}
    assert len({reward for _, _, reward, _ in episodes}) > 2
    assert len({sum(sampled) for _, sampled, _, _ in episodes}) > 3
    assert any(not one.equal(other) for one, other in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("form", ["sync", "class", "trl", "gymnasium", "gymnasium, in a worker process"])
def test_each_form_trains_to_the_same_weights(
    form: str, expected: Any, model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    environment, rows, options = {
        "sync": (lake.walk_in_a_thread, lake.ROWS, {}),
        "class": (lake.Steps, lake.ROWS, {}),
        "trl": (lake.Factory, lake.ROWS, {}),
        "gymnasium": (lake.walk_in_gymnasium(), lake.add_options(lake.ROWS), {}),
        "gymnasium, in a worker process": (
            lake.walk_in_gymnasium(),
            lake.add_options(lake.ROWS),
            {"turn_timeout": 60.0, "episode_workers": 2},
        ),
    }[form]
    episodes, weights = lake.train(environment, model, tokenizer, tmp_path, rows, **options)
    assert episodes == expected[0]
    assert all(one.equal(other) for one, other in zip(weights, expected[1], strict=True))
