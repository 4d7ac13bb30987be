"""The fp16 loss scaler over sharded gradients: all ranks find the same overflow, and skip the same step."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_3d.parallel.local import local_tensor


def agree_on_overflow(scaler: Any) -> None:
    """Let a `torch.amp.GradScaler` unscale each rank's part, and tell every rank of any rank's infinity."""

    def unscale(
        self: Any, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            local_tensor(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("gradients in fp16 cannot be unscaled: keep parameters in fp32 (precision='16-mixed').")
        for dtype in {gradient.dtype for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype == dtype and gradient.numel()]
            if same:
                torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    scaler._unscale_grads_ = MethodType(unscale, scaler)
