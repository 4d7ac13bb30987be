"""Any Hugging Face causal language model as a LightningModule, from a config or from a local folder's weights."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, ModelError
from lightning_3d.models.language_model import CausalLanguageModel, next_token_loss
from lightning_3d.models.lora import add_adapters, check_lora
from lightning_3d.models.optimization import Optimization
from lightning_3d.models.weight_files import equal_values, open_safetensors, some

# Old checkpoints stored these caches; every version computes them from the config.
_STALE_KEYS = (r"rotary_emb\.inv_freq$",)


class HFCausalLM(CausalLanguageModel):
    """A causal language model of `transformers`, trained from scratch or from a local folder.

    Parameters take torch's default dtype (the Trainer's precision sets it), whatever the config's own `dtype` says.

    Args:
        config: `model_type` and fields of its transformers config, to start from fresh weights.
        path: a folder with config.json and safetensors weights (one file, or shards with an index) to start from.
        lora: settings of PEFT's LoraConfig (r, lora_alpha, target_modules, ...): train adapters alone.
        loss: "own" is cross-entropy on the logits, in their dtype; "labels" is the model's own loss, for which it is
            fed the whole row of sequence + 1 tokens as input and labels.
        learning_rate, weight_decay, betas, warmup_steps, max_steps, min_learning_rate_ratio: see `Optimization`.

    Raises:
        ConfigError: a field that is unknown, missing or cannot work, or transformers is not installed.
        ModelError: weights that do not fit the model, all of them listed (from `configure_model`).
    """

    model: nn.Module | None

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        path: str | Path | None = None,
        loss: Literal["own", "labels"] = "own",
        learning_rate: float = 3e-4,
        weight_decay: float = 0.1,
        betas: Sequence[float] = (0.9, 0.95),
        warmup_steps: int = 0,
        max_steps: int | None = None,
        min_learning_rate_ratio: float = 0.1,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            Optimization(
                learning_rate=learning_rate,
                weight_decay=weight_decay,
                betas=tuple(betas),  # type: ignore[arg-type]  # its length is checked there
                warmup_steps=warmup_steps,
                max_steps=max_steps,
                min_learning_rate_ratio=min_learning_rate_ratio,
            )
        )
        if loss not in ("own", "labels"):
            raise ConfigError(f"loss={loss!r} must be 'own' or 'labels'.")
        if (config is None) == (path is None):
            raise ConfigError(
                f"config={config!r} and path={path!r}: set exactly one, config={{model_type: llama, ...}} for fresh "
                "weights or path=FOLDER for stored ones."
            )
        if lora is not None:
            check_lora(lora)
        self.loss = loss
        self.lora = lora = None if lora is None else dict(lora)
        # A checkpoint of this module may be used in another working folder.
        self.path = None if path is None else Path(path).absolute()
        self.model_config = build_config(config) if config is not None else read_config(Path(str(path)))
        config = None if config is None else dict(config)
        path = None if self.path is None else str(self.path)
        betas = list(betas)
        self.save_hyperparameters()

    @property
    def vocab_size(self) -> int:
        return int(self.model_config.vocab_size)

    def configure_model(self) -> None:
        if self.model is None:
            model = build_model(self.model_config)
            if self.path is not None:
                load_safetensors_(model, folder=self.path)
            self.model = model if self.lora is None else add_adapters(model, self.lora)

    def token_logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._built()(input_ids=self._fits(tokens), use_cache=False).logits
        return logits

    def batch_loss(self, tokens: Tensor) -> Tensor:
        if self.loss == "own":
            return next_token_loss(self.token_logits(tokens[:, :-1]), tokens[:, 1:])
        tokens = self._fits(tokens)
        loss: Tensor = self._built()(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def _built(self) -> nn.Module:
        if self.model is None:
            raise ConfigError("The model is not built yet: call configure_model(), or let the Trainer do it.")
        return self.model

    def _fits(self, tokens: Tensor) -> Tensor:
        longest = getattr(self.model_config, "max_position_embeddings", None)
        if isinstance(longest, int) and tokens.shape[1] > longest:
            raise ModelError(
                f"The model is fed {tokens.shape[1]} tokens (loss={self.loss!r}), but its "
                f"max_position_embeddings={longest}. Set it to {tokens.shape[1]} or feed shorter sequences."
            )
        return tokens


def build_config(config: Mapping[str, Any]) -> Any:
    """The transformers config named by `model_type`, with the other fields set on it.

    Raises:
        ConfigError: transformers is missing, `model_type` is missing or unknown, or a field is unknown or refused.
    """
    _require_transformers()
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = dict(config)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=3)
        raise ConfigError(
            f"config.model_type={model_type!r} is not one that transformers knows. "
            f"Use {' or '.join(close) or 'llama'}, for example."
        )
    # transformers takes any name as an attribute, so that a misspelt size would be ignored in silence.
    defaults = AutoConfig.for_model(model_type)
    for name in settings:
        if not hasattr(defaults, name):
            close = difflib.get_close_matches(name, [*defaults.to_dict(), *defaults.attribute_map], n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Its fields are {', '.join(sorted(defaults.to_dict()))}."
            raise ConfigError(f"A {model_type} config has no field {name!r}. {hint}")
    try:
        built = AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # transformers raises classes of its own here, and which ones depends on its version
        # It writes names as words.
        words = str(error).replace("_", " ").lower()
        named = [name for name in settings if name.removeprefix("num_").replace("_", " ") in words]
        hint = f" Look at {', '.join(f'config.{name}={settings[name]!r}' for name in named)}." if named else ""
        raise ConfigError(f"transformers refuses the {model_type} config: {error}.{hint}".replace("..", ".")) from error
    heads, kv_heads = getattr(built, "num_attention_heads", None), getattr(built, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}. "
            f"Set num_key_value_heads to one of {fits}."
        )
    return built


def read_config(folder: Path) -> Any:
    """The transformers config of a local folder.

    Raises:
        ConfigError: transformers or config.json is missing, or cannot be read.
    """
    _require_transformers()
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"path={str(folder)!r} holds no config.json. Give a local folder as save_pretrained() writes it; "
            "names on a hub are not downloaded."
        )
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # as above: whatever transformers raises, the reader needs the file's name
        raise ConfigError(f"transformers cannot read {folder / 'config.json'}: {error}") from error


def build_model(config: Any) -> nn.Module:
    """The model of a transformers config with fresh weights, in torch's default dtype, here or on the meta device."""
    from transformers import AutoModelForCausalLM

    # from_config writes the dtype into the config that it is given.
    model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())
    if any(parameter.is_meta for parameter in model.parameters()):
        # transformers skips its initialisation under the meta device. Ours records the operations there and replays
        # them, so they have to run; otherwise the weights would be those of torch's plain layers.
        model.initialize_weights()
    model.train()
    return model


@torch.no_grad()
def load_safetensors_(model: nn.Module, *, folder: Path) -> nn.Module:
    """Copy a folder's safetensors weights into the model's parameters and buffers, cast to their dtype.

    On the meta device the copies do nothing but can be recorded: the sources stay mapped from the files.

    Raises:
        ModelError: weights that are missing, unexpected, of another shape, or stored as two that differ but are one
            here (one error that lists them), or no safetensors in the folder.
    """
    stored = open_safetensors(folder)
    targets = model.state_dict(keep_vars=True)
    prefix = _missing_prefix(model, stored)
    ignored = [*_STALE_KEYS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]

    loaded: dict[int, str] = {}
    unexpected, misshapen, unlike = [], [], []
    for name, tensor in stored.items():
        target = targets.get(prefix + name)
        if target is None:
            if not any(re.search(pattern, name) for pattern in ignored):
                unexpected.append(name)
        elif target.shape != tensor.shape:
            misshapen.append(f"{prefix + name} is {tuple(tensor.shape)} for {tuple(target.shape)}")
            loaded[id(target)] = name
        elif id(target) not in loaded:
            target.copy_(tensor)
            loaded[id(target)] = name
        elif not equal_values(stored[loaded[id(target)]], tensor):
            unlike.append(f"{name} and {loaded[id(target)]}")
    # By identity, because tied weights are stored under one of their names.
    missing = [name for name, target in targets.items() if id(target) not in loaded]
    problems = [
        f"{kind}: {some(names)}."
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshapen),
            ("stored as two that differ, but tied here", unlike),
        )
        if names
    ]
    if problems:
        raise ModelError(
            f"The weights in {folder} do not fit {type(model).__name__}. {' '.join(problems)} "
            "Use the folder's own config.json, or weights that were saved from this model with save_pretrained()."
        )
    return model


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError("HFCausalLM needs transformers: pip install lightning-3d[hf]") from error


def _missing_prefix(model: nn.Module, stored: Collection[str]) -> str:
    """What the names lack where the folder was saved from the model without its head ("transformer.", say)."""
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    body = getattr(model, prefix, None) if prefix else None
    if body is None or any(name.startswith(f"{prefix}.") for name in stored):
        return ""
    return f"{prefix}."
