"""The head node of a Ray cluster that stops answering, without Ray: a socket stands for its control service."""

from __future__ import annotations

import socket

import pytest

from rlox_grpo.distributed.ray_cluster import cluster
from rlox_grpo.distributed.ray_cluster.cluster import Head, HeadLostError, cleaned_up
from rlox_grpo.errors import RankError


@pytest.fixture
def service():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def find_address(service):
    return f"127.0.0.1:{service.getsockname()[1]}"


def test_a_head_that_answers_is_not_lost(service, monkeypatch):
    monkeypatch.setattr(cluster, "LOST_S", 0.0)
    watched = Head(find_address(service))
    assert watched.require()
    assert watched.require()


def test_a_head_that_does_not_answer_is_lost_after_its_deadline(service, monkeypatch):
    address = find_address(service)
    watched = Head(address)
    assert watched.require()
    service.close()
    assert not watched.require()  # no error before the deadline
    monkeypatch.setattr(cluster, "LOST_S", 0.0)
    with pytest.raises(HeadLostError) as lost:
        watched.require()
    assert str(lost.value).startswith(f"the head node of the Ray cluster, {address}, is lost: ")
    assert "the same command continues the run" in str(lost.value)
    assert isinstance(lost.value, RankError)


def test_a_head_that_answers_again_is_forgiven(service):
    watched = Head(find_address(service))
    address = service.getsockname()
    service.close()
    assert not watched.require()
    with socket.create_server(address):
        assert watched.require()


@pytest.mark.parametrize(
    ("error", "is_cleaned"), [(None, True), (RankError("a rank died"), True), (HeadLostError("lost"), False)]
)
def test_nothing_is_asked_of_a_lost_head(error, is_cleaned):
    cleaned = []

    def body():
        with cleaned_up(lambda: cleaned.append(1)):
            if error is not None:
                raise error

    if error is None:
        body()
    else:
        with pytest.raises(type(error)):
            body()
    assert bool(cleaned) is is_cleaned
