import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tf_avgstrategy.workers import cluster

TWO = {"worker": ["a:1", "b:2"]}


def parse(config):
    return cluster.parse_tf_config(json.dumps(config))


class TestValid:
    def test_workers_in_their_order(self):
        result = parse({"cluster": TWO, "task": {"type": "worker", "index": 1}})
        assert result == (("a:1", "b:2"), 1)
        assert result.size == 2

    @pytest.mark.parametrize(
        ("kind", "index", "rank"),
        [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)],
    )
    def test_a_chief_is_a_worker_with_rank_0(self, kind, index, rank):
        jobs = {**TWO, "chief": ["c:3"]}
        task = {"type": kind, "index": index}
        assert parse({"cluster": jobs, "task": task}) == (
            ("c:3", "a:1", "b:2"),
            rank,
        )

    def test_an_index_may_be_written_as_a_string(self):
        task = {"type": "worker", "index": "1"}
        assert parse({"cluster": TWO, "task": task}).rank == 1

    @pytest.mark.parametrize("config", [{}, {"cluster": {}}])
    def test_an_empty_cluster_is_none(self, config):
        assert parse(config) is None

    def test_addresses_may_be_ipv6(self):
        jobs = {"worker": ["[::1]:2222"]}
        task = {"type": "worker", "index": 0}
        assert parse({"cluster": jobs, "task": task}).addresses == (
            "[::1]:2222",
        )


WORKER_0 = {"type": "worker", "index": 0}


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ([], "must be a JSON object"),
            ({"task": WORKER_0}, 'must have a "cluster"'),
            ({"cluster": TWO}, 'must have a "task"'),
            ({"cluster": [], "task": WORKER_0}, None),
            ({"cluster": ["a:1"], "task": WORKER_0}, '"cluster" must be an'),
            ({"cluster": {"worker": []}, "task": WORKER_0}, "list of addr"),
            ({"cluster": {"worker": "a:1"}, "task": WORKER_0}, "list of addr"),
            ({"cluster": {"master": ["a:1"]}}, '"chief" or "worker"'),
            ({"cluster": {"ps": ["a:1"], **TWO}}, "'ps'.*no server for them"),
            ({"cluster": {"evaluator": ["a:1"]}}, "evaluator does not train"),
            ({"cluster": {"chief": ["a:1", "b:1"]}}, 'one "chief"'),
            ({"cluster": {"worker": ["a:1", "a:1"]}}, "twice.*'a:1'.*a port"),
            (
                {"cluster": {"chief": ["a:1"], "worker": ["a:1"]}},
                "twice.*'a:1'",
            ),
            ({"cluster": {"worker": ["localhost"]}}, "'localhost'.*like"),
            ({"cluster": {"worker": ["a:"]}}, '"host:port"'),
            ({"cluster": {"worker": [":1"]}}, '"host:port"'),
            ({"cluster": {"worker": ["a:x"]}}, '"host:port"'),
            ({"cluster": {"worker": ["a:0"]}}, '"host:port"'),
            ({"cluster": {"worker": ["a:65536"]}}, '"host:port"'),
            ({"cluster": {"worker": [1]}}, '"host:port"'),
            ({"cluster": TWO, "task": []}, '"task" must be an object'),
            ({"cluster": TWO, "task": {}}, '"type" None must be'),
            (
                {"cluster": TWO, "task": {"type": "evaluator", "index": 0}},
                "evaluator does not train.*do not start it",
            ),
            (
                {"cluster": TWO, "task": {"type": "chief", "index": 0}},
                r"one of the cluster, \['worker'\].*'chief'",
            ),
            (
                {"cluster": TWO, "task": {"type": "worker", "index": 2}},
                "from 0 to 1.*Received: 2",
            ),
            (
                {"cluster": TWO, "task": {"type": "worker", "index": -1}},
                "Received: -1",
            ),
            (
                {"cluster": TWO, "task": {"type": "worker", "index": True}},
                "Received: True",
            ),
            ({"cluster": TWO, "task": {"type": "worker"}}, "Received: None"),
        ],
    )
    def test_with_the_field_named(self, config, message):
        if message is None:
            assert parse(config) is None
            return
        with pytest.raises(ValueError, match=f"^TF_CONFIG: .*{message}"):
            parse(config)

    def test_what_is_not_json(self):
        with pytest.raises(ValueError, match="must be JSON.*'{cluster'"):
            cluster.parse_tf_config("{cluster")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)
ADDRESSES = st.lists(
    st.sampled_from(["a:1", "b:2", "c:3", "a", "", "[::1]:5"]) | JSON,
    max_size=3,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(
            st.sampled_from(["chief", "worker", "ps", "evaluator", "x"]),
            ADDRESSES | JSON,
            max_size=3,
        )
        | JSON,
        "task": st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["chief", "worker", "ps"]) | JSON,
                "index": st.integers(-1, 3) | JSON,
            },
        )
        | JSON,
    },
)


@hypothesis.given(ALMOST | JSON)
def test_any_json_is_a_valid_cluster_or_the_documented_error(config):
    try:
        result = parse(config)
    except ValueError as error:
        assert str(error).startswith("TF_CONFIG: ")
        assert "Received: " in str(error)
    else:
        if result is not None:
            assert 0 <= result.rank < result.size
            assert len(set(result.addresses)) == result.size


@hypothesis.given(st.text())
def test_any_text_is_a_valid_cluster_or_the_documented_error(text):
    try:
        cluster.parse_tf_config(text)
    except ValueError as error:
        assert str(error).startswith("TF_CONFIG: ")


class TestFromEnvironment:
    @pytest.mark.parametrize("value", [None, "", "  "])
    def test_without_the_variable_there_is_no_cluster(self, monkeypatch, value):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if value is not None:
            monkeypatch.setenv("TF_CONFIG", value)
        assert cluster.from_environment() is None

    def test_reads_the_variable(self, monkeypatch):
        config = {"cluster": TWO, "task": WORKER_0}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert cluster.from_environment().size == 2
