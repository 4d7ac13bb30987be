"""Parameters that tensor parallelism leaves whole have one gradient on all ranks, or their copies drift apart.

Inside of a split region each rank has a part of such a gradient. Only the plan's author knows which modules run there,
so what it leaves out shows in the numbers alone: as soon as two ranks' gradients differ by far more than rounding.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import local_tensor

# Shares of a gradient's norm, and of the largest: kernels that do not add in one order differ by less.
_TOLERANCE, _NOTHING = 5e-2, 1e-6


class WholeGradients:
    """Compares the gradients of whole parameters at an optimizer's steps 1, 2, 4, 8 and so on.

    Not at the first alone, for behind weights that start at zero there is no gradient yet.

    Args:
        module: laid out.
        group: the tensor-parallel ranks.
    """

    def __init__(self, module: nn.Module, *, group: ProcessGroup) -> None:
        self._module, self._group = module, group
        self._steps: Counter[int] = Counter()

    def before_update(self, optimizer: Any) -> None:
        """To be called with the gradients of a whole window; collective.

        Raises:
            ModelError: on all ranks, where the gradient of a whole parameter differs between them.
        """
        self._steps[id(optimizer)] += 1
        step = self._steps[id(optimizer)]
        if step & (step - 1):
            return
        its_own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        different = self._told(
            self._different({n: p for n, p in self._module.named_parameters() if id(p) in its_own and not _is_split(p)})
        )
        if different:
            raise ModelError(
                f"the gradient of {', '.join(different[:4])} differs between tensor-parallel ranks: it is used where "
                "activations are split, behind a 'colwise' layer, and each rank has a part of the sum. Put it into a "
                "module of its own there, and give that the style 'replicate' in tensor_parallel_plan(), which sums "
                "its gradient; or set tensor_parallel_size=1."
            )

    def _told(self, different: list[str]) -> list[str]:
        """What any rank has found: others may have another stage, or nothing of a small parameter."""
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, different)
        return list(dict.fromkeys(name for names in found for name in names))

    @torch.no_grad()
    def _different(self, parameters: dict[str, nn.Parameter]) -> list[str]:
        if not parameters:
            return []
        mine = torch.stack([_figures(parameter) for parameter in parameters.values()])
        each = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(each, mine, group=self._group)
        norms, sums = torch.stack(each).unbind(-1)
        norm = norms.amax(0)
        differs = (sums.amax(0) - sums.amin(0) > _TOLERANCE * norm) & (norm > _NOTHING * norm.max())
        # What is not finite is told by others.
        return [name for name, bad in zip(parameters, (differs & norm.isfinite()).tolist(), strict=True) if bad]


def _figures(parameter: nn.Parameter) -> torch.Tensor:
    """The norm of a gradient, and a sum of it that tells it from others of this norm."""
    if parameter.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=local_tensor(parameter).device)
    gradient = local_tensor(parameter.grad).flatten()
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    weights = torch.arange(gradient.numel(), device=gradient.device, dtype=gradient.dtype).cos_()
    return torch.stack([gradient.norm(), gradient @ weights]).double()


def _is_split(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
