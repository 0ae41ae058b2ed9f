"""Workers notice that their datasets are not made of the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_avgstrategy.input import fingerprints

ROWS = np.arange(12.0).reshape(6, 2)
slices = tf.data.Dataset.from_tensor_slices


def differing(one, other):
    """Names of what differs in the fingerprints of two datasets."""
    one, other = map(fingerprints.of_dataset, (one, other))
    return {name for name, a, b in zip(one._fields, one, other) if a != b}


class TestOfDataset:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: slices(ROWS).shuffle(6).batch(2),
            lambda: slices({"x": ROWS, "name": list("abcdef")}).batch(2),
            lambda: tf.data.Dataset.range(6).map(lambda i: ROWS[0] * 2.0),
            lambda: tf.data.Dataset.range(6).map(
                lambda i: tf.gather(tf.constant(ROWS), i)
            ),
            lambda: tf.data.Dataset.range(6).interleave(
                lambda i: tf.data.Dataset.range(i).shuffle(3)
            ),
            lambda: slices(tf.sparse.from_dense(ROWS)),
            lambda: slices(tf.ragged.constant([[1], [2, 3]])),
        ],
    )
    def test_same_code_gives_the_same(self, make):
        assert differing(make(), make()) == set()

    @pytest.mark.parametrize(
        "one, other, name",
        [
            (slices(ROWS), slices(ROWS[::-1]), "rows"),
            (slices(ROWS), slices(ROWS.astype("float32")), "rows"),
            (slices(["a", "b"]), slices(["b", "a"]), "files"),
            (
                tf.data.TextLineDataset(["a", "b"]),
                tf.data.TextLineDataset(["a", "c"]),
                "files",
            ),
            (slices(ROWS).shard(2, 0), slices(ROWS).shard(2, 1), "shards"),
            (slices(ROWS).skip(1), slices(ROWS).skip(2), "pipeline"),
            (slices(ROWS).batch(2), slices(ROWS).repeat().batch(2), "pipeline"),
            (tf.data.Dataset.range(3), tf.data.Dataset.range(4), "pipeline"),
            (
                slices(ROWS).map(lambda row: row * 1.0),
                slices(ROWS).map(lambda row: row * 2.0),
                "constants",
            ),
        ],
    )
    def test_tells_what_differs(self, one, other, name):
        assert differing(one, other) == {name}

    def test_captured_tensors(self):
        def make(rows):
            tensor = tf.constant(rows)
            return tf.data.Dataset.range(6).map(lambda i: tf.gather(tensor, i))

        assert differing(make(ROWS), make(ROWS[::-1])) == {"constants"}

    def test_files_may_lie_in_other_folders(self):
        one = slices(["/disk1/train/a.png", "/disk1/train/b.png"])
        other = slices(["/mnt/data/a.png", "/mnt/data/b.png"])
        assert differing(one, other) == set()

    def test_large_tensors_are_looked_at_in_parts(self):
        rows = np.random.default_rng(0).normal(size=(100_000, 8))
        assert differing(slices(rows), slices(rows)) == set()
        order = np.random.default_rng(1).permutation(len(rows))
        assert differing(slices(rows), slices(rows[order])) == {"rows"}

    def test_seeds_are_agreed_on_elsewhere(self):
        def make(seed):
            return tf.data.Dataset.range(3).interleave(
                lambda i: tf.data.Dataset.range(3).shuffle(3, seed=seed)
            )

        assert differing(make(1), make(2)) == set()

    @pytest.mark.parametrize(
        "make",
        [
            lambda: tf.data.Dataset.from_generator(
                lambda: iter(ROWS), output_signature=tf.TensorSpec([2])
            ),
            lambda: slices(ROWS).map(
                lambda row: tf.numpy_function(np.abs, [row], tf.float64)
            ),
            lambda: slices(tf.ragged.constant([[1], [2, 3]])),
            lambda: slices(tf.sparse.from_dense(ROWS)),
        ],
    )
    def test_knows_what_it_does_not_know(self, make):
        assert not fingerprints.of_dataset(make()).is_known

    def test_a_pydataset_is_not_known(self):
        class Rows(keras.utils.PyDataset):
            def __len__(self):
                return 2

            def __getitem__(self, place):
                return ROWS, ROWS

        seen = []

        class Strategy(tf.distribute.OneDeviceStrategy):
            def experimental_distribute_dataset(self, dataset, options=None):
                seen.append(fingerprints.of_dataset(dataset).is_known)
                return super().experimental_distribute_dataset(dataset)

        with Strategy("CPU:0").scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        model.evaluate(Rows(), verbose=0)
        model.evaluate(ROWS, ROWS, verbose=0)
        assert seen == [0, 1]


def test_check_same_names_the_worker():
    same = fingerprints.of_dataset(slices(ROWS))
    fingerprints.check_same([same, same, same])
    other = fingerprints.of_dataset(slices(ROWS[::-1]))
    with pytest.raises(ValueError, match="other values on worker 2 than on"):
        fingerprints.check_same([same, same, other])


class TestFirstBatch:
    def read(self, *components, epochs=1):
        watched = fingerprints.FirstBatch()
        data = watched.watch(slices(components).batch(4))
        for _ in range(epochs):
            batches = [b for b in data]
            assert len(batches) == 2
            np.testing.assert_array_equal(
                np.concatenate([b[0] for b in batches]), components[0]
            )
        return watched.of_last_iterator()

    def test_rows_are_compared(self):
        rows = self.read(ROWS, ROWS)
        fingerprints.check_first_batches([rows, self.read(ROWS, ROWS)])
        other = self.read(ROWS[::-1], ROWS[::-1])
        with pytest.raises(ValueError, match="other rows on worker 1 than on"):
            fingerprints.check_first_batches([rows, other])
        # Of another epoch: one of the two is behind.
        later = self.read(ROWS[::-1], ROWS[::-1], epochs=2)
        fingerprints.check_first_batches([rows, later])

    def test_augmented_rows_are_known_by_their_labels(self):
        labels = np.arange(6)
        one = self.read(ROWS, labels)
        fingerprints.check_first_batches([one, self.read(ROWS + 0.5, labels)])
        # Labels that are all alike tell nothing.
        one = self.read(ROWS, 0 * labels)
        other = self.read(ROWS + 0.5, 0 * labels)
        with pytest.raises(ValueError, match="other rows on worker 1 than on"):
            fingerprints.check_first_batches([one, other])

    def test_other_batches_of_the_epoch_are_not(self):
        changed = ROWS.copy()
        changed[5] = -1
        fingerprints.check_first_batches(
            [self.read(ROWS, ROWS), self.read(changed, changed)]
        )
