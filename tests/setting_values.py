"""Of every setting of every recipe, values that work and that do not, written down apart from what checks them."""

from __future__ import annotations

from dataclasses import dataclass

RECIPES = ("digits_mlp", "stdlib_gpt", "stdlib_llama_hf")


@dataclass(frozen=True)
class Values:
    """Of one setting: overrides that work, and that do not, as they are typed."""

    good: tuple[str, ...]
    bad: tuple[str, ...]


_NO_NUMBER = ("x", "[1]", "{a: 1}", "true", "''")


def whole(least: int, *good: int, null: bool = False, words: tuple[str, ...] = (), most: int | None = None) -> Values:
    outside = [str(least - 1), str(least - 10**9)] + ([str(most + 1)] if most is not None else [])
    return _values(
        [str(n) for n in good or (least, least + 1)], [*outside, "1.5", "nan", "inf", *_NO_NUMBER], null, words
    )


def real(good: tuple[str, ...], outside: tuple[str, ...], *, null: bool = False) -> Values:
    return _values([*good], [*outside, "nan", "-inf", *_NO_NUMBER], null, ())


def flag(*, null: bool = False) -> Values:
    return _values(["true", "false"], ["5", "1.5", "x", "[true]", "{a: 1}", "''"], null, ())


def text(*good: str, null: bool = False, bad: tuple[str, ...] = ()) -> Values:
    return _values([*good], ["5", "1.5", "true", "[a]", "{a: 1}", *bad], null, ())


def choice(*options: str, null: bool = False) -> Values:
    return _values([*options], [options[0] + "x", options[-1][:-1] + "q", "5", "[a]", "{a: 1}", "true"], null, ())


def _values(good: list[str], bad: list[str], null: bool, words: tuple[str, ...]) -> Values:
    return Values((*good, *words, *(["null"] if null else [])), (*bad, *([] if null else ["null"])))


_SHARE = real(("0.1", "0.5"), ("0", "1", "1.5", "-0.1", "inf"))
_LIMIT = real(("1", "3", "0.5", "1.0"), ("-1", "1.5", "-0.5", "inf"), null=True)

EVERY_RUN: dict[str, Values] = {
    "name": text("mine", "a-b", bad=("''", "a/b")),
    "seed": whole(0, 0, 7, 2**32 - 1, most=2**32 - 1),
    "output_dir": text("runs", "'my runs'", bad=("''",)),
    "run_dir": text("here", null=True, bad=("''",)),
    "resume": text("auto", null=True, bad=("nowhere", "''")),
    "layout": text(
        null=True, bad=("dp0", "zero4x2", "dp2-dp2", "dp2-hsdp2x2", "tp2@gpipe", "pp2@zigzag", "dp", "2", "''")
    ),
    "metric": text("val_loss", "train_loss", bad=("''", "' '")),
    "strategy.data_parallel_size": whole(1, 1, words=("auto",)),
    "strategy.data_parallel_replicas": whole(1, 1),
    "strategy.tensor_parallel_size": whole(1, 1),
    "strategy.pipeline_parallel_size": whole(1, 1),
    "strategy.zero_stage": whole(0, 0, 1, 2, 3, most=3),
    "strategy.schedule": choice("gpipe", "1f1b", "interleaved1f1b"),
    "strategy.num_microbatches": whole(1, 1, 2, null=True),
    "strategy.process_group_backend": choice("gloo", null=True),
    "strategy.timeout_seconds": real(("60", "1800", "0.5"), ("0", "-1", "inf")),
    "strategy.loss_parallel": flag(),
    "strategy.sequence_parallel": flag(),
    "strategy.nonfinite": choice("error", "skip", "ignore"),
    "strategy.replay_every_n_steps": whole(0, 0, 1000),
    "strategy.async_checkpoint": flag(),
    "strategy.storage_options": Values(("null", "{anon: true}"), ("5", "x", "[a]", "true")),
    "strategy.initial_weights": Values(("null",), ("nowhere", "5", "[a]", "{a: 1}", "true")),
    "trainer.accelerator": text("cpu", "auto", bad=("abacus", "''")),
    "trainer.devices": Values(("1",), ("0", "-2", "1.5", "x", "nan", "{a: 1}", "[]", "true", "''")),
    "trainer.num_nodes": whole(1, 1),
    "trainer.precision": Values(
        ("32-true", "64-true", "bf16-mixed", "bf16-true"), ("12", "x", "[32]", "32-tru", "true")
    ),
    "trainer.max_epochs": whole(-1, 0, 1, 10, null=True),
    "trainer.max_steps": whole(-1, 0, 1, 100),
    "trainer.val_check_interval": real(("1", "50"), ("0", "-1", "1.5", "-0.5", "inf"), null=True),
    "trainer.check_val_every_n_epoch": whole(1, 1, 2, null=True),
    "trainer.limit_train_batches": _LIMIT,
    "trainer.limit_val_batches": _LIMIT,
    "trainer.log_every_n_steps": whole(1, 1, 10, null=True),
    "trainer.accumulate_grad_batches": whole(1, 1, 2),
    "trainer.gradient_clip_val": real(("0.5", "1", "10.0"), ("0", "-1.0", "inf"), null=True),
    "trainer.gradient_clip_algorithm": choice("norm", "value", null=True),
    "trainer.num_sanity_val_steps": whole(-1, -1, 0, 2, null=True),
    "trainer.enable_progress_bar": flag(null=True),
    "trainer.enable_model_summary": flag(null=True),
    "trainer.deterministic": Values(("true", "false", "warn", "null"), ("perhaps", "5", "[true]", "{a: 1}", "''")),
    "callbacks.checkpoint.dirpath": text("there", null=True, bad=("''",)),
    "callbacks.checkpoint.filename": text("'{epoch}'", null=True, bad=("/etc/x", "../x", "below/x")),
    "callbacks.checkpoint.monitor": text("step", "val_loss"),
    "callbacks.checkpoint.mode": choice("min", "max"),
    "callbacks.checkpoint.save_top_k": whole(-1, -1, 0, 1, 3),
    "callbacks.checkpoint.save_last": Values(("true", "false", "link", "null"), ("maybe", "5", "[true]", "{a: 1}")),
    "callbacks.checkpoint.every_n_train_steps": whole(1, 1, 50, null=True),
    "callbacks.checkpoint.save_on_exception": flag(),
    "callbacks.stragglers.factor": real(("1.5", "2"), ("1", "0", "-1.5")),
    "callbacks.stragglers.window": whole(1, 1, 8),
    "callbacks.learning_rate.logging_interval": choice("step", "epoch", null=True),
    "callbacks.gradient_norm.norm_type": real(("1", "2.0", "inf"), ("0", "-1.0")),
    "callbacks.progress.refresh_rate": whole(0, 0, 1, 10),
}
WANDB: dict[str, Values] = {
    "logger.save_dir": text("there", bad=("''",)),
    "logger.project": text("mine", bad=("''", "' '", "a/b")),
    "logger.name": text("mine", null=True),
    "logger.mode": choice("offline", "disabled", null=True),
    "logger.entity": text("we", null=True),
    "logger.group": text("sweep", null=True),
    "logger.tags": Values(("null", "[a,b]", "[]"), ("5", "a", "{a: 1}", "[1]", "true")),
}
LANGUAGE_MODEL: dict[str, Values] = {
    "model.learning_rate": real(("1e-3", "1"), ("0", "-1", "inf")),
    "model.weight_decay": real(("0", "0.1"), ("-0.1", "inf")),
    "model.betas": Values(
        ("[0.9,0.99]", "[0,0.5]"), ("0.9", "[0.9]", "[0.9,1]", "[0.9,0.5,0.9]", "[-1,0]", "[x,y]", "null")
    ),
    "model.warmup_steps": whole(0, 0, 10),
    "model.max_steps": whole(1, 100, null=True),
    "model.min_learning_rate_ratio": real(("0", "0.1", "1"), ("-0.1", "1.1", "inf")),
}
TEXT: dict[str, Values] = {
    "data.files": Values(("null",), ("5", "x", "[5]", "{a: 1}", "[nowhere.txt]", "['nowhere/*.txt']", "[]", "true")),
    "data.max_bytes": whole(1, 1000000, null=True),
    "data.vocab_size": whole(257, 300, 4096),
    "data.sequence_length": whole(1, 32, 64),
    "data.global_batch_size": whole(1, 32, 64),
    "data.validation_fraction": _SHARE,
    "data.num_workers": whole(0, 0, 2),
    "data.shuffle": flag(),
    "data.seed": whole(0, 0, 3),
    "data.cache_dir": text("there", null=True, bad=("''",)),
    "data.tokenizer": text(null=True, bad=("nowhere", "nowhere/tokenizer.json")),
}
OF_RECIPE: dict[str, dict[str, Values]] = {
    "digits_mlp": {
        "data.global_batch_size": whole(1, 16, 64),
        "data.validation_fraction": _SHARE,
        "data.num_workers": whole(0, 0, 2),
        "data.shuffle": flag(),
        "data.seed": whole(0, 0, 3),
        "model.hidden_size": whole(1, 8, 64),
        "model.num_hidden_layers": whole(1, 1, 3),
        "model.optimizer": choice("adamw", "sgd"),
        "model.learning_rate": real(("1e-3", "1"), ("0", "-1", "inf")),
        "model.weight_decay": real(("0", "0.1"), ("-1", "inf")),
    },
    "stdlib_gpt": {
        **TEXT,
        **LANGUAGE_MODEL,
        "model.config.vocab_size": whole(1, 5000),
        "model.config.hidden_size": Values(("64", "128", "256"), ("0", "-4", "130", "4", "1.5", *_NO_NUMBER, "null")),
        "model.config.num_layers": whole(1, 4, 6),
        "model.config.num_heads": Values(("4", "8"), ("0", "3", "128", "1.5", *_NO_NUMBER, "null")),
        "model.config.num_kv_heads": Values(("1", "2", "4", "null"), ("0", "3", "8", "1.5", *_NO_NUMBER)),
        "model.config.ffn_size": whole(1, 256, null=True),
        "model.config.max_sequence_length": whole(1, 128, 1024),
        "model.config.rope_theta": real(("500.0", "1000000"), ("0", "1", "-1", "inf")),
        "model.config.norm_eps": real(("1e-6",), ("0", "-1e-6", "inf")),
        "model.config.dropout": real(("0.0", "0.1"), ("1", "-0.1", "inf")),
        "model.config.tie_embeddings": flag(),
    },
    "stdlib_llama_hf": {
        **TEXT,
        **LANGUAGE_MODEL,
        "model.config.model_type": text("llama", "mistral", bad=("lama", "null")),
        "model.config.vocab_size": whole(1, 5000),
        "model.config.hidden_size": Values(("64", "128"), ("0", "-4", "130", "1.5", *_NO_NUMBER, "null")),
        "model.config.intermediate_size": whole(1, 128, 256),
        "model.config.num_hidden_layers": whole(1, 2, 4),
        "model.config.num_attention_heads": Values(("4", "8"), ("0", "3", "1.5", *_NO_NUMBER)),
        "model.config.num_key_value_heads": Values(("1", "2", "4"), ("0", "3", "1.5", *_NO_NUMBER)),
        "model.config.max_position_embeddings": whole(1, 512, 1024),
        "model.config.tie_word_embeddings": flag(),
        "model.path": Values(("null",), ("nowhere", "5", "[a]")),
        "model.loss": choice("own", "labels"),
    },
}


def fields_of(recipe: str) -> dict[str, Values]:
    return {**EVERY_RUN, **WANDB, **OF_RECIPE[recipe]}
