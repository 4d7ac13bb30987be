"""A part of the model split by rows and columns: one all-reduce for each half of a layer and direction."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from benchmarks.job import Job
from benchmarks.part import Part


class SplitPart(Part):
    """A rank's rows and columns of a part; logits and loss are split over the vocabulary."""

    def __init__(self, job: Job, group: ProcessGroup) -> None:
        super().__init__(job)
        self.group = group
        self.layers = nn.ModuleList(_SplitLayer(layer, group) for layer in self.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                dim = 1 if name.endswith(("wo", "w2")) else 0
                module.weight = nn.Parameter(module.weight.detach().chunk(group.size(), dim)[group.rank()].clone())
        if isinstance(self.embed, nn.Embedding):
            self.embed = _SplitEmbedding(nn.Parameter(self.embed.weight.detach()), group)

    def before_head(self, hidden: Tensor) -> Tensor:
        return _Enter.apply(hidden, self.group)

    def loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        return _SplitLoss.apply(logits.flatten(0, 1), rows[:, 1:].flatten(), self.group)


class _SplitEmbedding(nn.Module):
    """A rank's rows; what others have is zero before the sum."""

    def __init__(self, rows: nn.Parameter, group: ProcessGroup) -> None:
        super().__init__()
        self.rows, self.group = rows, group

    def forward(self, tokens: Tensor) -> Tensor:
        index = tokens - self.group.rank() * len(self.rows)
        outside = (index < 0) | (index >= len(self.rows))
        found = F.embedding(index.masked_fill(outside, 0), self.rows).masked_fill(outside[..., None], 0.0)
        return _Leave.apply(found, self.group)


class _SplitLayer(nn.Module):
    def __init__(self, layer: Any, group: ProcessGroup) -> None:
        super().__init__()
        self.attention_norm, self.attention = layer.attention_norm, layer.attention
        self.feed_forward_norm, self.feed_forward = layer.feed_forward_norm, layer.feed_forward
        self.group = group

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self.attention(_Enter.apply(self.attention_norm(hidden), self.group), cos, sin)
        hidden = hidden + _Leave.apply(mixed, self.group)
        fed = self.feed_forward(_Enter.apply(self.feed_forward_norm(hidden), self.group))
        return hidden + _Leave.apply(fed, self.group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        dist.all_reduce(tensor, group=group)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _SplitLoss(torch.autograd.Function):
    """Mean cross-entropy from this rank's columns; the forward already makes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
        peak = logits.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        weights = (logits - peak[:, None]).exp_()
        index = target - group.rank() * logits.shape[-1]
        outside = (index < 0) | (index >= logits.shape[-1])
        index = index.masked_fill(outside, 0)[:, None]
        chosen = (logits.gather(-1, index)[:, 0] - peak).masked_fill_(outside, 0.0)
        sums = torch.stack([weights.sum(-1), chosen])
        dist.all_reduce(sums, group=group)
        weights /= sums[0][:, None]
        weights.scatter_add_(-1, index, (outside.to(weights) - 1)[:, None])
        ctx.save_for_backward(weights)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return weights.mul_(gradient / len(weights)), None, None
