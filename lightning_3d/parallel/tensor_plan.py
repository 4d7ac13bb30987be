"""Which modules tensor parallelism splits, and how: told by the model, by transformers, or known for certain."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel import adapters, tensor
from lightning_3d.parallel.placeholder import Absent
from lightning_3d.parallel.sequence import SequenceRegion, apply_sequence_parallel
from lightning_3d.parallel.tensor import Region

# Names of one style in our plans and in those of transformers.
_STYLES: dict[str, Any] = {
    "colwise": tensor.apply_colwise,
    "rowwise": tensor.apply_rowwise,
    "vocabulary": tensor.apply_vocabulary,
    "embedding_rowwise": tensor.apply_vocabulary,
    "colwise_gather_output": partial(tensor.apply_colwise, gather=True),
    "colwise_rep": partial(tensor.apply_colwise, gather=True),
    "replicate": tensor.apply_replicate,
    "replicated_with_grad_allreduce": tensor.apply_replicate,
}

# Styles under which each rank has a part of the weights.
_SPLIT = ("colwise", "rowwise", "vocabulary", "embedding_rowwise", "colwise_gather_output", "colwise_rep")

# Styles of modules that are not split themselves.
_WHOLE = ("replicate", "replicated_with_grad_allreduce")

_EXAMPLE = """
    def tensor_parallel_plan(self):          # on the model or the LightningModule; names are relative to it
        return {
            "embed": "vocabulary",           # rows of an nn.Embedding
            "layers.*.wq": "colwise",        # outputs of an nn.Linear: the next module works on its part
            "layers.*.wo": "rowwise",        # inputs of an nn.Linear, which come from a colwise one
            "head": "colwise_gather_output", # outputs, gathered again
        }"""


def apply_tensor_parallel(
    module: nn.Module, plan: Mapping[str, str], *, region: Region, stacks: Sequence[list[nn.Module]] = ()
) -> None:
    """Split the modules of a plan in place; names that are not there belong to another pipeline rank.

    Args:
        plan: styles by full name, as `resolve_plan` gives it.
        stacks: blocks, in order, that work on parts of the sequence (sequence parallelism).

    Raises:
        ModelError: an unknown style, a module that a style does not fit, or sizes that do not divide.
    """
    parts = dict(module.named_modules())
    sequence = SequenceRegion(region.mesh)
    region.owners = sequence.owners = tensor.find_owners(module)
    inside = {part for blocks in stacks for block in blocks for part in block.modules()}
    planned: list[nn.Module] = []
    readers: dict[nn.Module, None] = {}
    for name, style in plan.items():
        if name in parts and not isinstance(parts[name], Absent):
            planned.extend(_layers(parts[name], style))
            if parts[name] in inside and style not in ("rowwise", *_WHOLE):
                readers[parts[name.rpartition(".")[0]]] = None
            _apply(name, parts, style, sequence if parts[name] in inside else region)
    for blocks in stacks:
        mine = {part for block in blocks for part in block.modules()}
        apply_sequence_parallel(blocks, sequence, planned=planned, readers=[part for part in readers if part in mine])
    _finish_attention(module, region)


def _check_tied(parts: Mapping[str, nn.Module], plan: Mapping[str, str]) -> None:
    """On the whole model: a pipeline rank would see its own side of a tie alone."""
    planned = {layer: style for name, style in plan.items() for layer in _layers(parts[name], style)}
    split = {id(p) for layer, style in planned.items() for p in layer._parameters.values() if style in _SPLIT}
    for name, part in parts.items():
        if part not in planned and any(
            id(parameter) in split for parameter in part._parameters.values() if parameter is not None
        ):
            raise ModelError(
                f"{name} shares a parameter with a module that the plan splits. Give it an entry too, as an output "
                "layer that is tied to an embedding: 'colwise_gather_output'."
            )


def resolve_plan(module: nn.Module) -> dict[str, str]:
    """The plan of a whole module, a style for each full name.

    Raises:
        ModelError: no plan is known, or an entry matches nothing.
    """
    names = [name for name, _ in module.named_modules()]
    resolved: dict[str, str] = {}
    for pattern, style in find_plan(module).items():
        found = [name for name in names if re.fullmatch(_regex(pattern), name)]
        if not found:
            raise ModelError(
                f"the tensor-parallel plan's entry {pattern!r} matches no module. Plan entries look like:{_EXAMPLE}"
            )
        resolved.update(dict.fromkeys(found, style))
    parts = dict(module.named_modules())
    for name, style in resolved.items():
        if adapters.has_adapters(parts[name]):
            adapters.check_adapted(name, parts[name], style)
    _check_tied(parts, resolved)
    return resolved


def _layers(part: nn.Module, style: str) -> list[nn.Module]:
    """The layers that an entry of the plan deals with: with adapters on a layer, these too."""
    return adapters.split_parts(part, style) if adapters.has_adapters(part) else [part]


def without_cut_pairs(plan: Mapping[str, str], *, stages: Mapping[str, int]) -> dict[str, str]:
    """A plan without the pairs of Linears of a Sequential that lie on two pipeline stages: each computes them whole.

    What lies between them is then in no split region either.

    Args:
        stages: of each pipelined block, by full name, in order.
    """
    kept = dict(plan)
    pair: list[str] = []
    for name, stage in stages.items():
        if plan.get(name) == "colwise":
            pair = [name]
        elif pair:
            pair.append(name)
            if plan.get(name) == "rowwise":
                if stages[pair[0]] != stage:
                    kept = {n: style for n, style in kept.items() if not _is_below(n, pair)}
                pair = []
    return kept


def _is_below(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def find_plan(module: nn.Module) -> dict[str, str]:
    """Styles by name pattern, `*` for one part of a name.

    Raises:
        ModelError: nobody knows how to split this model; says which modules and how to write a plan.
    """
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        method = getattr(type(part), "tensor_parallel_plan", None)
        if method is not None:
            return _below(prefix, method(part))
        hugging_face = _hugging_face_plan(part)
        if hugging_face:
            return _below(prefix, hugging_face)
    known = _mlp_plan(module)
    if known:
        return known
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear | nn.Embedding)]
    raise ModelError(
        f"{type(module).__name__} does not say how tensor parallelism splits {', '.join(names[:8])}"
        f"{' ...' if len(names) > 8 else ''}. Write a plan:{_EXAMPLE}"
    )


def _below(prefix: str, plan: Mapping[str, str]) -> dict[str, str]:
    return {prefix + pattern: style for pattern, style in plan.items()}


def _hugging_face_plan(part: nn.Module) -> dict[str, str] | None:
    """The plan that transformers has for a model, completed by its embedding."""
    config = getattr(part, "config", None)
    # Of its class: PEFT's wrappers pass on the attributes of the model in them, but names in it are others from there.
    base_name = getattr(type(part), "base_model_prefix", None)
    if config is None or base_name is None:
        return None
    if getattr(config, "model_type", None) == "gpt2":
        return _gpt2_plan(part)
    base_plan = getattr(config, "base_model_tp_plan", None)
    if not base_plan:
        return None
    inner = f"{base_name}." if hasattr(part, base_name) else ""
    plan = {inner + pattern: style for pattern, style in base_plan.items()}
    plan.update(getattr(type(part), "_tp_plan", None) or {})
    names = {id(child): name for name, child in part.named_modules()}
    embedding = part.get_input_embeddings()  # type: ignore[operator]
    if id(embedding) in names:
        plan.setdefault(names[id(embedding)], "vocabulary")
    return plan


def _gpt2_plan(part: nn.Module) -> dict[str, str]:
    inner = "transformer." if hasattr(part, "transformer") else ""
    plan = {
        f"{inner}wte": "vocabulary",
        f"{inner}h.*.attn.c_attn": "packed_qkv",
        f"{inner}h.*.attn.c_proj": "rowwise",
        f"{inner}h.*.mlp.c_fc": "colwise",
        f"{inner}h.*.mlp.c_proj": "rowwise",
    }
    if hasattr(part, "lm_head"):
        plan["lm_head"] = "colwise_gather_output"
    return plan


def _mlp_plan(module: nn.Module) -> dict[str, str] | None:
    """Pairs of Linears in a Sequential, with nothing between that mixes features."""
    plan: dict[str, str] = {}
    elementwise = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Dropout, nn.Identity)
    for name, part in module.named_modules():
        if not isinstance(part, nn.Sequential):
            continue
        opened = None
        for key, child in part.named_children():
            here = f"{name}.{key}" if name else key
            if isinstance(child, nn.Linear):
                if opened is None:
                    opened = here
                else:
                    plan.update({opened: "colwise", here: "rowwise"})
                    opened = None
            elif not isinstance(child, elementwise):
                opened = None
    linears = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    # Known for certain only where Sequentials are all there is.
    return plan if plan and len(linears) <= len(plan) + 1 and not _has_embedding(module) else None


def _has_embedding(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Embedding | nn.MultiheadAttention) for part in module.modules())


def _apply(name: str, parts: dict[str, nn.Module], style: str, region: Region) -> None:
    part = parts[name]
    split = _find_split(name, adapters.plain_layer(part), style, holder=parts[name.rpartition(".")[0]], region=region)
    if not adapters.has_adapters(part):
        split(name, part, region)
    elif style == "rowwise":
        adapters.apply_rowwise(name, part, region)
    else:
        adapters.apply_colwise(name, part, region, split=split)


def _find_split(
    name: str, layer: nn.Module, style: str, *, holder: nn.Module, region: Region
) -> Callable[[str, nn.Module, Region], None]:
    """What splits a layer as a style says.

    Args:
        holder: the module that has the layer, which may tell the size of a head.
    """
    if style == "packed_qkv":
        size = int(layer.weight.shape[1]) // 3  # type: ignore[index]
        return partial(tensor.apply_slice, parts=[size] * 3, unit=int(holder.head_dim))  # type: ignore[arg-type]
    if style not in _STYLES:
        raise ModelError(
            f"{name}: the tensor-parallel style {style!r} is unknown. Known: {', '.join(sorted(_STYLES))}."
        )
    unit = getattr(holder, "head_dim", None) or getattr(holder, "head_size", None)
    if style == "colwise" and isinstance(layer, nn.Linear) and isinstance(unit, int) and layer.out_features % unit == 0:
        heads = layer.out_features // unit
        if heads % region.size:
            # Fewer key and value heads than ranks: neighbours share one.
            return partial(tensor.apply_slice, parts=[layer.out_features], unit=unit)
    return _STYLES[style]


def _finish_attention(module: nn.Module, region: Region) -> None:
    """Attributes of attention modules that count heads over all ranks."""
    for part in module.modules():
        if type(part).__name__ == "GPT2Attention":
            part.split_size = int(part.split_size) // region.size  # type: ignore[arg-type,assignment]
        query, key = (adapters.plain_layer(getattr(part, name, None)) for name in ("q_proj", "k_proj"))
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and hasattr(part, "num_key_value_groups"):
            unit = int(part.head_dim)  # type: ignore[arg-type]
            queries = query.out_features // unit // region.size
            keys = max(1, key.out_features // unit // region.size)
            part.num_key_value_groups = queries // keys  # type: ignore[assignment]


def _regex(pattern: str) -> str:
    return r"\.".join("[^.]+" if step == "*" else re.escape(step) for step in pattern.split("."))
