import hypothesis
import numpy as np
import pipelines
import pytest
import tensorflow as tf
from absl import logging
from hypothesis import strategies as st

from tf_avgstrategy.input import sharding

Policy = tf.data.experimental.AutoShardPolicy


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def no_agree(values):
    raise AssertionError("one worker has nobody to agree with")


def write_records(folder, num_files, rows_per_file):
    """Writes records "0", "1", ... and returns the names of the files."""
    names = []
    for index in range(num_files):
        names.append(str(folder / f"{index}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for row in range(rows_per_file):
                writer.write(str(index * rows_per_file + row).encode())
    return names


def ids(batch):
    return tf.strings.to_number(batch, tf.int64)


class TestByRows:
    def test_replicas_take_the_rows_of_a_batch_by_rank(self):
        # 7 rows over 3 replicas: 3, 2, 2. The last batch has 4: 3, 1, 0.
        dataset = with_policy(tf.data.Dataset.range(11).batch(7), Policy.DATA)
        first, second = pipelines.shard([dataset] * 2, [1, 2])
        assert pipelines.elements(first) == [[0, 1, 2], [7, 8, 9]]
        assert pipelines.elements(second) == [[3, 4], [5, 6], [10], []]
        assert int(first.cardinality()) == 2
        assert int(second.cardinality()) == 4

    def test_one_worker_agrees_with_nobody(self):
        dataset = tf.data.Dataset.range(6).shuffle(6).batch(4)
        shards = sharding.shard(dataset, replicas=[2], rank=0, agree=no_agree)
        sizes = [len(e) for e in pipelines.elements(shards)]
        assert sizes == [2, 2, 2, 0]
        assert sorted(pipelines.rows(shards)) == [*range(6)]

    def test_one_replica_has_the_dataset(self):
        dataset = tf.data.Dataset.range(5).batch(2)
        shards = sharding.shard(dataset, replicas=[1], rank=0, agree=no_agree)
        assert pipelines.elements(shards) == [[0, 1], [2, 3], [4]]

    @pytest.mark.parametrize("replicas", [[1, 1], [1, 2], [1, 1, 2]])
    def test_batch_size_unknown_before_reading(self, replicas):
        dataset = tf.data.Dataset.range(11).batch(4).map(lambda x: x + 0)
        shards = pipelines.shard(
            [with_policy(dataset, Policy.DATA)] * len(replicas), replicas
        )
        steps = {
            len(pipelines.elements(s)) / r for s, r in zip(shards, replicas)
        }
        assert steps == {3}
        assert sorted(r for s in shards for r in pipelines.rows(s)) == [
            *range(11)
        ]

    def test_elements_do_not_come_as_they_get_ready(self):
        options = tf.data.Options()
        options.deterministic = False
        dataset = tf.data.Dataset.range(8).batch(4).with_options(options)
        for own in pipelines.shard([with_policy(dataset, Policy.DATA)] * 2):
            assert own.options().deterministic is True

    def test_batches_larger_than_the_first_lose_nothing(self):
        dataset = tf.data.Dataset.range(4).batch(2)
        dataset = dataset.concatenate(tf.data.Dataset.range(4, 9).batch(5))
        shards = pipelines.shard([with_policy(dataset, Policy.DATA)] * 2)
        assert sorted(r for s in shards for r in pipelines.rows(s)) == [
            *range(9)
        ]

    @hypothesis.given(
        num_rows=st.integers(0, 20),
        batch_size=st.integers(1, 9),
        replicas=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        is_known=st.booleans(),
    )
    @hypothesis.settings(max_examples=8)
    def test_parts_of_a_batch_are_the_batch(
        self, num_rows, batch_size, replicas, is_known
    ):
        dataset = tf.data.Dataset.range(num_rows).batch(batch_size)
        batches = pipelines.elements(dataset)
        if not is_known:
            dataset = dataset.map(tf.identity)
        dataset = with_policy(dataset, Policy.DATA)
        shards = pipelines.shard([dataset] * len(replicas), replicas)
        parts = [pipelines.elements(s) for s in shards]
        for step, batch in enumerate(batches):
            together = []
            for own, count in zip(parts, replicas):
                for part in own[step * count : (step + 1) * count]:
                    together += part
            assert together == batch
        assert [len(p) for p in parts] == [len(batches) * r for r in replicas]

    @pytest.mark.parametrize(
        ("size", "is_exact", "static"),
        [(4, True, [2]), (5, True, [None]), (4, False, [None])],
    )
    def test_size_is_static_if_it_never_differs(self, size, is_exact, static):
        dataset = tf.data.Dataset.range(20)
        dataset = dataset.batch(size, drop_remainder=is_exact)
        part = sharding.shard(dataset, replicas=[2], rank=0, agree=no_agree)
        assert part.element_spec.shape.as_list() == static

    def test_size_is_static_for_one_replica_of_each_worker(self):
        dataset = tf.data.Dataset.range(20).batch(5, drop_remainder=True)
        shapes = [s.element_spec.shape for s in pipelines.shard([dataset] * 2)]
        assert shapes == [[3], [2]]

    @pytest.mark.parametrize("repeat", [None, 2, -1])
    def test_cardinality_stays_known(self, repeat):
        dataset = tf.data.Dataset.range(8).batch(4).repeat(repeat)
        for part in pipelines.shard([dataset] * 2, [1, 2]):
            is_finite = repeat == 2
            assert (int(part.cardinality()) > 0) == is_finite
            assert part.cardinality() != tf.data.UNKNOWN_CARDINALITY

    @pytest.mark.parametrize(
        "function",
        [
            tf.random.shuffle,
            lambda x: tf.gather(x, tf.random.shuffle(tf.range(4))),
        ],
    )
    def test_refuses_rows_that_change_places_in_a_batch(self, function):
        dataset = tf.data.Dataset.range(12).batch(4).map(function)
        with pytest.raises(
            ValueError, match="returns what `tf.random.shuffle`"
        ):
            pipelines.shard([with_policy(dataset, Policy.DATA)] * 2)

    def test_refuses_what_was_made_of_shuffled_arrays(self):
        dataset = pipelines.of_arrays(True).map(lambda x, y: y)
        with pytest.raises(ValueError, match="permutation"):
            pipelines.shard([dataset] * 2)


class TestStructures:
    def parts(self, dataset):
        return [
            part
            for shards in pipelines.shard(
                [with_policy(dataset, Policy.DATA)] * 2
            )
            for part in shards
        ]

    def test_nested_with_none_and_strings(self):
        features = {"a": np.arange(6).reshape(3, 2), "b": np.array(list("xyz"))}
        dataset = tf.data.Dataset.from_tensor_slices(features).batch(3)
        dataset = dataset.map(lambda f: (f, None))
        first, second = self.parts(dataset)
        assert first[1] is None
        assert first[0]["a"].numpy().tolist() == [[0, 1], [2, 3]]
        assert second[0]["a"].numpy().tolist() == [[4, 5]]
        assert first[0]["b"].numpy().tolist() == [b"x", b"y"]

    def test_ragged(self):
        ragged = tf.ragged.constant([[1], [], [2, 3]])
        dataset = tf.data.Dataset.from_tensor_slices(ragged).batch(3)
        first, second = self.parts(dataset)
        assert first.to_list() == [[1], []]
        assert second.to_list() == [[2, 3]]

    def test_sparse_with_a_part_without_rows(self):
        sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]])
        dataset = tf.data.Dataset.from_tensor_slices(sparse).batch(2)
        parts = self.parts(dataset)
        dense = [tf.sparse.to_dense(p).numpy().tolist() for p in parts]
        assert dense == [[[1, 0]], [[3, 0]], [[0, 2]], []]
        assert parts[0].shape[1] == 2

    def test_unknown_rank(self):
        dataset = tf.data.Dataset.range(4).batch(4)
        dataset = dataset.map(lambda x: tf.py_function(abs, [x], tf.int64))
        first, second = self.parts(dataset)
        assert first.numpy().tolist() == [0, 1]
        assert second.numpy().tolist() == [2, 3]

    @pytest.mark.parametrize(
        "dataset",
        [
            tf.data.Dataset.range(3),
            tf.data.Dataset.range(3).batch(2).map(lambda x: (x, x[0])),
            tf.data.Dataset.range(3).window(2),
        ],
    )
    def test_refuses_what_is_not_batched(self, dataset):
        with pytest.raises(
            ValueError,
            match=r"(?s)Received: element_spec=.*Add `\.batch\(\.\.\.\)`",
        ):
            sharding.shard(dataset, replicas=[1], rank=0, agree=no_agree)


class TestOneFile:
    """Case DATA-01: one file with 8 rows and two workers."""

    @pytest.fixture
    def dataset(self, tmp_path):
        names = write_records(tmp_path, 1, 8)
        return tf.data.TFRecordDataset(names).batch(4).map(ids)

    def test_data_01_auto_keeps_rows_and_says_so(self, dataset, monkeypatch):
        logged = []
        monkeypatch.setattr(
            logging, "info", lambda text, *args: logged.append(text % args)
        )
        first, second = pipelines.shard([with_policy(dataset, Policy.AUTO)] * 2)
        assert sorted(pipelines.rows(first) + pipelines.rows(second)) == [
            *range(8)
        ]
        assert len(logged) == 2  # One line of each worker.
        assert "1 file, which cannot be dealt out to 2 workers" in logged[0]

    def test_data_01_data(self, dataset):
        first, second = pipelines.shard([with_policy(dataset, Policy.DATA)] * 2)
        assert pipelines.rows(first) == [0, 1, 4, 5]
        assert pipelines.rows(second) == [2, 3, 6, 7]

    def test_data_01_off(self, dataset):
        shards = pipelines.shard([with_policy(dataset, Policy.OFF)] * 2)
        for own in shards:
            # As many as there are batches, or Keras would stop half way.
            assert pipelines.elements(own) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_data_01_file(self, dataset):
        with pytest.raises(
            ValueError, match="Received: 1 file for 2 workers.*Policy.DATA"
        ):
            pipelines.shard([with_policy(dataset, Policy.FILE)] * 2)

    def test_data_01_three_workers_two_files(self, tmp_path):
        names = write_records(tmp_path, 2, 4)
        dataset = tf.data.TFRecordDataset(names).batch(3).map(ids)
        shards = pipelines.shard([with_policy(dataset, Policy.AUTO)] * 3)
        seen = [pipelines.rows(s) for s in shards]
        assert sorted(sum(seen, [])) == [*range(8)]
        assert all(seen)
        with pytest.raises(ValueError, match="2 files for 3 workers"):
            pipelines.shard([with_policy(dataset, Policy.FILE)] * 3)


READERS = {
    "records": lambda names: tf.data.TFRecordDataset(names),
    "parallel": lambda names: tf.data.TFRecordDataset(
        names, num_parallel_reads=2
    ),
    "shuffled names": lambda names: tf.data.TFRecordDataset(
        tf.data.Dataset.from_tensor_slices(names).shuffle(len(names))
    ),
    "list_files": lambda names: tf.data.Dataset.list_files(names).interleave(
        tf.data.TFRecordDataset, num_parallel_calls=2
    ),
    "nested": lambda names: (
        tf.data.Dataset.from_tensor_slices(names)
        .shuffle(9)
        .flat_map(lambda name: tf.data.TFRecordDataset(name).shuffle(9))
    ),
}


class TestByFiles:
    @pytest.mark.parametrize(
        ("policy", "num_files"), [(Policy.AUTO, 2), (Policy.FILE, 3)]
    )
    @pytest.mark.parametrize("reader", READERS)
    def test_each_file_goes_to_one_worker(
        self, reader, policy, num_files, tmp_path
    ):
        names = write_records(tmp_path, num_files, 4)
        datasets = [
            with_policy(READERS[reader](names).batch(4).map(ids), policy)
            for _ in range(2)
        ]
        for _ in range(2):
            first, second = (
                pipelines.rows(s) for s in pipelines.shard(datasets)
            )
            assert sorted(first + second) == [*range(4 * num_files)]
            assert {row // 4 % 2 for row in first} == {0}
            assert {row // 4 for row in second} == {1}

    def test_batches_are_split_over_all_replicas(self, tmp_path):
        names = write_records(tmp_path, 2, 5)
        dataset = tf.data.TFRecordDataset(names).batch(4).map(ids)
        first, second = pipelines.shard([dataset] * 2, [1, 2])
        # The batch size is unknown after a map: 4 over 3 is 2, 1, 1.
        assert pipelines.elements(first) == [[0, 1], [2], [3], [4]]
        assert pipelines.elements(second) == [[5, 6], [7], [8], [9]]

    def test_hint(self, tmp_path):
        names = write_records(tmp_path, 2, 4)
        hint = tf.data.experimental.SHARD_HINT
        dataset = tf.data.Dataset.from_tensor_slices(names).shard(hint, hint)
        dataset = dataset.flat_map(tf.data.TFRecordDataset).batch(4).map(ids)
        dataset = with_policy(dataset, Policy.HINT)
        first, second = pipelines.shard([dataset] * 2)
        assert pipelines.rows(first) == [0, 1, 2, 3]
        assert pipelines.rows(second) == [4, 5, 6, 7]
        (alone,) = pipelines.shard([dataset])
        assert pipelines.rows(alone) == [*range(8)]

    def test_hint_on_shuffled_rows(self):
        hint = tf.data.experimental.SHARD_HINT

        def make():
            dataset = tf.data.Dataset.range(8).shuffle(8).shard(hint, hint)
            return with_policy(dataset.batch(4), Policy.HINT)

        first, second = pipelines.shard([make(), make()])
        assert sorted(pipelines.rows(first) + pipelines.rows(second)) == [
            *range(8)
        ]

    def test_csv_files_are_read_by_all(self, tmp_path):
        for index in range(2):
            lines = ["a", *(str(index * 4 + row) for row in range(4))]
            (tmp_path / f"{index}.csv").write_text("\n".join(lines))

        def make():
            return tf.data.experimental.make_csv_dataset(
                str(tmp_path / "*.csv"), 4, num_epochs=1
            ).map(lambda row: row["a"])

        first, second = pipelines.shard([make(), make()])
        assert sorted(pipelines.rows(first) + pipelines.rows(second)) == [
            *range(8)
        ]
        with pytest.raises(ValueError, match="2 files for 2 workers"):
            pipelines.shard(
                [with_policy(make(), Policy.FILE) for _ in range(2)]
            )

    def test_each_reader_needs_enough_files(self, tmp_path):
        names = write_records(tmp_path, 3, 2)
        dataset = tf.data.TFRecordDataset(names[:1])
        dataset = dataset.concatenate(tf.data.TFRecordDataset(names[1:]))
        first, second = pipelines.shard([dataset.batch(2).map(ids)] * 2)
        assert sorted(pipelines.rows(first) + pipelines.rows(second)) == [
            *range(6)
        ]

    def test_file_without_files(self):
        dataset = with_policy(tf.data.Dataset.range(8).batch(4), Policy.FILE)
        with pytest.raises(ValueError, match="unknown number of files for 2"):
            pipelines.shard([dataset] * 2)

    def test_names_what_each_worker_found(self, tmp_path):
        names = write_records(tmp_path, 3, 2)
        datasets = [
            tf.data.TFRecordDataset(names[:count]).batch(2) for count in (2, 3)
        ]
        with pytest.raises(
            ValueError,
            match="worker 0 has policy AUTO and 2 files; "
            "worker 1 has policy AUTO and 3 files",
        ):
            pipelines.shard(datasets)
