"""PEFT's LoRA adapters on a Hugging Face model: only they are trained, in any layout."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightning_3d.errors import ConfigError

# Settings whose adapters are weights of layers of their own, which every layout can hold and `write_adapter` can name.
SETTINGS = ("r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "use_rslora")

_ADAPTER = re.compile(r"^(?P<prefix>.*?)(?P<name>base_model\.model\..+\.lora_[^.]+)\.default(?P<rest>\.weight)?$")


def check_lora(settings: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: PEFT is missing, or a setting that is unknown or has another value than works.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError("lora=... needs PEFT: pip install lightning-3d[lora]") from error
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(f"lora.{name} is not a setting here. They are {', '.join(SETTINGS)}, as in PEFT.")
    rank = settings.get("r", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ConfigError(f"lora.r={rank!r} is no rank of a matrix. Set lora.r=8, say.")


def add_adapters(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """The model with adapters, everything else frozen, in the model's dtype.

    Raises:
        ConfigError: PEFT refuses the settings for this model.
    """
    from peft import LoraConfig, PeftModelForCausalLM

    try:
        config = LoraConfig(task_type="CAUSAL_LM", **settings)
        # Adapters of another dtype than the layer's could not be sharded together with it.
        return PeftModelForCausalLM(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"PEFT refuses lora={dict(settings)}: {error}") from error


def adapter_names(names: Collection[str]) -> dict[str, str]:
    """Of a module's state, the adapters, each with its name in PEFT's files."""
    found = {}
    for name in names:
        match = _ADAPTER.match(name)
        if match:
            found[name] = match["name"] + (match["rest"] or "")
    return found


def write_adapter_config(
    folder: Path, settings: Mapping[str, Any], *, names: Collection[str], base: str | None
) -> None:
    """Write adapter_config.json.

    Args:
        names: of the adapters, which tell the layers that have one.
        base: the folder of the model below them.
    """
    from peft import LoraConfig

    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
    known = {**settings, "target_modules": settings.get("target_modules") or targets}
    LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True, **known).save_pretrained(
        str(folder)
    )
