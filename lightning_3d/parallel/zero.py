"""ZeRO stages 1 to 3 on FSDP2: one path, three settings (what each holds is measured in `held.py`).

| stage | after the forward | gradients of a micro-batch that does not end a window |
|---|---|---|
| 1 | parameters stay whole | accumulate whole, on each rank |
| 2 | parameters stay whole | reduced and sharded at once |
| 3 | parameters are sharded again | reduced and sharded at once |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_3d.errors import ModelError
from lightning_3d.parallel.replicate import GradientAverager
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.unit_order import UnitOrder, param_groups

# What DTensor says when an ordinary tensor meets a part.
_MIXED = "mixed torch.Tensor and DTensor"


class ShardedModule(Share):
    """A module whose states are sharded over the data-parallel ranks.

    Parameters outside the repeated blocks are gathered for the whole of a run, so that a step may use them in any way;
    those of a block while the block computes.

    Args:
        module: with equal weights on all ranks, or on the meta device.
        blocks: its repeated blocks.
        stage: 1, 2 or 3.
        mesh: the axis `dp_shard`, or `dp_replicate` and `dp_shard` (HSDP).
        group: all data-parallel ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        blocks: list[nn.Module],
        stage: int,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(module)
        self.stage = stage
        self._hooked: set[int] = set()
        self._running = False
        # Backwards are called inside of runs.
        self._manual = False
        # Whether a gradient was wanted at the last run, by the id of FSDP2's record of the parameter.
        self._trained: dict[int, bool] = {}
        # One number cannot be sharded: scalars (a learned temperature, say) stay whole and are averaged.
        scalars = {p for p in module.parameters() if p.dim() == 0}
        # Not while the backward runs: all ranks must send in one order, FSDP2's gradients included.
        self._averager = GradientAverager([p for p in module.parameters() if p in scalars], group=group, at_end=True)
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=stage == 3, ignored_params=scalars)
        # The root's own parameters are needed again by the backward at once.
        root: Any = _Root(module)
        self._root: Any = fully_shard(root, mesh=mesh, reshard_after_forward=False, ignored_params=scalars)
        self._sharded: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
        self._order = UnitOrder(self._root, group=group)

    @property
    def roots(self) -> list[nn.Module]:
        return [self._root]

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._averager.follow_frozen()
        self._follow_frozen()
        if torch.is_grad_enabled():
            self._order.begin_run()
        self._running = True
        try:
            # As one argument: FSDP2 would copy the user's containers on their way through.
            result = self._root(partial(self._hook_and_call, function, *args, **kwargs))
            self._averager.follow_unfrozen()
            return result
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise ModelError(
                "a parameter of a repeated block was used outside of that block's forward, where only this rank's part "
                f"of it is there ({str(error).splitlines()[0]}). Call the block itself, or set zero_stage=0."
            ) from error
        finally:
            self._running = False
            if self._manual or not torch.is_grad_enabled():
                # No backward follows. Hooks that freeze, unfreeze or collect parameters must see those that stay.
                self.reshard()

    def _follow_frozen(self) -> None:
        """The user may have frozen or unfrozen either form of a parameter since the last run: the one in its place."""
        for parameter in fsdp_parameters(self._root):
            if not hasattr(parameter, "_unsharded_param"):
                continue
            sharded = parameter.sharded_param
            # In manual optimization FSDP2 gives the whole form the flag that a toggled optimizer has set on the other.
            if not self._manual and sharded.requires_grad == self._trained.get(id(parameter)):
                sharded.requires_grad_(parameter._unsharded_param.requires_grad)
            _require_grad(parameter, sharded.requires_grad)
            self._trained[id(parameter)] = sharded.requires_grad

    def _hook_and_call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for group in param_groups(self._root._get_fsdp_state()):
            for parameter in group.fsdp_params:
                self._trained.setdefault(id(parameter), parameter.sharded_param.requires_grad)
        self._hook_gradients()
        return function(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        reduce_each = self.stage > 1
        self._root.set_requires_gradient_sync(reduce_each)
        self._root.set_reshard_after_backward(self.stage == 3)
        self._root.set_is_last_backward(reduce_each)
        try:
            with self._averager.paused(), self._order.inside_window():
                yield
        finally:
            self._root.set_requires_gradient_sync(True)
            self._root.set_reshard_after_backward(True)
            self._root.set_is_last_backward(True)

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        self._averager.follow_unfrozen()
        inside = self._backward_in_run() if self._running else nullcontext()
        with inside, self._averager.backward_pass(), self._order.backward_pass():
            yield

    @contextmanager
    def _backward_in_run(self) -> Iterator[None]:
        """Around a backward that the step itself calls (manual optimization)."""
        self._manual = True
        trained = [p for p in fsdp_parameters(self._root) if _is_trained(p)]
        # What the user toggled off since the run began must get no gradient.
        for parameter in trained:
            _require_grad(parameter, parameter.sharded_param.requires_grad)
        try:
            yield
        finally:
            # FSDP2 keeps its whole parameters: the next forward must record all that was not frozen from the start.
            for parameter in trained:
                _require_grad(parameter, True)
            self.refresh()

    def reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    def refresh(self) -> None:
        if self._running:
            self._root.unshard()

    def _hook_gradients(self) -> None:
        """A backward that reaches only the root's own parameters must reduce them too.

        FSDP2 starts from the root's outputs; a backward inside the run has not seen them yet.
        """
        state = self._root._get_fsdp_state()
        for group in param_groups(state):
            for parameter in group.fsdp_params:
                whole = parameter._unsharded_param
                if id(whole) not in self._hooked and whole.requires_grad:
                    whole.register_post_accumulate_grad_hook(
                        lambda _: state._register_root_post_backward_final_callback()
                    )
                    self._hooked.add(id(whole))


class _Root(nn.Module):
    """Stands above the user's module, whose class FSDP2 would otherwise change."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    """FSDP2's own records of the parameters below `root`, each with `sharded_param` and, once used, a whole one."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in param_groups(module._get_fsdp_state()):
                yield from group.fsdp_params


def _is_trained(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad


def _require_grad(parameter: Any, requires_grad: bool) -> None:
    if hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.requires_grad != requires_grad:
        parameter._unsharded_param.requires_grad_(requires_grad)
