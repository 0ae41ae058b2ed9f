"""Imports point downwards, and private names stay where they belong."""

import ast
import importlib
import pathlib

import pytest

import tf_avgstrategy

PACKAGE = pathlib.Path(tf_avgstrategy.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# Each module and the modules of this package that it may import.
MAY_IMPORT = {
    "__init__": {
        "_version",
        "adaptive_schedules",
        "averaged_model_checkpoint",
        "averager",
        "callbacks",
        "checkpoint_averaging",
        "communicators",
        "fit_callbacks",
        "outer_optimizers",
        "schedules",
        "strategy",
    },
    "_version": set(),
    "adaptive_schedules": {"schedules"},
    "agreement": set(),
    "archives": {"file_errors"},
    "averaged_model_checkpoint": {"running_means"},
    "averager": {
        "agreement",
        "averaging_settings",
        "buckets",
        "losses",
        "optimizer_parts",
        "participants",
        "rounds",
        "running_means",
        "schedules",
        "state",
        "strategy",
    },
    "averaging_settings": {
        "fragments",
        "optimizer_parts",
        "outer_optimizers",
        "schedules",
        "state",
    },
    "backups": {"agreement", "fit_callbacks", "replica_state", "snapshots"},
    "batch_norm": set(),
    "buckets": set(),
    "callbacks": {
        "agreement",
        "averager",
        "averaging_settings",
        "backups",
        "fit_callbacks",
        "optimizer_parts",
        "schedules",
        "telemetry",
        "worker_metrics",
    },
    "checkpoint_averaging": {
        "batch_norm",
        "checkpoint_files",
        "file_errors",
        "file_mean",
        "mean",
        "model_files",
        "snapshots",
    },
    "checkpoint_files": {"file_errors", "snapshots", "variable_rules"},
    "cli": {
        "checkpoint_averaging",
        "doctor",
        "horovod_build",
        "launcher",
        "plots",
    },
    "cluster": set(),
    "collective_communicator": {"communicators", "liveness"},
    "communicators": set(),
    "doctor": {
        "_version",
        "cluster",
        "horovod_communicator",
        "horovod_rendezvous",
        "launcher",
        "network_probe",
        "startup",
    },
    "file_errors": set(),
    "file_mean": set(),
    "fit_callbacks": set(),
    "fragmented_rounds": {
        "outer_optimizers",
        "rounds",
        "state",
    },
    "fingerprints": {"row_order"},
    "fragments": {"buckets", "rounds", "schedules"},
    "hdf5_checks": set(),
    "horovod_build": set(),
    "horovod_communicator": {
        "communicators",
        "horovod_rendezvous",
        "liveness",
    },
    "horovod_rendezvous": set(),
    "gradient_exchange": {"buckets", "mean", "optimizer_parts"},
    "independent_replicas": {
        "fingerprints",
        "gradient_exchange",
        "mean_reads",
        "replica_step",
        "sharding",
        "steps_without_rows",
        "variables",
    },
    "keras_hooks": {"independent_replicas", "snapshots", "worker_metrics"},
    "launcher": {"horovod_rendezvous", "worker_processes"},
    "liveness": set(),
    "losses": set(),
    "lost_exit": {"communicators"},
    "mean": set(),
    "mean_reads": {"variables"},
    "model_files": {
        "archives",
        "file_errors",
        "hdf5_checks",
        "snapshots",
        "variable_rules",
    },
    "network_probe": {"buckets"},
    "optimizer_parts": {"variables"},
    "outer_optimizers": {"mean", "optimizer_parts", "variables"},
    "participants": {
        "agreement",
        "buckets",
        "communicators",
        "fingerprints",
        "fragmented_rounds",
        "fragments",
        "mean",
        "optimizer_parts",
        "replica_state",
        "rounds",
        "schedules",
        "snapshots",
        "state",
        "telemetry",
        "timetables",
        "training_counts",
        "variables",
    },
    "plots": set(),
    "replica_state": {"mean", "variables"},
    "replica_step": set(),
    "rounds": {"buckets", "mean", "state", "variables"},
    "row_order": set(),
    "running_means": {"mean", "variables"},
    "schedules": set(),
    "seeds": set(),
    "sharding": {"fingerprints", "row_order"},
    "snapshots": set(),
    "startup": {
        "cluster",
        "collective_communicator",
        "communicators",
        "horovod_communicator",
        "lost_exit",
    },
    "state": {"optimizer_parts", "variables"},
    "steps_without_rows": {"replica_step"},
    "strategy": {
        "gradient_exchange",
        "independent_replicas",
        "keras_hooks",
        "seeds",
        "startup",
    },
    "telemetry": set(),
    "timetables": {"schedules"},
    "training_counts": set(),
    "variable_rules": set(),
    "variables": set(),
    "worker_metrics": {"variables"},
    "worker_processes": set(),
}
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
        alias.name: node.module.rpartition(".")[2]
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
    assert sorted(MAY_IMPORT) == MODULES


def test_the_map_has_no_cycle():
    done = set()
    while len(done) < len(MAY_IMPORT):
        ready = {m for m, needs in MAY_IMPORT.items() if needs <= done} - done
        assert ready, f"a cycle among {sorted(set(MAY_IMPORT) - done)}"
        done |= ready


@pytest.mark.parametrize("module", MODULES)
def test_imports_stay_within_the_map(module):
    own = {
        name.split(".")[1]
        for name in _imports(module)
        if name.startswith("tf_avgstrategy.")
    }
    assert own <= MAY_IMPORT[module]


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
    if module in PRIVATE_TENSORFLOW | PRIVATE_KERAS:
        assert foreign <= listed
    else:
        assert foreign == PRIVATE_STANDARD.get(module, set())


def test_private_imports_are_in_the_list():
    listed = " ".join(PRIVATE_TENSORFLOW_NAMES)
    for module in PRIVATE_TENSORFLOW:
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
