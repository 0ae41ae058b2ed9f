"""The mean of finished models, of every kind of file, by hand."""

import json
import subprocess
import sys
import tempfile
import zipfile

import h5py
import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
import toys
from hypothesis import strategies
from keras import layers

import tf_avgstrategy as avg
from tf_avgstrategy.tools import cli

KINDS = ["keras", "weights", "checkpoint", "saved_model"]


def slope(value, optimizer="adam", slots=None, iterations=0):
    """y = value * x, with equal values in all slots."""
    model = toys.slope_model(optimizer)
    model.layers[0].kernel.assign([[value]])
    if slots is not None:
        model.optimizer.build(model.trainable_variables)
        for variable in model.optimizer.variables[2:]:
            variable.assign(tf.fill(variable.shape, slots))
        model.optimizer.iterations.assign(iterations)
    return model


def save(model, folder, name, kind):
    """Saves a model in one of four ways and returns the path."""
    if kind == "keras":
        path = folder / f"{name}.keras"
        model.save(path)
    elif kind == "weights":
        path = folder / f"{name}.weights.h5"
        model.save_weights(path)
    elif kind == "checkpoint":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(str(folder / name))
    else:
        path = folder / name
        model.export(path, verbose=False)
    return str(path)


def load(path, kind, like):
    """Returns a model with what a file holds, `like` for its variables."""
    if kind == "keras":
        return keras.models.load_model(path)
    if kind == "weights":
        like.load_weights(path)
        return like
    checkpoint = tf.train.Checkpoint(model=like, optimizer=like.optimizer)
    checkpoint.restore(path).assert_consumed()
    return like


def served(path, value):
    loaded = tf.saved_model.load(str(path))
    return float(loaded.serve(tf.constant([[value]]))[0, 0])


def output_of(folder, kind):
    suffix = {"keras": ".keras", "weights": ".weights.h5"}.get(kind, "")
    return str(folder / f"mean{suffix}")


def bits(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [v.numpy().tobytes() for v in variables]


def batch_norm_model(mean=0.0, variance=1.0, gamma=1.0, name=None):
    model = keras.Sequential(
        [layers.Input((1,)), layers.BatchNormalization(name=name)]
    )
    model.compile(toys.sgd(), "mse")
    for variable, value in zip(
        model.layers[0].variables, (gamma, 0.0, mean, variance)
    ):
        variable.assign([value])
    return model


class Typed(layers.Layer):
    """One variable of each dtype that matters."""

    VALUES = {
        "float16": (60000, 60000),
        "bfloat16": (1, 3),
        "float64": (1, 1 + 2**-40),
        "int32": (3, 4),
        "int64": (2**53 + 1, 2**53 + 1),
        "bool": (True, False),
        "uint32": ([1, 2], [3, 4]),
    }
    MEANS = {
        "float16": 60000,
        "bfloat16": 2,
        "float64": 1 + 2**-41,
        "int32": 4,
        "int64": 2**53 + 1,
        "bool": True,
        "uint32": [1, 2],
    }

    def build(self, _):
        for dtype, (value, _) in self.VALUES.items():
            variable = self.add_weight(
                shape=np.shape(value),
                dtype=dtype,
                initializer="zeros",
                name=dtype,
                trainable=False,
            )
            setattr(self, f"a_{dtype}", variable)

    def call(self, x):
        return x


def typed_model(which):
    model = keras.Sequential([layers.Input((1,)), Typed()])
    model.compile(toys.sgd(), "mse")
    for variable, values in zip(model.variables, Typed.VALUES.values()):
        variable.assign(values[which])
    return model


class TestEveryKind:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "values, weights, expected",
        [((1.0, 2.0, 6.0), None, 3.0), ((1.0, 4.0), (2, 1), 2.0)],
    )
    def test_mean_by_hand(self, tmp_path, kind, values, weights, expected):
        paths = [
            save(slope(value), tmp_path, f"m{place}", kind)
            for place, value in enumerate(values)
        ]
        output = output_of(tmp_path, kind)
        result = avg.average_models(paths, weights, output=output)
        assert result is None
        if kind == "saved_model":
            assert served(output, 2.0) == 2 * expected
        else:
            model = load(output, kind, slope(0.0))
            assert toys.weight(model) == expected
            x = np.array([[2.0]], "float32")
            assert model.predict(x, verbose=0) == 2 * expected
        assert not list(tmp_path.glob(".*"))

    @pytest.mark.parametrize("kind", KINDS[:3])
    def test_slots_are_averaged_and_the_counter_is_the_largest(
        self, tmp_path, kind
    ):
        models = [
            slope(1.0, slots=1.0, iterations=5),
            slope(3.0, slots=4.0, iterations=9),
        ]
        models[1].optimizer.learning_rate.assign(0.5)
        paths = [
            save(model, tmp_path, f"m{place}", kind)
            for place, model in enumerate(models)
        ]
        output = output_of(tmp_path, kind)
        avg.average_models(paths, output=output)
        model = load(output, kind, slope(0.0, slots=0.0))
        momentum, velocity = model.optimizer.variables[2:]
        assert (momentum.numpy(), velocity.numpy()) == (2.5, 2.5)
        assert int(model.optimizer.iterations) == 9
        assert model.optimizer.learning_rate == np.float32(0.001)

    @pytest.mark.parametrize("kind", [*KINDS, "memory"])
    def test_variance_is_that_of_all_rows(self, tmp_path, kind):
        # Mean of (1, 3) is 2; the means 0 and 4 lie 2 from theirs: 2 + 4.
        models = [batch_norm_model(0, 1, 1), batch_norm_model(4, 3, 3)]
        if kind == "memory":
            mean = avg.average_models(models)
        else:
            paths = [
                save(model, tmp_path, f"m{place}", kind)
                for place, model in enumerate(models)
            ]
            output = output_of(tmp_path, kind)
            avg.average_models(paths, output=output)
            if kind == "saved_model":
                expected = 2 * (6 - 2) / (6 + 0.001) ** 0.5
                assert served(output, 6.0) == pytest.approx(expected)
                return
            mean = load(output, kind, batch_norm_model())
        values = [float(v.numpy()[0]) for v in mean.layers[0].variables]
        assert values == [2.0, 0.0, 2.0, 6.0]

    @pytest.mark.parametrize("kind", [*KINDS[:3], "memory"])
    def test_equal_models_keep_their_bits(self, tmp_path, kind):
        model = keras.Sequential(
            [
                layers.Input((3,)),
                layers.Dense(5),
                layers.BatchNormalization(),
                layers.Dense(1),
            ]
        )
        model.compile("adam", "mse")
        x = np.random.default_rng(0).normal(size=(8, 3))
        model.fit(x, x[:, :1], verbose=0)
        model.layers[0].bias.assign([-0.0] * 5)
        if kind == "memory":
            mean = avg.average_models([model] * 3, [1, 5, 3])
        else:
            path = save(model, tmp_path, "m", kind)
            output = output_of(tmp_path, kind)
            avg.average_models([path] * 3, [1, 5, 3], output=output)
            other = keras.models.clone_model(model)
            other.compile("adam", "mse")
            other.optimizer.build(other.trainable_variables)
            mean = load(output, kind, other)
        assert bits(mean) == bits(model)

    @pytest.mark.parametrize("kind", [*KINDS[:3], "memory"])
    def test_other_dtypes(self, tmp_path, kind):
        models = [typed_model(0), typed_model(1)]
        if kind == "memory":
            mean = avg.average_models(models, custom_objects={"Typed": Typed})
        else:
            paths = [
                save(model, tmp_path, f"m{place}", kind)
                for place, model in enumerate(models)
            ]
            output = output_of(tmp_path, kind)
            avg.average_models(paths, output=output)
            with keras.saving.custom_object_scope({"Typed": Typed}):
                mean = load(output, kind, typed_model(1))
        for variable, (dtype, value) in zip(
            mean.variables, Typed.MEANS.items()
        ):
            assert variable.dtype == dtype
            np.testing.assert_array_equal(
                np.asarray(variable.numpy(), object), value, dtype
            )

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_mean_may_replace_a_model(self, tmp_path, kind):
        paths = [
            save(slope(value), tmp_path, f"m{place}", kind)
            for place, value in enumerate((1.0, 5.0))
        ]
        avg.average_models(paths, output=paths[0])
        avg.average_models(paths, output=paths[0])
        if kind == "saved_model":
            assert served(paths[0], 1.0) == 4.0
        else:
            assert toys.weight(load(paths[0], kind, slope(0.0))) == 4.0
        assert not list(tmp_path.glob(".*"))
        if kind == "checkpoint":
            # Only the files of the last one: its index and 2 shards at most.
            (count,) = {
                path.name.rpartition("-")[2]
                for path in tmp_path.glob("m0-1.data-*")
            }
            files = len(list(tmp_path.glob("m0-1.*")))
            assert files == 1 + int(count)

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_fails_leaves_the_old_file(self, tmp_path, kind):
        paths = [
            save(slope(value), tmp_path, f"m{place}", kind)
            for place, value in enumerate((1.0, np.nan))
        ]
        before = _contents(tmp_path)
        with pytest.raises(ValueError, match=r"NaN or infinity in '.*m1"):
            avg.average_models(paths, output=paths[0])
        assert _contents(tmp_path) == before
        avg.average_models(paths, [1, 0], output=paths[1])

    @pytest.mark.parametrize("kind", KINDS)
    def test_order_does_not_matter(self, tmp_path, kind):
        values = (1.0, 2.0, 6.0)
        for order in ((0, 1, 2), (2, 0, 1)):
            paths = [
                save(slope(values[i]), tmp_path, f"m{i}{order[0]}", kind)
                for i in order
            ]
            output = output_of(tmp_path, kind)
            avg.average_models(paths, [1 + i for i in order], output=output)
            # (1 + 4 + 18) / 6
            expected = float(np.float32(23 / 6))
            if kind == "saved_model":
                assert served(output, 1.0) == expected
            else:
                model = load(output, kind, slope(0.0))
                assert toys.weight(model) == expected


def _contents(folder):
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


class TestFiles:
    def test_a_model_is_returned_without_output(self, tmp_path):
        paths = [
            save(slope(v, slots=v), tmp_path, str(v), "keras")
            for v in (1.0, 3.0)
        ]
        model = avg.average_models(paths)
        assert toys.weight(model) == 2.0
        assert model.optimizer.variables[2].numpy() == 2.0

    def test_the_folder_of_a_checkpoint(self, tmp_path):
        for value in (1.0, 3.0):
            checkpoint = tf.train.Checkpoint(w=tf.Variable(value))
            checkpoint.save(tmp_path / str(value) / "checkpoint")
        output = tmp_path / "mean"
        folders = [tmp_path / "1.0", tmp_path / "3.0"]
        avg.average_models(folders, output=output)
        variable = tf.Variable(0.0)
        restored = tf.train.Checkpoint(w=variable).restore(str(output))
        restored.assert_existing_objects_matched()
        assert variable.numpy() == 2.0

    def test_large_variables_are_read_in_parts(self, tmp_path):
        arrays = np.random.default_rng(0).normal(size=(2, 3, 700_001))
        arrays = arrays.astype("float32")
        for place, array in enumerate(arrays):
            with h5py.File(tmp_path / f"{place}.weights.h5", "w") as file:
                file["layers/dense/vars/0"] = array
        output = tmp_path / "mean.weights.h5"
        avg.average_models(
            [tmp_path / f"{place}.weights.h5" for place in range(2)],
            output=output,
        )
        with h5py.File(output) as file:
            mean = file["layers/dense/vars/0"][()]
        expected = arrays.astype("float64").mean(axis=0).astype("float32")
        np.testing.assert_array_equal(mean, expected)

    def test_a_file_as_the_jax_backend_writes_it(self, tmp_path):
        # There, and with torch, the optimizer counts in int32.
        for value in (1.0, 2.0, 6.0):
            with h5py.File(tmp_path / f"{value}.weights.h5", "w") as file:
                layer = file.create_group("layers/dense/vars")
                layer.attrs["name"] = f"dense_{int(value)}"
                layer["0"] = np.float32([[value]])
                optimizer = file.create_group("optimizer/vars")
                optimizer.attrs["name"] = f"adam_{int(value)}"
                optimizer["0"] = np.int32(value)
                optimizer["1"] = np.float32(0.125)
                optimizer["2"] = optimizer["3"] = np.float32([[value]])
        like = slope(2.0, slots=2.0, iterations=2)
        paths = sorted(tmp_path.iterdir())
        paths[1] = save(like, tmp_path, "tensorflow", "weights")
        output = tmp_path / "mean.weights.h5"
        avg.average_models(paths, output=output)
        model = load(output, "weights", like)
        assert toys.weight(model) == 3.0
        assert int(model.optimizer.iterations) == 6
        assert model.optimizer.learning_rate == 0.125
        assert model.optimizer.variables[3].numpy() == 3.0
        with h5py.File(output) as file:
            assert file["optimizer/vars/0"].dtype == "int32"
            assert file["layers/dense/vars"].attrs["name"] == "dense_1"

    def test_the_config_is_the_first_ones_and_compression_is_kept(
        self, tmp_path
    ):
        paths = [
            save(slope(v), tmp_path, str(int(v)), "keras") for v in (1.0, 3.0)
        ]
        packed = tmp_path / "packed.keras"
        with (
            zipfile.ZipFile(paths[0]) as source,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
            config = source.read("config.json")
        output = tmp_path / "mean.keras"
        avg.average_models([packed, paths[1]], output=output)
        with zipfile.ZipFile(output) as archive:
            assert archive.read("config.json") == config
            assert {i.compress_type for i in archive.infolist()} == {
                zipfile.ZIP_DEFLATED
            }
        assert toys.weight(keras.models.load_model(output)) == 2.0

    def test_a_batch_norm_of_any_name_in_a_keras_file(self, tmp_path):
        paths = [
            save(batch_norm_model(m, 1, name="bn"), tmp_path, str(m), "keras")
            for m in (0, 4)
        ]
        model = avg.average_models(paths)
        assert model.layers[0].moving_variance.numpy() == 5.0

    def test_variables_of_a_saved_model_are_matched_by_name(self, tmp_path):
        # Keras lists some of them in the order of their addresses.
        def build(value):
            x = inputs = layers.Input((1,))
            for place in range(6):
                layer = layers.Dense(1, use_bias=False, name=f"d{place}")
                x = layer(x)
                layer.kernel.assign([[value if place == 0 else 1.0]])
            return keras.Model(inputs, x)

        paths = [
            save(build(value), tmp_path, str(value), "saved_model")
            for value in (1.0, 2.0, 6.0)
        ]
        avg.average_models(paths, output=tmp_path / "mean")
        prefix = str(tmp_path / "mean" / "variables" / "variables")
        values = sorted(
            float(tf.train.load_variable(prefix, name).item())
            for name, shape in tf.train.list_variables(prefix)
            if shape == [1, 1]
        )
        assert values == [1.0] * 10 + [3.0] * 2
        assert served(tmp_path / "mean", 1.0) == 3.0

    def test_loss_scale(self, tmp_path):
        paths = []
        for scale, counter in ((8.0, 3), (2.0, 5)):
            model = slope(
                1.0, keras.optimizers.LossScaleOptimizer(toys.sgd()), slots=0.0
            )
            model.optimizer.dynamic_scale.assign(scale)
            model.optimizer.step_counter.assign(counter)
            paths.append(save(model, tmp_path, str(scale), "keras"))
        optimizer = avg.average_models(paths).optimizer
        assert float(optimizer.dynamic_scale) == 2.0
        assert int(optimizer.step_counter) == 0

    @hypothesis.settings(max_examples=20)
    @hypothesis.given(
        strategies.lists(
            strategies.tuples(
                strategies.floats(-(2.0**90), 2.0**90, width=32),
                strategies.floats(0.125, 1e6),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_is_the_mean_in_float64(self, pairs):
        values, weights = zip(*pairs)
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{p}.weights.h5" for p in range(len(values))]
            for path, value in zip(paths, values):
                with h5py.File(path, "w") as file:
                    file["vars/0"] = np.float32([value])
            avg.average_models(paths, weights, output=paths[0])
            with h5py.File(paths[0]) as file:
                (mean,) = file["vars/0"][()]
        expected = np.average(np.float64(values), weights=weights)
        # Half a unit of float32 by rounding, the rest by cancellation.
        assert mean == pytest.approx(
            expected, rel=1e-7, abs=1e-14 * max(map(abs, values)) + 1e-44
        )
        assert min(values) <= mean <= max(values)

    def test_a_batch_norm_that_is_an_attribute(self, tmp_path):
        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.normal = layers.BatchNormalization()

            def call(self, x):
                return self.normal(x)

        paths = []
        for moving_mean in (0.0, 4.0):
            model = Model()
            model(np.ones((1, 1)))
            model.normal.moving_mean.assign([moving_mean])
            paths.append(save(model, tmp_path, str(moving_mean), "weights"))
        avg.average_models(paths, output=paths[0])
        model.load_weights(paths[0])
        assert model.normal.moving_variance.numpy() == 5.0

    def test_two_optimizers_and_a_schedule(self, tmp_path):
        class Twins(keras.Model):
            def __init__(self, value):
                super().__init__()
                self.slope = toys.slope_layer()
                schedule = keras.optimizers.schedules.CosineDecay(0.5, 9)
                self.optimizers = [
                    keras.optimizers.Adam(schedule),
                    keras.optimizers.SGD(value, momentum=0.5),
                ]
                self(np.ones((1, 1)))
                for optimizer in self.optimizers:
                    optimizer.build(self.trainable_variables)
                    optimizer.iterations.assign(int(value))
                    optimizer.variables[-1].assign([[value]])

            def call(self, x):
                return self.slope(x)

        paths = [
            save(Twins(value), tmp_path, str(value), "weights")
            for value in (1.0, 4.0)
        ]
        avg.average_models(paths, [2, 1], output=paths[1])
        model = Twins(0.0)
        model.load_weights(paths[1])
        for optimizer in model.optimizers:
            assert int(optimizer.iterations) == 4
            assert optimizer.variables[-1].numpy() == 2.0
        assert model.optimizers[1].learning_rate == 1.0

    def test_a_checkpoint_of_half_a_period_is_refused(self, tmp_path):
        strategy = toys.make_strategy()
        with strategy.scope():
            model = toys.slope_model()
        averager = avg.ParameterAverager(
            strategy, model.variables, model.optimizer, period=2
        )
        checkpoint = tf.train.Checkpoint(model=model, averager=averager)
        whole = checkpoint.write(str(tmp_path / "whole"))
        avg.average_models([whole, whole], output=tmp_path / "mean")

        def step():
            model.trainable_variables[0].assign_add([[1.0]])

        strategy.run(step)
        averager.step()
        half = checkpoint.write(str(tmp_path / "half"))
        with pytest.raises(ValueError, match="middle of a period.*half"):
            avg.average_models([half, half], output=tmp_path / "mean")


class TestInMemory:
    def test_models_stay_as_they_are(self, tmp_path):
        models = [slope(v, slots=v, iterations=int(v)) for v in (1.0, 2.0, 6.0)]
        before = [bits(model) for model in models]
        output = tmp_path / "mean.keras"
        mean = avg.average_models(models, output=output)
        assert toys.weight(mean) == 3.0
        assert mean.optimizer.variables[2].numpy() == 3.0
        assert int(mean.optimizer.iterations) == 6
        assert [bits(model) for model in models] == before
        assert bits(keras.models.load_model(output)) == bits(mean)
        assert mean.compiled

    def test_seeds_are_the_first_ones(self):
        models = [
            keras.Sequential([layers.Input((1,)), layers.Dropout(0.5, seed=s)])
            for s in (3, 9)
        ]
        for model in models:
            model(np.ones((1, 1)), training=True)
        (seed,) = avg.average_models(models).variables
        assert seed.numpy().tolist() == [3, 1]

    def test_models_of_a_strategy(self):
        with toys.make_strategy().scope():
            models = [toys.slope_model() for _ in range(2)]
        toys.assign_per_replica(models[0].trainable_variables[0], [0.0, 2.0])
        # Mean of (0, 2) and of (4, 4).
        assert toys.weight(avg.average_models(models)) == 2.5


class TestRefusals:
    @pytest.mark.parametrize(
        "weights, message",
        [
            ([1], "1 weights for 2 models"),
            ([1, -1], r"weights=\[1.0, -1.0\]"),
            ([1, float("nan")], "finite numbers"),
            ([0, 0], "At least one weight must be > 0"),
        ],
    )
    def test_weights(self, weights, message):
        with pytest.raises(ValueError, match=message):
            avg.average_models([slope(1.0), slope(2.0)], weights)

    def test_nothing(self):
        with pytest.raises(ValueError, match="at least one model or path"):
            avg.average_models([])

    def test_models_that_are_not_built(self):
        unbuilt = keras.Sequential([layers.Dense(1)])
        with pytest.raises(ValueError, match="model 1 .* is not built"):
            avg.average_models([slope(1.0), unbuilt])

    def test_files_without_variables(self, tmp_path):
        path = tmp_path / "a.keras"
        keras.Sequential([layers.Dense(1)]).save(path)
        with pytest.raises(ValueError, match=r"must have variables.*a\.keras"):
            avg.average_models([path])

    def test_other_variables(self, tmp_path):
        def model(units, use_bias):
            return keras.Sequential(
                [layers.Input((1,)), layers.Dense(units, use_bias=use_bias)]
            )

        paths = [
            save(model(*of), tmp_path, name, "keras")
            for name, of in [
                ("a", (1, True)),
                ("b", (2, True)),
                ("c", (1, False)),
            ]
        ]
        with pytest.raises(
            ValueError,
            match=r"'layers/dense/vars/0' is float32 of shape \(1, 1\) in "
            r"'.*a\.keras' and float32 of shape \(1, 2\) in '.*b\.keras'",
        ):
            avg.average_models(paths[:2])
        with pytest.raises(ValueError, match="vars/1' is float32.* missing in"):
            avg.average_models([paths[0], paths[2]])
        with pytest.raises(ValueError, match="'kernel:0' is float32"):
            avg.average_models([model(1, True), model(2, True)])

    def test_other_optimizers(self, tmp_path):
        paths = [
            save(slope(1.0, name, slots=1.0), tmp_path, name, "keras")
            for name in ("rmsprop", "sgd", "adagrad")
        ]
        with pytest.raises(ValueError, match="optimizer/vars/2' is float32"):
            avg.average_models(paths[:2])
        with pytest.raises(ValueError, match="'rm_sprop' in .* and 'adagrad'"):
            avg.average_models([paths[0], paths[2]])

    def test_quantized_weights(self, tmp_path):
        for place in range(2):
            with h5py.File(tmp_path / f"{place}.weights.h5", "w") as file:
                file["vars/0"] = np.int8([place])
        with pytest.raises(ValueError, match="Quantized.*'vars/0'"):
            avg.average_models(
                sorted(tmp_path.iterdir()), output=tmp_path / "c.weights.h5"
            )

    def test_paths(self, tmp_path):
        a = save(slope(1.0), tmp_path, "a", "keras")
        b = save(slope(1.0), tmp_path, "b", "weights")
        other = tmp_path / "a.txt"
        other.write_text("text")
        damaged = tmp_path / "damaged.keras"
        damaged.write_text("text")
        for paths, message in [
            ([a, b], r"a \.keras, and '.*b\.weights\.h5', a \.weights\.h5"),
            ([a, slope(1.0)], "a model in memory"),
            ([a, tmp_path / "none.keras"], r"none\.keras', which does not exi"),
            ([other], r"must be a `\.keras` or.*a\.txt"),
            ([damaged], r"archive.*damaged\.keras"),
        ]:
            with pytest.raises(ValueError, match=message):
                avg.average_models(paths)
        with pytest.raises(ValueError, match="A folder must hold checkpoints"):
            avg.average_models([tmp_path], output=tmp_path / "mean")

    @pytest.mark.parametrize(
        "kind, output, message",
        [
            ("weights", None, "`output` must be given for a .weights.h5"),
            ("checkpoint", None, "`output` must be given for a checkpoint"),
            ("keras", "mean.weights.h5", "must be the name of a .keras"),
            ("keras", "mean", "must be the name of a .keras"),
            ("checkpoint", "mean.keras", "must be the name of a checkpoint"),
            ("checkpoint", "none/mean", "in a folder that exists"),
        ],
    )
    def test_output(self, tmp_path, kind, output, message):
        path = save(slope(1.0), tmp_path, "a", kind)
        output = output and tmp_path / output
        with pytest.raises(ValueError, match=message):
            avg.average_models([path], output=output)


class TestRefreshBatchNorm:
    ROWS = np.float32([[0], [2], [4], [6], [18]])

    def data(self, batch_size=2):
        return tf.data.Dataset.from_tensor_slices((self.ROWS, self.ROWS)).batch(
            batch_size
        )

    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    @pytest.mark.parametrize("kind", ["keras", "memory"])
    def test_statistics_are_those_of_all_rows(self, tmp_path, kind, batch_size):
        # Mean 6; squares of 6, 4, 2, 0 and 12 add up to 200.
        models = [batch_norm_model(0, 1, 1), batch_norm_model(4, 3, 3)]
        models[0].layers[0].trainable = False
        if kind == "keras":
            models = [
                save(model, tmp_path, f"m{place}", kind)
                for place, model in enumerate(models)
            ]
        output = tmp_path / "mean.keras"
        avg.average_models(
            models, output=output, refresh_batch_norm=self.data(batch_size)
        )
        (layer,) = keras.models.load_model(output).layers
        values = [float(v.numpy()[0]) for v in layer.variables]
        assert sorted(values) == [0.0, 2.0, 6.0, 40.0]
        assert layer.momentum == 0.99
        assert not layer.trainable

    def test_nothing_else_changes(self):
        model = keras.Sequential(
            [
                layers.Input((1,)),
                layers.Dense(4),
                layers.Dropout(0.5, seed=3),
                keras.Sequential([layers.BatchNormalization()]),
            ]
        )
        model.compile("adam", "mse")
        model.fit(self.data(), verbose=0)
        plain = avg.average_models([model])
        refreshed = avg.average_models([model], refresh_batch_norm=self.data())
        changed = [
            variable.path.rpartition("/")[2]
            for variable, ours, theirs in zip(
                [*plain.variables, *plain.optimizer.variables],
                bits(plain),
                bits(refreshed),
            )
            if ours != theirs
        ]
        assert changed == ["moving_mean", "moving_variance"]

    def test_refusals(self, tmp_path):
        model = batch_norm_model()
        for data, message in [
            (self.data().take(0), "an empty dataset"),
            (self.data().repeat(), "an infinite dataset"),
            (tf.data.Dataset.from_tensors([[np.inf]]), "must be finite"),
        ]:
            with pytest.raises(ValueError, match=message):
                avg.average_models([model], refresh_batch_norm=data)
        path = save(model, tmp_path, "a", "weights")
        with pytest.raises(
            ValueError, match="takes a model that can be called"
        ):
            avg.average_models(
                [path], output=path, refresh_batch_norm=self.data()
            )


class TestCommand:
    def run(self, monkeypatch, capsys, *arguments):
        monkeypatch.setattr(sys, "argv", ["tf-avgstrategy", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        return exit_info.value.code, capsys.readouterr().err

    def test_options_may_follow_files(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        for name, value in (("a", 1.0), ("b", 4.0)):
            save(slope(value), tmp_path, name, "keras")
        arguments = ["a.keras", "b.keras", "--weights=2,1", "--output=c.keras"]
        code, _ = self.run(monkeypatch, capsys, "average", *arguments)
        assert not code
        assert toys.weight(keras.models.load_model("c.keras")) == 2.0

    def test_refreshes_batch_norm(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        save(batch_norm_model(), tmp_path, "a", "keras")
        (tmp_path / "rows_of_test.py").write_text(
            "import tensorflow as tf\n"
            "def rows():\n"
            "    return tf.data.Dataset.from_tensors([[1.0], [3.0]])\n"
        )
        arguments = ["a.keras", "--output=a.keras", "--refresh-batch-norm"]
        code, error = self.run(
            monkeypatch, capsys, "average", *arguments, "rows_of_test:rows"
        )
        assert not code, error
        (layer,) = keras.models.load_model("a.keras").layers
        assert layer.moving_mean.numpy() == 2.0
        assert layer.moving_variance.numpy() == 1.0

    @pytest.mark.parametrize(
        "arguments, code, message",
        [
            ([], 2, "There must be files to average, and --output."),
            (["a.keras"], 2, "and --output"),
            (["a", "--output=b", "--weights=x"], 2, "must be numbers"),
            (
                ["a", "--output=b", "--refresh_batch_norm=none:f"],
                2,
                "must name a function",
            ),
            (["a", "--output=b"], 1, "'a', which does not exist"),
        ],
    )
    def test_refusals(self, monkeypatch, capsys, arguments, code, message):
        given, error = self.run(monkeypatch, capsys, "average", *arguments)
        assert given == code
        assert message in error


class TestMemory:
    CODE = """
import json, resource, sys
import tf_avgstrategy
import tensorflow as tf
kind, output, *paths = sys.argv[1:]
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tf_avgstrategy.average_models(paths[:1], output=output)
before = peak()
tf_avgstrategy.average_models(paths, output=output)
print(json.dumps([before, peak()]))
"""

    @pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint"])
    def test_does_not_grow_with_the_files(self, tmp_path, kind):
        model = keras.Sequential([layers.Input((1024,)), layers.Dense(2048)])
        model.compile(toys.sgd(), "mse")
        path = save(model, tmp_path, "m", kind)
        paths = [path] * 20
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                self.CODE,
                kind,
                output_of(tmp_path, kind),
                *paths,
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        before, after = json.loads(done.stdout.splitlines()[-1])
        # 8 MB a file, in kB: three times as much at most.
        assert after - before < 3 * 8192
