"""LightningModules that nobody wrote with a pipeline in mind."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d.models.huggingface import build_config, build_model

VOCAB, CLASSES = 32, 3


class Sentences(Dataset):
    """Nested samples of different lengths, with strings and None."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 9, (), generator=generator))
        tokens = torch.randint(1, VOCAB, (length,), generator=generator)
        return {"text": {"tokens": tokens}, "label": index % CLASSES, "name": f"sample {index}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = nn.utils.rnn.pad_sequence([sample["text"]["tokens"] for sample in samples], batch_first=True)
    return {
        "text": {"tokens": tokens, "mask": tokens == 0},
        "labels": torch.tensor([sample["label"] for sample in samples]),
        "meta": [sample["name"] for sample in samples],
        "nothing": None,
    }


class EncoderBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(hidden)
        hidden = hidden + self.attention(normed, normed, normed, key_padding_mask=mask, need_weights=False)[0]
        return hidden + self.mlp(self.norm2(hidden))


class Encoder(L.LightningModule):
    """Blocks in the LightningModule itself, a padding mask, nested batches, groups, a schedule, a dict as the loss."""

    def __init__(self, *, dropout: float = 0.0, noise: float = 0.0, lazy: bool = False) -> None:
        super().__init__()
        self.dropout, self.noise, self.built = dropout, noise, False
        if not lazy:
            self.configure_model()

    def configure_model(self) -> None:
        if self.built:
            return
        self.built, width = True, 16
        self.embedding = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = nn.ModuleList(EncoderBlock(width, self.dropout) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))
        self.accuracy = MulticlassAccuracy(num_classes=CLASSES)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        pooled = self.norm(hidden).masked_fill(mask[..., None], 0.0).sum(1) / (~mask).sum(1, keepdim=True)
        return self.head(pooled) / self.temperature

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        labels = batch.pop("labels")
        assert batch["nothing"] is None and all(isinstance(name, str) for name in batch["meta"])
        tokens = batch["text"]["tokens"]
        if self.noise:
            tokens = torch.where(torch.rand(tokens.shape) < self.noise, 1, tokens)
        logits = self(tokens, batch["text"]["mask"])
        loss = F.cross_entropy(logits, labels, weight=self.weights, reduction="none").mean()
        self.log_dict({"train_loss": loss, "train_mean": logits.mean()}, sync_dist=True, batch_size=len(labels))
        self.log("largest", logits.detach().max(), reduce_fx="max", sync_dist=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits = self(batch["text"]["tokens"], batch["text"]["mask"])
        self.accuracy(logits, batch["labels"])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("val_loss", F.cross_entropy(logits, batch["labels"]), sync_dist=True, batch_size=len(logits))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        return {"logits": self(batch["text"]["tokens"], batch["text"]["mask"]), "kind": "class"}

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}], lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class MLP(L.LightningModule):
    """A Sequential of unlike layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip


class HuggingFace(L.LightningModule):
    """A causal language model of transformers, with its own loss or ours."""

    def __init__(self, kind: str, *, labels: bool) -> None:
        super().__init__()
        self.labels = labels
        self.model: Any = build_model(build_config(HF_CONFIGS[kind]))

    def training_step(self, rows: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.labels:
            loss = self.model(input_ids=rows, labels=rows).loss
        else:
            logits = self.model(input_ids=rows[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
