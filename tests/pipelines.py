"""Pipelines of several workers in one process, and what is in them."""

import threading

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_data_adapter

from tf_avgstrategy.input import sharding


def in_workers(num_workers, run):
    """Runs `run(rank, agree)` on a thread for each worker.

    Returns the results by rank, or raises what rank 0 raised.
    """
    barrier = threading.Barrier(num_workers)
    slots = [None] * num_workers
    results = [None] * num_workers

    def work(rank):
        def agree(values):
            slots[rank] = [int(v) for v in values]
            barrier.wait(30)
            answer = list(slots)
            barrier.wait(30)
            assert len({len(a) for a in answer}) == 1
            return answer

        try:
            results[rank] = run(rank, agree)
        except Exception as e:  # noqa: BLE001 - raised again below.
            results[rank] = e

    threads = [
        threading.Thread(target=work, args=(rank,))
        for rank in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results if isinstance(r, Exception)]
    if errors:
        # All or none: a worker alone with an error leaves the others waiting.
        assert len({str(e) for e in results}) == 1, results
        raise errors[0]
    return results


def shard(datasets, replicas=None):
    """The shards by rank of a list of datasets, one for each worker."""
    replicas = replicas or [1] * len(datasets)
    return in_workers(
        len(datasets),
        lambda rank, agree: sharding.shard(
            datasets[rank], replicas=replicas, rank=rank, agree=agree
        ),
    )


def elements(dataset):
    return [e.tolist() for e in dataset.as_numpy_iterator()]


def rows(dataset):
    return [row for element in elements(dataset) for row in element]


def of_arrays(shuffle, num_rows=50):
    x = np.arange(num_rows)
    adapter = array_data_adapter.ArrayDataAdapter(
        {"x": x, "z": tf.sparse.from_dense(x[:, None])},
        x,
        batch_size=8,
        shuffle=shuffle,
    )
    return adapter.get_tf_dataset()
