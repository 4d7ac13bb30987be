"""Writes some text with the model after each validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.models.generation import check_sampling, generate_tokens, longest_input


class SampleText(L.Callback):
    """Continues each prompt after a validation; printed, and logged as a table where Weights & Biases is the logger.

    The module has `token_logits` of tokens (rows, sequence), the data module a `tokenizer` of the package `tokenizers`.
    Works in every layout: all ranks run the forwards together and take rank 0's choices.

    Args:
        prompts: texts to go on from.
        max_new_tokens, temperature, top_k: see `generate_tokens`.
        every_n_validations: leave out the others.

    Raises:
        ConfigError: a value that cannot work; before fitting, a module or data module without what is needed.
    """

    def __init__(
        self,
        prompts: Sequence[str] = ("def ",),
        max_new_tokens: int = 32,
        temperature: float = 0.8,
        top_k: int | None = None,
        every_n_validations: int = 1,
    ) -> None:
        if isinstance(prompts, str) or not prompts or not all(prompts):
            raise ConfigError(f"prompts={prompts!r} is not a list of texts. Set prompts=['def '], say.")
        if every_n_validations < 1:
            raise ConfigError(f"every_n_validations={every_n_validations} is less than one. Set 1 for each.")
        check_sampling(count=max_new_tokens, temperature=temperature, top_k=top_k)
        self.prompts = list(prompts)
        self.max_new_tokens, self.temperature, self.top_k = max_new_tokens, temperature, top_k
        self.every_n_validations = every_n_validations
        self.samples: list[str] = []
        self._validations = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not callable(getattr(pl_module, "token_logits", None)):
            raise ConfigError(
                f"SampleText needs token_logits(tokens) on {type(pl_module).__name__}: of tokens (rows, sequence), "
                "logits (rows, sequence, vocab). Write it, or leave the callback out."
            )
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(type(data), "tokenizer"):
            raise ConfigError(
                "SampleText needs a data module with a tokenizer. Give trainer.fit(datamodule=...) one, or leave the "
                "callback out."
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every_n_validations:
            return
        modes = {part: part.training for part in pl_module.modules()}
        pl_module.eval()
        try:
            self.samples = [self._continue(trainer, pl_module, prompt) for prompt in self.prompts]
        finally:
            for part, training in modes.items():
                part.training = training
        for prompt, text in zip(self.prompts, self.samples, strict=True):
            trainer.print(f"{prompt!r} -> {text!r}")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                rows = [list(row) for row in zip(self.prompts, self.samples, strict=True)]
                logger.log_text("samples", columns=["prompt", "text"], data=rows, step=trainer.global_step)

    def _continue(self, trainer: L.Trainer, module: Any, prompt: str) -> str:
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = torch.tensor([tokenizer.encode(prompt).ids], device=module.device)
        # A strategy that splits the model knows how a rank computes with its part.
        evaluate = getattr(trainer.strategy, "evaluate", None)

        def token_logits(tokens: Tensor) -> Tensor:
            logits: Tensor = module.token_logits(tokens)
            return logits

        def logits(tokens: Tensor) -> Tensor:
            if evaluate is not None:
                return evaluate(token_logits, tokens)
            with torch.no_grad():
                return token_logits(tokens)

        written = generate_tokens(
            logits,
            tokens,
            count=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=trainer.global_step,
            longest=longest_input(module),
            agree=lambda chosen: trainer.strategy.broadcast(chosen),
        )
        return str(tokenizer.decode(written[0].tolist()))
