import numpy as np
import pipelines
import pytest
import tensorflow as tf

from tf_avgstrategy.input import row_order

Range = tf.data.Dataset.range


def agreed(datasets):
    return pipelines.in_workers(
        len(datasets),
        lambda rank, agree: row_order.agree_on_order(
            datasets[rank], agree=agree
        ),
    )


def made_with_seeds(make, seeds):
    """One dataset for each worker, made under its global seed."""
    datasets = []
    for seed in seeds:
        tf.random.set_seed(seed)
        datasets.append(make())
    return datasets


@pytest.fixture(autouse=True)
def _no_global_seed():
    tf.random.set_seed(None)


@pytest.fixture
def written(monkeypatch):
    """The number of datasets written as a graph so far."""
    calls = []
    write = tf.raw_ops.DatasetToGraphV2

    def counted(**kwargs):
        calls.append(kwargs)
        return write(**kwargs)

    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", counted)
    return calls


def generator():
    yield from range(12)


def table():
    keys = tf.range(12, dtype=tf.int64)
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(keys, keys), -1
    )


def through_table():
    lookup = table()
    return Range(12).shuffle(12).map(lambda x: lookup[x]).batch(4)


PIPELINES = {
    "before batch": lambda: Range(12).shuffle(12).batch(4),
    "after batch": lambda: Range(12).batch(4).shuffle(3),
    "both": lambda: Range(12).shuffle(5).batch(4).shuffle(3).prefetch(1),
    "arrays": lambda: (
        tf.data.Dataset.from_tensor_slices(np.arange(12)).shuffle(12).batch(4)
    ),
    "cache": lambda: Range(12).cache().shuffle(12).batch(4),
    "once": lambda: (
        Range(12).shuffle(12, reshuffle_each_iteration=False).batch(4)
    ),
    "nested": lambda: (
        Range(3)
        .shuffle(3)
        .flat_map(lambda i: Range(4 * i, 4 * i + 4).shuffle(4))
        .batch(4)
    ),
    "captured": lambda: (
        lambda inner: Range(3).flat_map(
            lambda i: inner.map(lambda j: 4 * i + j)
        )
    )(Range(4).shuffle(4)).batch(4),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [Range(6), Range(6, 12).shuffle(6)], [0.5, 0.5]
    ).batch(4),
    "generator": lambda: (
        tf.data.Dataset.from_generator(
            generator, output_signature=tf.TensorSpec([], tf.int64)
        )
        .shuffle(12)
        .batch(4)
    ),
    "py_function": lambda: (
        Range(12)
        .shuffle(12)
        .batch(4)
        .map(
            lambda x: tf.ensure_shape(
                tf.py_function(abs, [x], tf.int64), [None]
            )
        )
    ),
    "table": through_table,
    "sloppy": lambda: (
        Range(12)
        .interleave(
            lambda i: tf.data.Dataset.from_tensors(i),
            num_parallel_calls=4,
            deterministic=False,
        )
        .map(lambda x: x, num_parallel_calls=2, deterministic=False)
        .batch(4)
    ),
}


class TestPipelines:
    @pytest.mark.parametrize("seeds", [(None, None), (1, 2)])
    @pytest.mark.parametrize("pipeline", PIPELINES)
    def test_workers_read_in_one_order(self, pipeline, seeds):
        datasets = made_with_seeds(PIPELINES[pipeline], seeds)
        tf.random.set_seed(3)
        first, second = agreed(datasets)
        assert first.element_spec == datasets[0].element_spec
        for _ in range(3):
            order = pipelines.rows(first)
            assert order == pipelines.rows(second)
            assert sorted(order) == [*range(12)]

    @pytest.mark.parametrize("pipeline", ["both", "nested", "sampled"])
    def test_every_row_once_over_workers(self, pipeline):
        datasets = [PIPELINES[pipeline]() for _ in range(3)]
        shards = pipelines.shard(datasets, [1, 2, 1])
        for _ in range(2):
            seen = [row for own in shards for row in pipelines.rows(own)]
            assert sorted(seen) == [*range(12)]

    def test_each_epoch_has_another_order(self):
        first, second = agreed([Range(99).shuffle(99).batch(9)] * 2)
        orders = [pipelines.rows(first) for _ in range(4)]
        assert orders == [pipelines.rows(second) for _ in range(4)]
        assert len({tuple(order) for order in orders}) == 4

    def test_repeats_inside_the_pipeline(self):
        make = lambda: Range(99).shuffle(99).repeat(2).batch(9)  # noqa: E731
        first, second = (pipelines.rows(d) for d in agreed([make(), make()]))
        assert first == second
        assert first[:99] != first[99:]
        assert sorted(first[:99]) == sorted(first[99:]) == [*range(99)]

    def test_order_drawn_once_stays(self):
        make = PIPELINES["once"]
        first, _ = agreed([make(), make()])
        assert pipelines.rows(first) == pipelines.rows(first)

    def test_takes_the_seed_of_rank_0(self):
        datasets = [Range(99).shuffle(99, seed=s).batch(9) for s in (1, 2)]
        expected = pipelines.rows(Range(99).shuffle(99, seed=1).batch(9))
        for own in agreed(datasets):
            assert pipelines.rows(own) == expected

    def test_unseeded_runs_differ(self):
        make = PIPELINES["before batch"]
        orders = {
            tuple(
                pipelines.rows(
                    Range(99)
                    .shuffle(99)
                    .batch(9)
                    .apply(lambda d: agreed([d, make()])[0])
                )
            )
            for _ in range(2)
        }
        assert len(orders) == 2

    def test_training_and_validation_rows_stay_apart(self):
        def make():
            whole = Range(99).shuffle(99, reshuffle_each_iteration=False)
            return whole.take(9).batch(3), whole.skip(9).shuffle(90).batch(3)

        pairs = [make(), make()]
        validation = pipelines.rows(agreed([p[0] for p in pairs])[1])
        training = pipelines.rows(agreed([p[1] for p in pairs])[0])
        assert sorted(validation + training) == [*range(99)]

    def test_interleaves_read_the_same_number_of_datasets(self):
        # Its default is the number of CPUs, which differs between machines.
        datasets = [
            Range(9).interleave(
                lambda i: Range(10 * i, 10 * i + 3),
                cycle_length=cycle_length,
                num_parallel_calls=2,
            )
            for cycle_length in (3, 2)
        ]
        orders = [list(d.as_numpy_iterator()) for d in agreed(datasets)]
        assert orders[0] == orders[1]
        assert orders[0] == list(datasets[0].as_numpy_iterator())

    def test_finds_shuffled_names_of_files(self, tmp_path):
        for index in range(9):
            (tmp_path / f"{index}.txt").write_text(str(index))

        def make():
            names = tf.data.Dataset.list_files(str(tmp_path / "*.txt"))
            return tf.data.TextLineDataset(names).batch(2)

        first, second = agreed([make(), make()])
        assert pipelines.rows(first) == pipelines.rows(second)

    def test_keeps_options(self):
        options = tf.data.Options()
        options.threading.private_threadpool_size = 2
        dataset = Range(12).shuffle(12).batch(4).with_options(options)
        first, _ = agreed([dataset] * 2)
        assert first.options().threading.private_threadpool_size == 2

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Range(12).batch(4),
            lambda: Range(12).shuffle(12, seed=1).batch(4),
            lambda: Range(2).flat_map(lambda i: Range(6).shuffle(6, seed=2)),
            lambda: tf.data.Dataset.from_generator(
                generator, output_signature=tf.TensorSpec([], tf.int64)
            ),
            lambda: (
                Range(12)
                .batch(4)
                .map(lambda x: x * tf.random.shuffle(tf.ones(2, tf.int64))[0])
            ),
        ],
    )
    def test_equal_orders_stay_untouched(self, make, written):
        datasets = [make(), make()]
        assert agreed(datasets) == datasets
        assert not written

    def test_equal_global_seeds_stay_untouched(self, written):
        datasets = made_with_seeds(lambda: Range(12).shuffle(12), (5, 5))
        assert agreed(datasets) == datasets
        assert not written

    def test_refuses_what_cannot_be_written(self, monkeypatch):
        def fails(**kwargs):
            raise tf.errors.FailedPreconditionError(None, None, "too big")

        monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", fails)
        with pytest.raises(
            ValueError, match=r"\[-1, -1\].*same `seed` to `shuffle`"
        ):
            agreed([Range(12).shuffle(12)] * 2)

    def test_refuses_different_pipelines(self):
        with pytest.raises(
            ValueError,
            match="worker 0 shuffles rows at 1 places; worker 1 .* at 2",
        ):
            agreed([Range(12).shuffle(12), Range(12).shuffle(12).shuffle(3)])


def array_rows(dataset):
    """The rows of the arrays in order, after a check that they go together."""
    order = []
    for x, y in dataset:
        dense = tf.sparse.to_dense(x["z"])[:, 0]
        np.testing.assert_array_equal(x["x"], y)
        np.testing.assert_array_equal(dense, y)
        order += y.numpy().tolist()
    return order


class TestArrays:
    @pytest.mark.parametrize("seeds", [(None, None), (1, 2), (0, 0)])
    @pytest.mark.parametrize("shuffle", [True, "batch"])
    def test_workers_read_in_one_order(self, shuffle, seeds, written):
        datasets = made_with_seeds(lambda: pipelines.of_arrays(shuffle), seeds)
        tf.random.set_seed(3)
        first, second = agreed(datasets)
        orders = [array_rows(first) for _ in range(3)]
        assert orders == [array_rows(second) for _ in range(3)]
        assert len({tuple(order) for order in orders}) == 3
        for order in orders:
            assert sorted(order) == [*range(50)]
            batches = [sorted(order[i : i + 8]) for i in range(0, 50, 8)]
            is_by_batch = batches[0] == [*range(8)]
            assert is_by_batch == (shuffle == "batch")
        assert first.element_spec == datasets[0].element_spec
        assert not written

    def test_a_global_seed_makes_runs_repeatable(self):
        runs = [
            array_rows(
                agreed(made_with_seeds(lambda: pipelines.of_arrays(True), s))[1]
            )
            for s in [(0, 1), (0, 2), (4, 2)]
        ]
        assert runs[0] == runs[1] != runs[2]

    def test_unseeded_runs_differ(self):
        first, second = (
            array_rows(
                agreed([pipelines.of_arrays(True), pipelines.of_arrays(True)])[
                    0
                ]
            )
            for _ in range(2)
        )
        assert first != second

    def test_without_shuffle_stay_untouched(self, written):
        datasets = [pipelines.of_arrays(False), pipelines.of_arrays(False)]
        assert agreed(datasets) == datasets
        assert not written

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_every_row_once_over_workers(self, shuffle):
        datasets = [pipelines.of_arrays(shuffle) for _ in range(3)]
        shards = pipelines.shard(datasets, [1, 2, 1])
        for _ in range(3):
            seen = [row for own in shards for row in array_rows(own)]
            assert sorted(seen) == [*range(50)]
