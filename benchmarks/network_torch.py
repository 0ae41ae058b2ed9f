"""A worker of `network.py` that trains with PyTorch, on the same model.

Started by it, in an environment with PyTorch.
"""

import json
import os
import pathlib
import sys

import network_meeting
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    post_localSGD_hook as hooks,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


class _Way:
    """One way to train.

    Args:
        name: String. "alone" exchanges nothing.
        megabytes: Float, the size of the model.
        period: Int, or None: gradients are exchanged at every step.
        rows: Int, rows of a worker's batch.
    """

    def __init__(self, name, megabytes, period, rows):
        width, layers = network_meeting.shapes(megabytes)
        torch.manual_seed(0)
        modules = []
        for _ in layers:
            modules += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self._model = torch.nn.Sequential(*modules)
        if name != "alone":
            self._model = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        if period is not None:
            # No gradient travels, also not within a host.
            state = hooks.PostLocalSGDState(
                None, None, 0, post_local_gradient_allreduce=False
            )
            self._model.register_comm_hook(state, hooks.post_localSGD_hook)
            self._optimizer = PostLocalSGDOptimizer(
                self._optimizer, averagers.PeriodicModelAverager(period, 0)
            )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._x = torch.randn(rows, width, generator=generator)

    def train(self, marks):
        for count in range(1, marks.num_steps + 1):
            self._optimizer.zero_grad()
            loss = (self._model(self._x) - self._x).square().mean()
            loss.backward()
            self._optimizer.step()
            marks.step(count)


def main():
    folder, task = sys.argv[1], json.loads(sys.argv[2])
    rank, addresses = network_meeting.cluster()
    host, _, port = addresses[0].partition(":")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["AVG_HOSTS_INTERFACE"]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=len(addresses),
    )
    meeting = network_meeting.Meeting(
        pathlib.Path(folder), rank, len(addresses)
    )
    for megabytes, name in task["wanted"]:
        period = task["periods"].get(name)
        way = _Way(name, megabytes, period, task["rows"])
        result = network_meeting.measure(
            meeting, way.train, unit=period or 1, seconds=task["seconds"]
        )
        if rank == 0:
            result |= {"megabytes": megabytes, "way": name}
            print(f"RESULT {json.dumps(result)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
