"""What a Hugging Face folder has beside weights: the model's config, and the names that its weights must have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_3d.errors import ConfigError
from lightning_3d.models.gpt_as_llama import gpt_config_of, gpt_name, llama_config
from lightning_3d.models.huggingface import build_config, read_config


@dataclass(frozen=True)
class Counterpart:
    """What a module's model is in transformers.

    Attributes:
        config: of transformers.
        folder: that the model is from, if any.
        own_name: of a weight's name in transformers, the name that the model itself has for it.
    """

    config: Any
    folder: Path | None = None
    own_name: Callable[[str], str] = str


def counterpart_of(hyper_parameters: Mapping[str, Any]) -> Counterpart | None:
    """What a module with these hyper-parameters is in transformers, or None where they do not tell.

    Raises:
        ConfigError: they name a folder that is not there, or is none of transformers.
    """
    config, path = hyper_parameters.get("config"), hyper_parameters.get("path")
    gpt = gpt_config_of(hyper_parameters)
    if gpt is not None:
        return Counterpart(llama_config(gpt), own_name=gpt_name)
    if isinstance(config, Mapping) and "model_type" in config:
        return Counterpart(build_config(config))
    if not isinstance(path, str):
        return None
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"the checkpoint's model is from path={path!r}, which holds no config.json (seen from {Path.cwd()}). "
            "Give the folder where it is now: --config-from FOLDER."
        )
    return Counterpart(read_config(Path(path)), Path(path))


def weight_shapes(config: Any) -> dict[str, torch.Size]:
    """Names and shapes of the weights of a config's model; of tied ones the first name, as transformers stores them."""
    shapes: dict[str, torch.Size] = {}
    seen: set[int] = set()
    # By identity, since tensors on the meta device have no memory to be told apart by.
    for name, value in _empty_model(config).state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            shapes[name] = value.shape
    return shapes


def all_names(config: Any) -> list[str]:
    """All names in the state of a config's model, every one of tied weights."""
    return list(_empty_model(config).state_dict())


def write_config(folder: Path, config: Any, *, dtype: torch.dtype) -> None:
    """Write config.json, which names the model's class and its weights' dtype."""
    described = copy.deepcopy(config)
    described.architectures = [type(_empty_model(config)).__name__]
    described.dtype = dtype
    described.save_pretrained(str(folder))


def write_tokenizer(folder: Path, tokenizer: Any, *, end_of_text: str) -> None:
    """Write a tokenizer of `tokenizers` so that `AutoTokenizer.from_pretrained` loads it."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_of_text).save_pretrained(str(folder))


def _empty_model(config: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except ValueError as error:
        raise ConfigError(f"transformers has no causal language model for this config: {error}") from error
