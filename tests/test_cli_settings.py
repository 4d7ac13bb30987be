"""Every setting of every recipe refuses a bad value by name, quickly, and before anything is written or started."""

import math
import time

import pytest
import yaml

from lightning_3d.cli import main
from lightning_3d.cli.check import check_layout
from lightning_3d.cli.config import compose_recipe, groups, recipes
from lightning_3d.cli.job import prepare
from lightning_3d.errors import ConfigError, LayoutError

LANGUAGE_MODEL = {
    "model.learning_rate": "0",
    "model.weight_decay": "-0.1",
    "model.betas": "[0.9,1.5]",
    "model.warmup_steps": "-1",
    "model.max_steps": "0",
    "model.min_learning_rate_ratio": "2",
}
TEXT = {
    "data.files": "5",
    "data.max_bytes": "0",
    "data.vocab_size": "3",
    "data.sequence_length": "0",
    "data.global_batch_size": "0",
    "data.validation_fraction": "1.0",
    "data.num_workers": "-1",
    "data.shuffle": "5",
    "data.seed": "-1",
    "data.cache_dir": "5",
}
EVERY_RUN = {
    "name": "a/b",
    "seed": "-1",
    "output_dir": "''",
    "run_dir": "5",
    "resume": "nowhere",
    "layout": "zero9x2",
    "metric": "5",
    "strategy.data_parallel_size": "3",
    "strategy.data_parallel_replicas": "0",
    "strategy.tensor_parallel_size": "0",
    "strategy.pipeline_parallel_size": "x",
    "strategy.zero_stage": "4",
    "strategy.schedule": "1f2b",
    "strategy.num_microbatches": "0",
    "strategy.process_group_backend": "mpi",
    "strategy.timeout_seconds": "0",
    "strategy.loss_parallel": "5",
    "strategy.sequence_parallel": "5",
    "strategy.nonfinite": "5",
    "strategy.replay_every_n_steps": "-1",
    "trainer.accelerator": "abacus",
    "trainer.devices": "0",
    "trainer.num_nodes": "0",
    "trainer.precision": "12",
    "trainer.max_epochs": "-2",
    "trainer.max_steps": "many",
    "trainer.val_check_interval": "0",
    "trainer.check_val_every_n_epoch": "0",
    "trainer.limit_train_batches": "1.5",
    "trainer.limit_val_batches": "-1",
    "trainer.log_every_n_steps": "-1",
    "trainer.accumulate_grad_batches": "0",
    "trainer.gradient_clip_val": "-1.0",
    "trainer.gradient_clip_algorithm": "both",
    "trainer.num_sanity_val_steps": "-2",
    "trainer.enable_progress_bar": "5",
    "trainer.enable_model_summary": "5",
    "trainer.deterministic": "perhaps",
    "callbacks.checkpoint.dirpath": "5",
    "callbacks.checkpoint.filename": "5",
    "callbacks.checkpoint.monitor": "5",
    "callbacks.checkpoint.mode": "median",
    "callbacks.checkpoint.save_top_k": "-2",
    "callbacks.checkpoint.save_last": "maybe",
    "callbacks.checkpoint.every_n_train_steps": "0",
    "callbacks.learning_rate.logging_interval": "hour",
    "callbacks.gradient_norm.norm_type": "0",
    "callbacks.progress.refresh_rate": "-1",
    "logger.save_dir": "5",
    "logger.project": "5",
    "logger.name": "5",
    "logger.mode": "away",
    "logger.entity": "5",
    "logger.group": "5",
    "logger.tags": "5",
}
BAD_VALUES = {
    "stdlib_gpt": {
        **EVERY_RUN,
        **TEXT,
        **LANGUAGE_MODEL,
        "model.config.vocab_size": "0",
        "model.config.hidden_size": "130",
        "model.config.num_layers": "0",
        "model.config.num_heads": "3",
        "model.config.num_kv_heads": "3",
        "model.config.ffn_size": "0",
        "model.config.max_sequence_length": "0",
        "model.config.rope_theta": "0",
        "model.config.norm_eps": "0",
        "model.config.dropout": "1",
        "model.config.tie_embeddings": "5",
    },
    "stdlib_llama_hf": {
        **TEXT,
        **LANGUAGE_MODEL,
        "model.config.model_type": "lama",
        "model.config.vocab_size": "x",
        "model.config.hidden_size": "x",
        "model.config.intermediate_size": "x",
        "model.config.num_hidden_layers": "x",
        "model.config.num_attention_heads": "x",
        "model.config.num_key_value_heads": "x",
        "model.config.max_position_embeddings": "x",
        "model.config.tie_word_embeddings": "x",
        "model.path": "nowhere",
        "model.loss": "theirs",
    },
    "digits_mlp": {
        "data.global_batch_size": "0",
        "data.validation_fraction": "0",
        "data.num_workers": "-1",
        "data.shuffle": "5",
        "data.seed": "-1",
        "model.hidden_size": "0",
        "model.num_hidden_layers": "0",
        "model.optimizer": "adam",
        "model.learning_rate": "-1",
        "model.weight_decay": "-1",
    },
}
CASES = [(recipe, key, value) for recipe, table in BAD_VALUES.items() for key, value in table.items()]


def leaves(node: dict, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in node.items():
        if key != "_target_":
            found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return found


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Times below are beyond the imports, which the first call does."""
    main(["train", "recipe=digits_mlp", "seed=-1"])


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("recipe", "key", "value"), CASES, ids=lambda value: str(value))
def test_bad_value_is_refused_by_name_with_a_way_out(recipe, key, value, capsys, in_empty_folder):
    # Of the processor: what else the machine does is not this program's time.
    start = time.process_time()
    assert main(["train", f"recipe={recipe}", f"{key}={value}"]) == 2
    assert time.process_time() - start < 2
    captured = capsys.readouterr()
    assert captured.out == ""
    message = captured.err.strip()
    assert message.startswith("error: ") and "\n" not in message
    assert key.rpartition(".")[2] in message
    assert any(
        way in message.lower()
        for way in ("set ", "would do", "did you mean", "must be", "usual", "leave", "write", "recipe has")
    )
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("recipe", BAD_VALUES)
def test_every_setting_of_the_recipe_has_a_bad_value_here(recipe):
    tested = set(BAD_VALUES[recipe]) | set(EVERY_RUN)
    assert leaves(compose_recipe(recipe)) == tested


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_stepz=3", "there is no setting trainer.max_stepz. Did you mean trainer.max_steps?"),
        ("max_steps=3", "Did you mean model.max_steps or trainer.max_steps?"),
        ("model.config.hiden_size=3", "Did you mean hidden_size?"),
        ("stratagy.zero_stage=1", "Did you mean strategy.zero_stage?"),
        ("+trainer.max_stepz=3", "there is no setting trainer.max_stepz"),
        ("+callbacks.mine._target_=nothing.Here", "callbacks.mine._target_='nothing.Here' cannot be imported"),
        ("strategy=zero4", "strategy='zero4' is no option of strategy. Did you mean zero3?"),
        ("recipe=stdlib_gtp", "Did you mean stdlib_gpt?"),
        ("recipe=none.yaml", "there is no such file"),
        ("trainer.max_steps=1,2", "gives several values"),
        ("trainer.max_steps", "write key=value"),
        ("--multi", "there is no option --multi"),
        ("trainer.strategy=ddp", "trainer.strategy is set by the settings under strategy"),
        ("model.config.vocab_size=${data.nothing}", "data.nothing"),
        ("~model.config", "model.config has no value"),
        ("trainer.num_nodes=2", "torchrun"),
        ("layout=zero3x3", "global_batch_size=32 does not divide by the data-parallel size 3"),
        ("trainer.accelerator=gpu", "Set trainer.accelerator=cpu"),
    ],
)
def test_mistake_is_told_in_one_line(override, message, capsys):
    assert main(["train", override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_layout_and_its_parts_cannot_both_be_given():
    with pytest.raises(ConfigError, match=r"layout=zero3x2 sets strategy.zero_stage already"):
        prepare(["layout=zero3x2", "strategy.zero_stage=1"])


def test_layout_and_another_number_of_devices_do_not_fit(capsys):
    assert main(["train", "layout=zero3x2", "trainer.devices=4"]) == 2
    assert "Set data_parallel_size=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dp2", {"zero_stage": 0, "data_parallel_size": 2, "data_parallel_replicas": 1}),
        ("zero1x2", {"zero_stage": 1, "data_parallel_size": 2}),
        ("hsdp2x2", {"zero_stage": 3, "data_parallel_size": 4, "data_parallel_replicas": 2}),
        ("single", {"data_parallel_size": 1}),
        ("zero3x2-tp2-pp2", {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("pp4@gpipe", {"data_parallel_size": 1, "pipeline_parallel_size": 4, "schedule": "gpipe"}),
    ],
)
def test_layout_sets_the_strategy_and_the_number_of_processes(name, sizes):
    _, _, config, _ = prepare([f"layout={name}"])
    assert config["strategy"].items() >= sizes.items()
    axes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert config["trainer"]["devices"] == math.prod(sizes.get(axis, 1) for axis in axes)


@pytest.mark.parametrize(("devices", "name"), [(4, "tp2-pp2"), (8, "zero3x2-tp2-pp2"), (16, "zero3x4-tp2-pp2")])
def test_default_recipe_shards_over_more_processes_than_it_splits_over(devices, name):
    _, _, config, _ = prepare([f"trainer.devices={devices}"])
    assert check_layout(config, world_size=devices).name == name


def test_argument_that_the_recipe_does_not_set_can_be_given_all_the_same():
    _, _, config, _ = prepare(["trainer.fast_dev_run=true", "callbacks.checkpoint.verbose=true"])
    assert config["trainer"]["fast_dev_run"] is True
    assert config["callbacks"]["checkpoint"]["verbose"] is True


def test_recipe_that_needs_a_value_says_how_to_write_it(capsys):
    assert main(["train", "recipe=finetune_hf", "--print-config"]) == 2
    assert "write model.path=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "finetune_hf"])
@pytest.mark.parametrize("option", [f"{group}={one}" for group in ("strategy", "logger") for one in groups()[group]])
def test_every_option_makes_a_config_that_passes(recipe, option, capsys):
    # Four processes suit every option.
    assert main(["train", f"recipe={recipe}", option, "trainer.devices=4", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert "${" not in str(config)


def test_recipe_of_ones_own_is_taken_from_a_file(in_empty_folder):
    (in_empty_folder / "mine.yaml").write_text(
        "defaults: [base, strategy: zero1, model: digits_mlp, data: digits, trainer: default, callbacks: default,"
        " logger: none, _self_]\nname: mine\nmodel: {hidden_size: 8}\n"
    )
    recipe, _, config, folder = prepare(["recipe=mine.yaml"])
    assert (recipe, config["model"]["hidden_size"], config["strategy"]["zero_stage"]) == ("mine.yaml", 8, 1)
    assert folder.name.startswith("mine-")


def test_help_names_every_recipe_group_and_option(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in [*recipes(), *(f"{group}={option}" for group, options in groups().items() for option in options)]:
        assert f"  {name} " in text
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


def test_unknown_command_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_layout_that_cannot_be_is_an_error_of_the_layout():
    with pytest.raises(LayoutError):
        prepare(["layout=dp2-dp2"])
