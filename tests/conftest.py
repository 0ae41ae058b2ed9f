"""Four virtual CPU devices for every test, made before TensorFlow starts."""

import gc
import os

# A cluster of the machine that runs the tests is none of the tests' business.
os.environ.pop("TF_CONFIG", None)
os.environ.pop("HOROVOD_SIZE", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["KERAS_BACKEND"] = "tensorflow"

import hypothesis
import keras
import pytest
import tensorflow as tf

# The first call of a TensorFlow kernel takes longer than any deadline, and a
# test must not fail on one day because it tries other numbers than before.
hypothesis.settings.register_profile("ours", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ours")

gc.disable()
gc.freeze()

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)


# Files with the most to do, which begin first: what ends last ends alone.
_LONG = [
    "test_resume",
    "test_observers",
    "test_lost_worker",
    "test_independence",
    "test_workers",
    "test_fit",
    "test_start",
    "test_mnist",
    "test_contract",
    "test_callbacks",
    "test_hosts",
    "test_cases",
    "test_docs",
]


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_LONG)))


@pytest.fixture(autouse=True)
def _fresh_keras():
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session(free_memory=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Collects garbage after each test, and only of that test.

    TensorFlow keeps every strategy for ever, with its graphs: what is left is
    not looked at again. Python's own collections while functions are traced
    took a sixth of all time.
    """
    result = yield
    gc.collect()
    gc.freeze()
    return result
