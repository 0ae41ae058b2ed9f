"""Averaging finished models: one model that is the mean of several."""

import contextlib
import math
import pathlib
import tempfile

import keras

from tf_avgstrategy.files import batch_norm
from tf_avgstrategy.files import checkpoint_files
from tf_avgstrategy.files import file_errors
from tf_avgstrategy.files import file_mean
from tf_avgstrategy.files import model_files
from tf_avgstrategy.tensors import mean
from tf_avgstrategy.tensors import snapshots

__all__ = ["average_models"]

# Kind of file: its reader, and what makes a copy with other values.
_KINDS = {
    ".keras": (model_files.KerasFile, model_files.copy_of_keras),
    ".weights.h5": (model_files.HDF5File, model_files.copy_of_hdf5),
    "checkpoint": (
        checkpoint_files.CheckpointFile,
        checkpoint_files.copy_of_checkpoint,
    ),
    "SavedModel": (
        checkpoint_files.SavedModelFile,
        checkpoint_files.copy_of_saved_model,
    ),
}


def average_models(
    models,
    weights=None,
    *,
    output=None,
    refresh_batch_norm=None,
    custom_objects=None,
):
    """Averages the variables of finished models, optimizer slots included.

    The models must have the same variables, and should stem from one
    initialization or one pretrained model: the mean of networks that were
    trained from different ones is none that works.

    Floating point variables become their mean. A BatchNormalization's moving
    variance becomes the mean of the variances plus the variance of the means.
    Of a counter, such as the optimizer's `iterations`, the largest is taken, of
    a loss scale the smallest. The learning rate, other integers (seeds), bool,
    strings, and what a file holds beside variables are those of the first
    model. The mean of equal values has their bits.

    Files are read variable by variable, of `.keras` and `.weights.h5` without
    building the model, whichever backend of Keras it was trained with.

    Args:
        models: List of built `keras.Model`, which are not changed, or of
            paths, all of one kind: `.keras` files, `.weights.h5` files,
            checkpoints of `tf.train.Checkpoint` (the prefix, or the folder
            whose latest is meant), or folders of SavedModels.
        weights: List of as many finite floats >= 0, such as the rows that each
            model was trained on. `None` for equal ones. A model of weight 0
            must have the same variables and counts for nothing.
        output: String or path. Where the mean is written, as the kind of file
            that the models are; of a checkpoint the prefix. It may be one of
            the models. Until it is complete, there is the old one. Models in
            memory are written as `.keras`.
        refresh_batch_norm: Finite `tf.data.Dataset` of batches as `fit` takes
            them. One pass over it gives BatchNormalization layers the mean and
            variance of its rows. For `.keras` files and models in memory.
        custom_objects: Dict from name to class or function, for
            `keras.models.load_model`.

    Returns:
        The mean as a `keras.Model`, compiled as the first model, if the models
        are in memory or if they are `.keras` files and there is no `output`.
        Else `None`.

    Raises:
        ValueError: If there is no model, the models are of several kinds, do
            not exist, are not built, or their variables differ, if a value is
            not finite, if the weights do not fit, if a file is damaged or made
            to do harm, or if `output` is missing, of another kind, or in a
            place where it would destroy a model.
        OSError: If the output cannot be written, such as to a full disk. Then
            nothing of it is left.

    References:
        Izmailov et al., Averaging Weights Leads to Wider Optima and Better
        Generalization, UAI 2018, https://arxiv.org/abs/1803.05407. Wortsman et
        al., Model soups, ICML 2022, https://arxiv.org/abs/2203.05482.
    """
    models = _as_list(models)
    weights = _checked_weights(weights, len(models))
    options = (output, refresh_batch_norm, custom_objects)
    if all(isinstance(model, keras.Model) for model in models):
        return _average_in_memory(models, weights, *options)
    return _average_files(models, weights, *options)


def _as_list(models):
    if isinstance(models, (str, pathlib.PurePath, keras.Model)):
        models = [models]
    models = list(models)
    if not models:
        raise ValueError(
            "`models` must hold at least one model or path: a mean over "
            "nothing does not exist. Received: models=[]. Pass the models that "
            "are to be averaged."
        )
    return models


def _checked_weights(weights, count):
    if weights is None:
        return [1.0] * count
    weights = mean.check_weights(weights)
    mean.shares(weights)
    if len(weights) != count:
        raise ValueError(
            "`weights` must hold one number for each model. Received: "
            f"{len(weights)} weights for {count} models. Pass weights=None to "
            "weigh all equally."
        )
    # By a power of two, so that sums cannot overflow and stay exact.
    _, exponent = math.frexp(max(weights))
    return [math.ldexp(weight, -exponent) for weight in weights]


def _average_in_memory(models, weights, output, dataset, custom_objects):
    files = [
        model_files.ModelInMemory(model, f"model {place}")
        for place, model in enumerate(models)
    ]
    if output is not None:
        _check_output(output, ".keras")
    file_mean.check_same_variables(files)
    result = _clone(models[0], custom_objects)
    copy = model_files.ModelInMemory(result, "the mean")
    file_mean.write_mean(files, weights, copy)
    if dataset is not None:
        batch_norm.refresh(result, dataset)
    if output is not None:
        _save(result, output)
    return result


def _save(model, output):
    with (
        file_errors.writing(output),
        snapshots.whole_file(output) as unfinished,
    ):
        keras.saving.save_model(model, unfinished)


def _clone(model, custom_objects):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        # Not `model.save`, which does nothing on workers that do not write.
        with file_errors.writing(path):
            keras.saving.save_model(model, path)
        # It is the caller's own, so it is safe.
        return keras.models.load_model(path, custom_objects, safe_mode=False)


def _average_files(paths, weights, output, dataset, custom_objects):
    kind = _kind_of_all(paths)
    paths = [str(path) for path in paths]
    if output is not None:
        _check_output(output, kind)
        _check_is_apart(output, paths, kind)
    elif kind != ".keras":
        raise ValueError(
            f"`output` must be given for a {kind}: only `.keras` files hold "
            "what it takes to return a model. Received: output=None. Pass a "
            "path."
        )
    if dataset is not None and kind != ".keras":
        raise ValueError(
            "`refresh_batch_norm` takes a model that can be called, which "
            f"`.keras` files hold. Received: a {kind}. Load it into models and "
            "pass those."
        )
    if output is not None and dataset is None:
        return _write_file(kind, paths, weights, output)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "mean.keras"
        _write_file(kind, paths, weights, path)
        result = keras.models.load_model(path, custom_objects)
    if dataset is not None:
        batch_norm.refresh(result, dataset)
    if output is None:
        return result
    _save(result, output)
    return None


def _kind_of_all(paths):
    kinds = [_kind(path) for path in paths]
    for path, kind in zip(paths, kinds):
        if kind != kinds[0]:
            raise ValueError(
                "All models must be of one kind. Received: "
                f"{str(paths[0])!r}, a {kinds[0]}, and {str(path)!r}, a "
                f"{kind}. Save all in the same way."
            )
    return kinds[0]


def _kind(path):
    if isinstance(path, keras.Model):
        return "model in memory"
    path = pathlib.Path(path)
    index = path.with_name(f"{path.name}.index")
    if not path.exists() and not index.exists():
        raise ValueError(
            "Each path must be that of a file or folder, or the prefix of a "
            f"checkpoint. Received: {str(path)!r}, which does not exist. "
            "Correct it."
        )
    for suffix in (".keras", ".weights.h5"):
        if path.name.endswith(suffix) and path.is_file():
            return suffix
    if (path / "saved_model.pb").exists():
        return "SavedModel"
    if path.is_dir() or index.exists():
        return "checkpoint"
    raise ValueError(
        "A file must be a `.keras` or a `.weights.h5` file. Received: "
        f"{str(path)!r}. Save the model with `model.save('name.keras')`."
    )


def _check_output(output, kind):
    output = pathlib.Path(output)
    suffix = kind if kind.startswith(".") else ""
    others = {".keras", ".weights.h5"} - {suffix}
    if not output.name.endswith((suffix or output.name, *others)) or (
        output.name.endswith(tuple(others))
    ):
        raise ValueError(
            f"`output` must be the name of a {kind}, as the models are. "
            f"Received: output={str(output)!r}. Change its end."
        )
    if kind == "SavedModel":
        is_taken = output.exists() and not (output / "saved_model.pb").exists()
    else:
        is_taken = output.is_dir()
    if is_taken or not output.absolute().parent.is_dir():
        raise ValueError(
            f"`output` must be a free name for a {kind} in a folder that "
            f"exists. Received: output={str(output)!r}. Make its folder, or "
            "name a file in it."
        )


def _check_is_apart(output, paths, kind):
    """Refuses an output that is not one of the models, but within or around."""
    output = pathlib.Path(output)
    place = output.parent.resolve() / output.name
    removed = snapshots.path_of_unfinished(place)
    for path in paths:
        resolved = pathlib.Path(path).resolve()
        is_in_output = {place, output.resolve(), removed} & {*resolved.parents}
        is_around = kind == "SavedModel" and resolved in place.parents
        if is_in_output or is_around:
            raise ValueError(
                "`output` must be one of the models or apart from them: what "
                f"is there, and in {removed.name!r} beside it, is removed. "
                f"Received: output={str(output)!r} and the model {path!r}. "
                "Choose another name, or move the model."
            )


def _write_file(kind, paths, weights, output):
    reader, copy_of = _KINDS[kind]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(reader(path)) for path in paths]
        for file in files[1:]:
            if hasattr(file, "match"):
                file.match(files[0])
        file_mean.check_same_variables(files)
        with file_errors.writing(output), copy_of(files[0], output) as copy:
            file_mean.write_mean(files, weights, copy)
