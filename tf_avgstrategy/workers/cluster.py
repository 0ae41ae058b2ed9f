"""The cluster: which workers train together, read from TF_CONFIG."""

import json
import os
from typing import NamedTuple

__all__ = [
    "Cluster",
    "from_environment",
    "parse_tf_config",
]

# Task types that train, in the order of their ranks.
_TRAINING_TYPES = ("chief", "worker")
_REFUSED_TYPES = {
    "evaluator": (
        "an evaluator does not train, and here every worker evaluates its "
        "share of the validation data"
    ),
    "ps": "parameters are averaged among workers, there is no server for them",
}


class Cluster(NamedTuple):
    """The workers that train together.

    Attributes:
        addresses: Tuple of strings "host:port", one per training worker, the
            chief first.
        rank: Int, this process' place among them.
    """

    addresses: tuple
    rank: int

    @property
    def size(self):
        """Int, the number of training workers."""
        return len(self.addresses)


def from_environment():
    """Returns the `Cluster` that TF_CONFIG describes, None if there is none.

    Raises:
        ValueError: See `parse_tf_config`.
    """
    text = os.environ.get("TF_CONFIG", "")
    return parse_tf_config(text) if text.strip() else None


def parse_tf_config(text):
    """Reads the value of TF_CONFIG.

    Args:
        text: String, JSON with the keys "cluster" (task type to list of
            addresses) and "task" ("type" and "index" of this process).

    Returns:
        `Cluster`, or None if the JSON is empty or its cluster is.

    Raises:
        ValueError: If anything in it cannot be. The message names the field.

    References:
        https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _error("must be JSON", text, str(error)) from error
    if not isinstance(config, dict):
        raise _error("must be a JSON object", config)
    if not config.get("cluster"):
        if "cluster" not in config and "task" in config:
            raise _error('must have a "cluster" beside the "task"', config)
        return None
    jobs = _check_jobs(config["cluster"])
    if "task" not in config:
        raise _error('must have a "task": which of the workers this is', config)
    kind, index = _check_task(config["task"], jobs)
    addresses = [a for job in _TRAINING_TYPES for a in jobs.get(job, [])]
    before = len(jobs.get("chief", [])) if kind == "worker" else 0
    return Cluster(tuple(addresses), before + index)


def _check_jobs(jobs):
    if not isinstance(jobs, dict):
        raise _error('"cluster" must be an object of task types', jobs)
    for kind, addresses in jobs.items():
        _check_type(f'"cluster" has the task type {kind!r}, which', kind)
        if not isinstance(addresses, list) or not addresses:
            raise _error(
                f'"cluster": {kind!r} must be a list of addresses', addresses
            )
        for address in addresses:
            _check_address(address)
    if len(jobs.get("chief", [])) > 1:
        raise _error('"cluster": there must be one "chief"', jobs["chief"])
    every = [address for job in jobs.values() for address in job]
    twice = sorted({a for a in every if every.count(a) > 1})
    if twice:
        raise _error(
            '"cluster" must not have an address twice',
            twice[0],
            "Give every worker a port of its own.",
        )
    return jobs


def _check_address(address):
    host, _, port = (
        address.rpartition(":") if isinstance(address, str) else ("", "", "")
    )
    if (
        not host
        or not port.isascii()
        or not port.isdigit()
        or (not 0 < int(port) < 2**16)
    ):
        raise _error(
            '"cluster": an address must be "host:port"',
            address,
            'Write it like "10.0.0.1:12345".',
        )


def _check_task(task, jobs):
    if not isinstance(task, dict):
        raise _error('"task" must be an object with "type" and "index"', task)
    kind, index = task.get("type"), task.get("index")
    _check_type(f'"task": the "type" {kind!r}', kind)
    if kind not in jobs:
        raise _error(
            f'"task": the "type" must be one of the cluster, {sorted(jobs)}',
            kind,
        )
    # Kubernetes operators and shells write the index as a string.
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    is_integer = isinstance(index, int) and not isinstance(index, bool)
    if not is_integer or not 0 <= index < len(jobs[kind]):
        raise _error(
            f'"task": the "index" must be an integer from 0 to '
            f"{len(jobs[kind]) - 1}, the last {kind!r}",
            index,
        )
    return kind, index


def _check_type(subject, kind):
    if isinstance(kind, str) and kind in _REFUSED_TYPES:
        raise _error(
            f"{subject} takes no part: {_REFUSED_TYPES[kind]}",
            kind,
            "Remove it from the cluster and do not start it.",
        )
    if kind not in _TRAINING_TYPES:
        raise _error(f'{subject} must be "chief" or "worker"', kind)


def _error(rule, received, fix="Correct the variable where it is set."):
    return ValueError(f"TF_CONFIG: {rule}. Received: {received!r}. {fix}")
