"""The processes of a job: how they start, where each stands in the mesh, and how they talk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.parallel.mesh import build_mesh, data_parallel_group
from lightning_3d.strategies.processes.script_launcher import ScriptLauncher
from lightning_3d.strategies.processes.watched_run import WatchedRun
from lightning_3d.whereabouts import HERE


class MeshStrategy(ParallelStrategy):
    """A Lightning strategy whose processes form a mesh of axes.

    Args:
        layout: sizes of the axes, not yet resolved.
        process_group_backend: None takes nccl for CUDA and gloo for the CPU.
        timeout_seconds: after which the job ends where a rank waits for another, or a step gets no further; the
            report of it names the rank that holds up the others.

    Raises:
        LayoutError: when the Trainer is built, before any process starts.
    """

    # Lightning turns off `sync_dist` for strategies that do not say so.
    is_distributed = True

    def __init__(self, layout: Layout, *, process_group_backend: str | None, timeout_seconds: float) -> None:
        super().__init__()
        _check_settings(process_group_backend, timeout_seconds)
        self._layout = layout
        self._process_group_backend = process_group_backend
        self._timeout = timedelta(seconds=timeout_seconds)
        self._run: WatchedRun | None = None
        self._mesh: DeviceMesh | None = None
        self.num_nodes = 1

    # ------------------------------------------------------------------ who and where

    @property
    def layout(self) -> Layout:
        """The sizes of all axes; resolved once the Trainer knows how many processes there are."""
        return self._layout

    @property
    def mesh(self) -> DeviceMesh:
        """Axes `pp`, `dp_replicate`, `dp_shard`, `tp`; there once the processes have met."""
        if self._mesh is None:
            raise RuntimeError("the device mesh exists only inside trainer.fit, validate, test or predict.")
        return self._mesh

    @property
    def data_parallel_size(self) -> int:
        return self.layout.data

    @property
    def data_parallel_rank(self) -> int:
        return dist.get_group_rank(data_parallel_group(self.mesh), dist.get_rank())

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.mesh.get_local_rank("pp")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, utilities_rank_zero_only):
            setattr(decorator, "rank", self.global_rank)  # noqa: B010

    # ------------------------------------------------------------------ starting

    def _configure_launcher(self) -> None:
        # Called while the Trainer is built: the first moment at which the number of processes is known.
        self._layout = self._layout.resolve(self.num_processes * self.num_nodes)
        environment, devices = self.cluster_environment, self.parallel_devices
        assert environment is not None and devices is not None
        if self._process_group_backend == "nccl" and devices[0].type != "cuda":
            raise ConfigError(
                f"process_group_backend='nccl' joins GPUs, but the accelerator is {devices[0].type}. Set "
                "process_group_backend=None, which takes what fits."
            )
        self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        HERE.enter("setup")
        super().setup_environment()
        assert self.cluster_environment is not None and self.lightning_module is not None
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(device)
        device_id = None if device.type == "cpu" else device
        self._run = self._watched_run()
        # The watchdog comes first, and says more than a collective that gives up.
        timeout = self._timeout + timedelta(seconds=30)
        _init_dist_connection(self.cluster_environment, backend, timeout=timeout, device_id=device_id)
        if self._mesh is None:
            self._mesh = build_mesh(self.layout, device=device)
        self._run.met(self.mesh, self.layout)

    def _watched_run(self) -> WatchedRun:
        assert isinstance(self._launcher, ScriptLauncher) and self.lightning_module is not None
        return WatchedRun(
            self.lightning_module.trainer,
            self._launcher,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout_seconds=self._timeout.total_seconds(),
        )

    def _begin_step(self, step: str, args: Sequence[Any]) -> None:
        """A `training_step` or its like begins; where all ranks are to stop, this raises."""
        batch = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        HERE.enter(step.removesuffix("_step"), batch=batch)
        if self._run is not None:
            self._run.begin_step(step)

    def _end_step(self) -> None:
        """What comes now may take its time: callbacks, loggers."""
        HERE.enter("callbacks after a step")

    @contextmanager
    def _evaluation_step(self, step: str, args: Sequence[Any]) -> Iterator[None]:
        self._begin_step(step, args)
        yield
        self._end_step()

    # ------------------------------------------------------------------ talking

    @property
    def unwinding(self) -> bool:
        """Whether this rank leaves after an error that it alone may have: no other would meet it in a collective."""
        return self._run is not None and self._run.failed

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and not self.unwinding:
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the data-parallel ranks unless a group is given; other ranks hold copies."""
        if not isinstance(tensor, Tensor):
            return tensor
        if not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            # Lightning cuts the mean of whole numbers to a whole number: 11 and 10 samples would count as 10.
            tensor = tensor.double()
        return _sync_ddp_if_available(tensor, group or data_parallel_group(self.mesh), reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group or data_parallel_group(self.mesh), sync_grads)

    # ------------------------------------------------------------------ ending

    def teardown(self) -> None:
        # The base class would move the model to the CPU, away from what shards it.
        assert self.cluster_environment is not None and self.accelerator is not None
        HERE.enter("teardown", bounded=True)
        HERE.loading_since = None
        if self._run is not None:
            self._run.unwound()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _check_settings(process_group_backend: str | None, timeout_seconds: float) -> None:
    if process_group_backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"process_group_backend={process_group_backend!r} is unknown. Set None, 'gloo' or 'nccl'.")
    is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    # A bound, for NaN, infinity and what a timedelta cannot hold.
    if not is_number or not 0 < timeout_seconds <= 1e9:
        raise ConfigError(f"timeout_seconds={timeout_seconds!r} is no positive number of seconds. Set 1800, say.")
