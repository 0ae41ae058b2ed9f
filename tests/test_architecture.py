"""Imports point downwards, and private names stay where they belong."""

import ast
import importlib
import pathlib

import pytest

import tf_avgstrategy

PACKAGE = pathlib.Path(tf_avgstrategy.__file__).parent

# The folders from the bottom up, each with what it imports of those above its
# line, and its files, each of which may import those before it. The package
# itself has the public names, which lead to their homes.
TABLE = """
folder     | imports                    | files
tensors    | -                          | mean buckets snapshots
telemetry  | -                          | telemetry plots
state      | tensors                    | variables optimizer_parts state
           |                            | replica_state running_means
input      | -                          | row_order fingerprints sharding seeds
workers    | -                          | cluster communicators liveness
           |                            | lost_exit horovod_rendezvous
           |                            | collective_communicator
           |                            | horovod_communicator startup
schedules  | -                          | schedules adaptive_schedules
           |                            | timetables losses
strategy   | tensors state input        | replica_step steps_without_rows
           | workers                    | gradient_exchange mean_reads
           |                            | worker_metrics independent_replicas
           |                            | keras_hooks strategy
averaging  | tensors telemetry state    | agreement training_counts outer_step
           | input schedules strategy   | exchanges rounds fragments
           |                            | fragmented_rounds averaging_settings
           |                            | decisions participants observations
           |                            | kept_mean averager
fit        | tensors telemetry state    | fit_callbacks compilation
           | schedules strategy         | averaged_model_checkpoint backups
           | averaging                  | callbacks
files      | tensors                    | file_errors variable_rules batch_norm
           |                            | archives hdf5_checks model_files
           |                            | checkpoint_files file_mean
           |                            | checkpoint_averaging
tools      | tensors telemetry workers  | worker_processes launcher
           | files _version             | horovod_build network_probe doctor cli
"""


def _folders():
    """Maps each folder to the lists of what it imports and of its files."""
    found = {}
    for line in TABLE.strip().split("\n")[1:]:
        folder, uses, names = (cell.split() for cell in line.split("|"))
        if folder:
            last = found[folder[0]] = ([], [])
        last[0].extend(name for name in uses if name != "-")
        last[1].extend(names)
    return found


FOLDERS = _folders()
# Public modules, which import nothing of this library.
TOP = {"__init__", "_version", "outer_optimizers"}
MODULES = sorted(
    str(path.relative_to(PACKAGE).with_suffix(""))
    for path in PACKAGE.rglob("*.py")
)

# Who may import `tensorflow.python`, read an optimizer's private state, and
# import Horovod.
PRIVATE_TENSORFLOW = {
    "collective_communicator",
    "fingerprints",
    "gradient_exchange",
    "independent_replicas",
    "mean_reads",
    "row_order",
    "sharding",
    "steps_without_rows",
    "strategy",
    "variables",
}
PRIVATE_KERAS = {"backups", "batch_norm", "optimizer_parts", "state"}
# Who may read TensorFlow's protocol buffers, whose format is kept.
PROTOCOL_BUFFERS = {"checkpoint_files"}
# Private names of the standard library, by module.
PRIVATE_STANDARD = {"lost_exit": {"_exit", "_run_exitfuncs"}}
HOROVOD = {"horovod_communicator", "horovod_rendezvous"}

# Every private name of TensorFlow that the package uses. A release that drops
# one fails here, by its name, before anything else does.
PRIVATE_TENSORFLOW_NAMES = [
    "tensorflow.python.autograph.core.ag_ctx.ControlStatusCtx",
    "tensorflow.python.autograph.core.ag_ctx.Status",
    "tensorflow.python.autograph.impl.api.tf_convert",
    "tensorflow.python.data.experimental.ops.distribute._AutoShardDataset",
    "tensorflow.python.data.experimental.ops.distribute.compute_batch_size",
    "tensorflow.python.data.ops.dataset_ops.UnaryUnchangedStructureDataset",
    "tensorflow.python.data.ops.dataset_ops._VariantDataset",
    "tensorflow.python.distribute.distribute_lib.enter_or_assert_strategy",
    "tensorflow.python.distribute.distribute_utils.regroup",
    "tensorflow.python.distribute.input_util"
    ".get_distributed_datasets_from_function",
    "tensorflow.python.distribute.mirrored_run.call_for_each_replica",
    "tensorflow.python.distribute.values.PerReplicaSpec",
    "tensorflow.python.framework.func_graph.FuncGraph",
    "tensorflow.python.framework.none_tensor.NoneTensorSpec",
    "tensorflow.python.framework.ops.Graph._attr_scope",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._call_for_each_replica",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._create_variable",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._get_cross_device_ops",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._distribute_datasets_from_function",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._experimental_distribute_dataset",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._experimental_distribute_values_from_function",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._get_local_replica_id",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._get_replica_id_in_sync_group",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._get_variable_creator_initial_value",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._input_workers_with_options",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._num_replicas_in_sync",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._replica_ctx_all_reduce",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._replica_ctx_update",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended._update",
    "tensorflow.python.distribute.mirrored_strategy.MirroredExtended"
    "._use_merge_call",
    "tensorflow.python.distribute.values.DistributedVariable.values",
    "tensorflow.python.distribute.values.MirroredVariable"
    "._serialize_to_tensors",
    "tensorflow.python.distribute.values.MirroredVariable"
    "._restore_from_tensors",
    "tensorflow.python.distribute.values.MirroredVariable._as_graph_element",
    "tensorflow.python.distribute.values.MirroredVariable._get",
    "tensorflow.python.distribute.values.MirroredVariable._get_cross_replica",
    "tensorflow.python.distribute.values.MirroredVariable"
    "._get_on_device_or_primary",
    "tensorflow.python.distribute.values.MirroredVariable._update_replica",
    "tensorflow.python.distribute.values.MirroredVariable.values",
    "tensorflow.python.distribute.values_util.get_current_replica_id_as_int",
    "tensorflow.python.distribute.values_util.is_saving_non_distributed",
    "tensorflow.python.eager.context.context",
    "tensorflow.python.eager.context.Context.configure_collective_ops",
    "tensorflow.python.eager.context.Context.enable_collective_ops",
    "tensorflow.python.eager.context.Context.ensure_initialized",
    "tensorflow.python.eager.def_function.Function._clone",
    "tensorflow.python.eager.record.could_possibly_record",
    "tensorflow.python.framework.auto_control_deps_utils"
    ".get_read_write_resource_inputs",
    "tensorflow.python.framework.ops.Operation._update_input",
    "tensorflow.python.ops.resource_variable_ops.UninitializedVariable",
    "tensorflow.python.ops.collective_ops.all_gather_v2",
    "tensorflow.python.ops.collective_ops.all_reduce_v2",
    "tensorflow.python.ops.collective_ops.broadcast_recv_v2",
    "tensorflow.python.ops.collective_ops.broadcast_send_v2",
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext",
    "tensorflow.python.trackable.base.VARIABLE_VALUE_KEY",
]
# Attributes that only instances have: an expression for the instance, names.
PRIVATE_ATTRIBUTES = {
    "strategy.extended": ["_devices", "_input_workers_devices"],
    "context": ["_initialized"],
    "dataset": ["_functions", "_inputs", "_variant_tensor"],
    "range": ["_start", "_stop", "_step"],
    "slices": ["_tensors"],
    "shard": ["_index", "_num_shards"],
    "take": ["_count"],
    "shuffle": ["_seed", "_seed2"],
    "interleave": ["_cycle_length"],
    "parallel": ["_deterministic"],
    "reader": ["_filenames", "_impl"],
    "structured_function": ["_func"],
    "variable": ["_distribute_strategy", "_unique_id", "_values"],
    "handle": ["_distributed_container"],
    "function": ["_autograph", "_jit_compile"],
    "per_replica_spec": ["_value_specs"],
    "keras_variable": ["_value"],
    "optimizer": [
        "_iterations",
        "_learning_rate",
        "_trainable_variables",
        "_variables",
        "_accumulated_gradients",
        "_model_variables_moving_average",
    ],
    "adagrad": ["_accumulators"],
    "loss_scale": ["dynamic_scale", "step_counter", "inner_optimizer"],
    "schedule_free": ["_momentums"],
    "multi": ["_inner_optimizers"],
    "model": [
        "_compile_config",
        "_flatten_layers",
        "_get_metrics_result_or_logs",
        "_initial_epoch",
    ],
    "model_checkpoint": ["_batches_seen_since_last_saving", "_last_batch_seen"],
    "replica": ["_replica_id"],
}


def _tree(module):
    return ast.parse((PACKAGE / f"{module}.py").read_text())


def _imports(module):
    """Full names of all imports of a module, at any depth of its code."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only"
            yield from (f"{node.module}.{a.name}" for a in node.names)


def test_names_are_found_where_they_are():
    """When they are used, and by what reads programs without running them."""
    static = {
        alias.name: node.module.removeprefix("tf_avgstrategy.")
        for node in ast.walk(_tree("__init__"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module.startswith("tf_avgstrategy")
    }
    homes = {
        name: home or "tf_avgstrategy"
        for name, home in tf_avgstrategy._HOMES.items()
    }
    assert static == {**homes, "__version__": "_version"}
    assert sorted(static) == sorted(tf_avgstrategy.__all__)
    assert set(static) <= set(dir(tf_avgstrategy))
    for name in static:
        assert hasattr(tf_avgstrategy, name)
    with pytest.raises(AttributeError, match="no attribute 'averge_models'"):
        tf_avgstrategy.averge_models  # noqa: B018 - it is what raises.


def test_every_module_has_its_place():
    listed = [
        f"{folder}/{name}"
        for folder, (_, names) in FOLDERS.items()
        for name in ["__init__", *names]
    ]
    assert sorted([*listed, *TOP]) == MODULES


def test_folders_come_before_those_that_use_them():
    before = ["_version"]
    for folder, (uses, _) in FOLDERS.items():
        assert set(uses) <= set(before), folder
        before.append(folder)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downwards(module):
    own = {
        tuple(name.split(".")[1:3])
        for name in _imports(module)
        if name.startswith("tf_avgstrategy.")
    }
    if module == "__init__":
        return  # It leads to all.
    folder, _, name = module.rpartition("/")
    if not folder or name == "__init__":
        assert own == set()
        return
    uses, names = FOLDERS[folder]
    before = names[: names.index(name)]
    for first, *rest in own:
        if first == folder:
            assert rest[0] in before
        else:
            assert first in uses
            assert first in TOP or rest[0] in FOLDERS[first][1]


def test_folders_use_what_they_say():
    for folder, (uses, names) in FOLDERS.items():
        used = {
            name.split(".")[1]
            for module in names
            for name in _imports(f"{folder}/{module}")
            if name.startswith("tf_avgstrategy.")
        }
        assert used - {folder} == set(uses), folder


@pytest.mark.parametrize("module", MODULES)
def test_private_modules_are_imported_where_they_may_be(module):
    private = [
        name
        for name in _imports(module)
        if name.startswith(
            ("tensorflow.python", "tensorflow.core", "keras.src", "horovod")
        )
    ]
    allowed = []
    module = module.rpartition("/")[2]
    if module in PRIVATE_TENSORFLOW:
        allowed.append("tensorflow.python")
    if module in PROTOCOL_BUFFERS:
        allowed.append("tensorflow.core.protobuf")
    if module in HOROVOD:
        allowed.append("horovod")
    assert [n for n in private if not n.startswith(tuple(allowed))] == []


@pytest.mark.parametrize("module", MODULES)
def test_private_attributes_are_read_where_they_may_be(module):
    own = {
        node.attr
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "owner")
    }
    foreign = {
        node.attr
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    } - own
    listed = {name for names in PRIVATE_ATTRIBUTES.values() for name in names}
    listed |= {name.rpartition(".")[2] for name in PRIVATE_TENSORFLOW_NAMES}
    module = module.rpartition("/")[2]
    if module in PRIVATE_TENSORFLOW | PRIVATE_KERAS:
        assert foreign <= listed
    else:
        assert foreign == PRIVATE_STANDARD.get(module, set())


def test_private_imports_are_in_the_list():
    listed = " ".join(PRIVATE_TENSORFLOW_NAMES)
    for module in MODULES:
        for name in _imports(module):
            if name.startswith("tensorflow.python"):
                assert f"{name}." in listed


@pytest.mark.core
@pytest.mark.parametrize("name", PRIVATE_TENSORFLOW_NAMES)
def test_tensorflow_still_has(name):
    parts = name.split(".")
    depth = next(
        depth
        for depth in range(len(parts), 0, -1)
        if _is_module(".".join(parts[:depth]))
    )
    value = importlib.import_module(".".join(parts[:depth]))
    for part in parts[depth:]:
        assert hasattr(value, part), f"{name} is gone"
        value = getattr(value, part)


def _is_module(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.core
@pytest.mark.parametrize("kind", PRIVATE_ATTRIBUTES)
def test_tensorflow_and_keras_still_have_attributes_of(kind):
    import keras
    import tensorflow as tf
    import toys
    from tensorflow.python.distribute import values
    from tensorflow.python.eager import context

    numbers = tf.data.Dataset.range(2)
    optimizers = keras.optimizers
    strategy = toys.make_strategy()

    def built(make):
        with strategy.scope():
            optimizer = make()
            optimizer.build([keras.Variable([1.0])])
        return optimizer

    def replica():
        found = []
        strategy.run(lambda: found.append(tf.distribute.get_replica_context()))
        return found[0]

    newer = {
        "schedule_free": "ScheduleFreeAdamW",
        "multi": "MultiOptimizer",
    }
    if kind in newer and not hasattr(optimizers, newer[kind]):
        pytest.skip(f"This Keras has no {newer[kind]}.")
    with strategy.scope():
        instance = {
            "strategy.extended": lambda: strategy.extended,
            "context": context.context,
            "dataset": lambda: numbers,
            "range": lambda: numbers,
            "slices": lambda: tf.data.Dataset.from_tensor_slices([1]),
            "shard": lambda: numbers.shard(2, 0),
            "take": lambda: numbers.take(1),
            "shuffle": lambda: numbers.shuffle(2),
            "interleave": lambda: numbers.interleave(lambda _: numbers),
            "parallel": lambda: numbers.map(abs, num_parallel_calls=2),
            "reader": lambda: tf.data.TFRecordDataset(["a"]),
            "structured_function": lambda: numbers.map(abs)._functions()[0],
            "variable": lambda: tf.Variable(1.0),
            "handle": lambda: tf.Variable(1.0).values[0].handle,
            "function": lambda: tf.function(lambda: 1),
            "per_replica_spec": lambda: values.PerReplicaSpec(
                tf.TensorSpec([]), tf.TensorSpec([])
            ),
            "keras_variable": lambda: keras.Variable(1.0),
            "optimizer": lambda: built(
                lambda: optimizers.SGD(
                    use_ema=True, gradient_accumulation_steps=2
                )
            ),
            "adagrad": lambda: built(optimizers.Adagrad),
            "loss_scale": lambda: built(
                lambda: optimizers.LossScaleOptimizer(optimizers.SGD())
            ),
            "schedule_free": lambda: built(optimizers.ScheduleFreeAdamW),
            "multi": lambda: built(
                lambda: optimizers.MultiOptimizer(
                    optimizers.OptimizerMap(optimizers.SGD())
                )
            ),
            "replica": replica,
            "model": toys.slope_model,
            "model_checkpoint": lambda: keras.callbacks.ModelCheckpoint(
                "a.keras"
            ),
        }[kind]()
    for name in PRIVATE_ATTRIBUTES[kind]:
        assert hasattr(instance, name), f"{kind} has no {name} any more"
