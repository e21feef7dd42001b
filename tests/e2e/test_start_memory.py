"""The host memory of a start in shards: what a rank holds, and never the whole model."""

import platform

import pytest

from starts import measure_start, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads what glibc counts"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("small"))


def test_a_rank_starts_in_the_memory_of_its_shards(small):
    for rank in measure_start(small):
        assert rank["shard"] < rank["peak"] < rank["limit"]
        assert rank["limit"] < 4 * rank["parameters"]  # the whole model


@pytest.mark.thorough
def test_the_reference_is_in_shards_of_bfloat16(small):
    for rank in measure_start(small, "--kl", "--gather-dtype", "bfloat16"):
        assert rank["shard"] + rank["reference"] < rank["peak"] < rank["limit"]
        assert rank["reference"] == 2 * rank["parameters"] // 2


def test_a_model_that_is_given_whole_takes_more(small):
    """What the limit would let through if it were too wide, and that what is allocated is counted."""
    for rank in measure_start(small, "--whole"):
        assert 4 * rank["parameters"] < rank["peak"] < 1.1 * 4 * rank["parameters"]
