"""Tensor parallelism: parameters are DTensors on the axis `tp`, activations are plain local tensors.

A split module computes with its part of the weight; one autograd function on each side of a split region does the
collective: `copy_in` (identity forward, all-reduce backward) and `reduce_out` (all-reduce forward, identity backward).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_3d.errors import ModelError
from lightning_3d.parallel.local import refuse_second_derivative, use_local
from lightning_3d.parallel.split_logits import SplitLogits, check_inside

Owners = dict[int, list[tuple[nn.Module, str]]]

# Of the CPU's generator, and of the GPU's where activations lie on one.
RandomState = tuple[torch.Tensor, torch.Tensor | None]


class Region:
    """What the split modules of a rank share: the axis, and the random stream between two collectives.

    Args:
        mesh: the axis `tp`.
        loss_parallel: whether logits stay split over the vocabulary.
    """

    def __init__(self, mesh: DeviceMesh, *, loss_parallel: bool = False) -> None:
        self.mesh = mesh
        self.group: ProcessGroup = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.loss_parallel = loss_parallel
        # Modules and names of every parameter, by its id: those that are tied stay one object when one is split.
        self.owners: Owners = {}
        self._outside: RandomState | None = None
        self._own_seed = 0
        self._copied: tuple[weakref.ref[torch.Tensor], int, torch.Tensor] | None = None

    def copy_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Into a split region; modules that read one tensor in a row share one all-reduce of its gradient.

        A tensor that was the last to be copied in comes back as it is.
        """
        if self._copied is not None:
            source, version, copied = self._copied
            known = (source() is tensor or copied is tensor) and version == tensor._version
            if known and copied.requires_grad == records(tensor):
                return copied
        copied = self._into(tensor)
        # Kept here and not on the tensor: a view that its base holds would never be freed.
        self._copied = weakref.ref(tensor), tensor._version, copied
        return copied

    def stream(self) -> str:
        """Names this rank where it must not draw what others draw."""
        return f"/tensor{self.rank}" if self._inside() else ""

    def reseeded(self) -> None:
        """The generators were seeded anew, by a text that `stream` is a part of: whoever was inside still is."""
        self._own_seed = torch.default_generator.initial_seed()

    def _inside(self) -> bool:
        """Whether this rank draws from a stream of its own.

        The generator itself tells: a recomputation may end inside of a region, and so may a step that fails. What has
        restored or seeded the generator since has left the region too.
        """
        if self._outside is not None and torch.default_generator.initial_seed() != self._own_seed:
            self._outside = None
        return self._outside is not None

    def _into(self, tensor: torch.Tensor) -> torch.Tensor:
        return copy_in(tensor, self.group) if records(tensor) else tensor

    def out_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Out of a split region, of which `tensor` is this rank's partial result."""
        return reduce_out(tensor, self.group)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathered outputs, which are used outside of split regions."""
        return tensor

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that is used outside of split regions."""
        return parameter

    def forget(self) -> None:
        """Free the copy of what was last read."""
        self._copied = None

    def enter(self, hidden: torch.Tensor, *, training: bool) -> None:
        """Activations are split from here on: dropout must differ between ranks."""
        if training and not self._inside():
            # Drawn alike on all ranks, so that their streams outside stay equal.
            seed = int(torch.randint(2**62, ()))
            self._outside = _random_state(hidden)
            self._own_seed = seed + self.rank
            torch.default_generator.manual_seed(self._own_seed)
            if hidden.is_cuda:
                torch.cuda.manual_seed(self._own_seed)

    def leave(self, hidden: torch.Tensor) -> None:
        """Activations are about to be equal on all ranks again."""
        self.forget()
        if self._inside():
            assert self._outside is not None
            _set_random_state(self._outside, hidden)
            self._outside = None

    @contextmanager
    def common_stream(self, hidden: torch.Tensor) -> Iterator[None]:
        """Inside of a split region too, draw what all ranks draw: dropout of an activation that is whole."""
        if not self._inside():
            yield
            return
        assert self._outside is not None
        own = _random_state(hidden)
        _set_random_state(self._outside, hidden)
        try:
            yield
        finally:
            self._outside = _random_state(hidden)
            _set_random_state(own, hidden)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        return gradient, None


class _GatherOut(torch.autograd.Function):
    """Parts along the last dimension to the whole; the parts' sizes may differ by one chunk's rest."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup, sizes: list[int]) -> torch.Tensor:
        ctx.start, ctx.size = sum(sizes[: group.rank()]), tensor.shape[-1]
        widest = max(sizes)
        padded = F.pad(tensor, (0, widest - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivative()
        return gradient.narrow(-1, ctx.start, ctx.size), None, None


def copy_in(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Into a split region: each rank's gradient is a part of the sum."""
    return _CopyIn.apply(tensor, group)


def reduce_out(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Out of a split region: the sum of all ranks' partial results."""
    return _ReduceOut.apply(tensor, group)


# ---------------------------------------------------------------- styles


def apply_colwise(name: str, module: nn.Module, region: Region, *, gather: bool = False) -> None:
    """Split a Linear's (or Conv1D's) outputs; they stay split unless gathered."""
    weight_dim = 1 if _is_conv1d(module) else 0
    linear = module if weight_dim else _linear(name, module, "colwise")
    total = int(linear.weight.shape[weight_dim])  # type: ignore[index]
    if not gather:
        _check_divides(name, "outputs", total, region.size)
    _shard_parameters_(name, linear, region, {"weight": weight_dim, "bias": 0})

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        weight = use_local(self.weight)
        output = F.linear(region.copy_in(hidden), weight.T if weight_dim else weight, use_local(self.bias))
        if not gather:
            region.enter(hidden, training=self.training)
            return output
        region.leave(hidden)
        sizes = _chunks(total, region.size)
        if region.loss_parallel and min(sizes) > 0:
            return SplitLogits.wrap(output, group=region.group, sizes=sizes, gather=_GatherOut.apply)
        return region.gathered(_GatherOut.apply(output, region.group, sizes))

    set_forward(linear, forward)


def apply_rowwise(name: str, module: nn.Module, region: Region) -> None:
    """Split a Linear's (or Conv1D's) inputs; the bias is added once, after the sum."""
    weight_dim = 0 if _is_conv1d(module) else 1
    if weight_dim == 1:
        _linear(name, module, "rowwise")
    size = module.weight.shape[weight_dim]  # type: ignore[index]
    _check_divides(name, "inputs", int(size), region.size)
    _shard_parameters_(name, module, region, {"weight": weight_dim})

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        # First: a checkpoint's recomputation may stop at the product, and must not stop inside of the region.
        region.leave(hidden)
        weight = use_local(self.weight)
        output = F.linear(hidden, weight.T if weight_dim == 0 else weight)
        output = region.out_of(output)
        # Under autocast the product is in half precision, and so is a Linear's sum with its bias.
        return output if self.bias is None else output + region.whole(self.bias).to(output.dtype)

    set_forward(module, forward)


def apply_vocabulary(name: str, module: nn.Module, region: Region) -> None:
    """Split an Embedding's rows; each rank looks up its own tokens, the sum is whole."""
    if not isinstance(module, nn.Embedding):
        raise ModelError(f"{name} is a {type(module).__name__}; the style 'vocabulary' splits an nn.Embedding.")
    unknown = {"max_norm": module.max_norm, "sparse": module.sparse, "scale_grad_by_freq": module.scale_grad_by_freq}
    for option, value in unknown.items():
        if value:
            raise ModelError(
                f"{name} has {option}={value}, which a split embedding does not do. Leave it out, or take {name} from "
                "the tensor-parallel plan."
            )
    _shard_parameters_(name, module, region, {"weight": 0})
    sizes = _chunks(module.num_embeddings, region.size)
    first, count = sum(sizes[: region.rank]), sizes[region.rank]
    total, padding = module.num_embeddings, module.padding_idx

    def forward(self: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        check_inside(tokens, total, what=f"tokens of {name}")
        inside = (tokens >= first) & (tokens < first + count)
        rows = F.embedding((tokens - first).clamp(0, max(count - 1, 0)), use_local(self.weight))
        keep = inside if padding is None else inside & (tokens != padding)
        # A padding row is looked up like any other, but learns nothing.
        rows = torch.where(keep[..., None], rows, rows.detach()) if padding is not None else rows
        return region.out_of(rows.masked_fill(~inside[..., None], 0.0))

    set_forward(module, forward)


def apply_slice(name: str, module: nn.Module, region: Region, *, parts: list[int], unit: int = 1) -> None:
    """Each rank computes its share of a projection whose weight stays whole.

    For projections that pack several matrices side by side (GPT-2's q, k and v), or that have fewer heads than there
    are ranks: the weight's shares overlap or do not lie together, so its gradient is summed over the ranks.

    Args:
        parts: sizes of the packed matrices' outputs.
        unit: outputs of one head, which several ranks may share.
    """
    columns = torch.cat([_share_of(size, offset, unit, region, name) for offset, size in _offsets(parts)])
    transposed = _is_conv1d(module)

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        nonlocal columns
        columns = index = columns.to(hidden.device)
        weight = copy_in(self.weight, region.group).index_select(1 if transposed else 0, index)
        bias = None if self.bias is None else copy_in(self.bias, region.group).index_select(0, index)
        output = F.linear(region.copy_in(hidden), weight.T if transposed else weight, bias)
        region.enter(hidden, training=self.training)
        return output

    set_forward(module, forward)


def apply_replicate(name: str, module: nn.Module, region: Region) -> None:
    """A module inside a split region (a norm over each head, say): its weights stay whole, gradients are summed."""
    original = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A double with copies for parameters: torch.func.functional_call takes six times as long as a small Linear.
        double = object.__new__(type(self))
        whole = {
            key: value if value is None else copy_in(value, region.group) for key, value in self._parameters.items()
        }
        double.__dict__.update(vars(self), _parameters=whole)
        return original(double, *args, **kwargs)

    set_forward(module, forward)


# ---------------------------------------------------------------- parts


def _shard_parameters_(module_name: str, module: nn.Module, region: Region, dims: dict[str, int]) -> None:
    for name, dim in dims.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        if isinstance(parameter, DTensor):
            # Tied to one that was split before.
            if parameter.placements != (Shard(dim),):
                raise ModelError(
                    f"{module_name}.{name} is split along dimension {parameter.placements[0].dim} already, by a module "  # type: ignore[attr-defined]
                    f"that shares it, and the plan splits it along {dim} here. Give both a style that splits alike, as "
                    "'vocabulary' and 'colwise_gather_output' do."
                )
            continue
        sharded = distribute_tensor(parameter.detach(), region.mesh, [Shard(dim)], src_data_rank=None)
        split = nn.Parameter(sharded, parameter.requires_grad)
        for owner, key in region.owners.get(id(parameter), [(module, name)]):
            owner._parameters[key] = split


def find_owners(module: nn.Module) -> Owners:
    """Where each parameter of a module stands, tied ones more than once."""
    owners: Owners = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((part, name))
    return owners


def _random_state(hidden: torch.Tensor) -> RandomState:
    return torch.get_rng_state(), torch.cuda.get_rng_state(hidden.device) if hidden.is_cuda else None


def _set_random_state(state: RandomState, hidden: torch.Tensor) -> None:
    on_cpu, on_cuda = state
    torch.set_rng_state(on_cpu)
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, hidden.device)


def records(tensor: torch.Tensor) -> bool:
    """Whether a gradient will come back to it."""
    return tensor.requires_grad and torch.is_grad_enabled()


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute by another function of itself and its arguments."""
    # On the instance: its class, name and parameters stay what they are.
    module.__dict__["forward"] = MethodType(forward, module)


def _linear(name: str, module: nn.Module, style: str) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise ModelError(f"{name} is a {type(module).__name__}; the style {style!r} splits an nn.Linear.")
    return module


def _is_conv1d(module: nn.Module) -> bool:
    # transformers' Conv1D keeps (inputs, outputs).
    return type(module).__name__ == "Conv1D"


def _check_divides(name: str, what: str, size: int, ranks: int) -> None:
    if size % ranks:
        fits = [count for count in range(1, min(size, 64) + 1) if size % count == 0]
        raise ModelError(
            f"{name} has {size} {what}, which do not divide by tensor_parallel_size={ranks}. "
            f"Set tensor_parallel_size to one of {', '.join(map(str, fits))}."
        )


def _chunks(size: int, ranks: int) -> list[int]:
    """Sizes of DTensor's shards: as torch.chunk cuts."""
    width = -(-size // ranks)
    return [max(0, min(width, size - rank * width)) for rank in range(ranks)]


def _offsets(parts: list[int]) -> list[tuple[int, int]]:
    return [(sum(parts[:i]), size) for i, size in enumerate(parts)]


def _share_of(size: int, offset: int, unit: int, region: Region, name: str) -> torch.Tensor:
    heads = size // unit
    if heads >= region.size:
        _check_divides(name, "heads" if unit > 1 else "outputs per matrix", heads, region.size)
        width = heads // region.size * unit
        return torch.arange(width) + offset + region.rank * width
    if region.size % heads:
        raise ModelError(
            f"{name} has {heads} heads, which can neither be split over nor copied to {region.size} ranks. "
            f"Set tensor_parallel_size to a divisor or a multiple of {heads}."
        )
    return torch.arange(unit) + offset + region.rank // (region.size // heads) * unit
