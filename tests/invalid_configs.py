"""Makes configurations that cannot work, and ones that can, by rules from a seed.

A rule gives a setting a bad value (`setting_values`), or breaks names, syntax, files, or what settings mean to one
another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from setting_values import EVERY_RUN, OF_RECIPE, RECIPES, WANDB, Values, fields_of

GROUPS = {
    "strategy": ("3d", "dp", "pp", "tp", "tp2-pp2", "zero1", "zero2", "zero3"),
    "model": ("digits_mlp", "gpt", "llama_hf"),
    "data": ("digits", "text"),
    "logger": ("csv", "none", "wandb"),
}


@dataclass(frozen=True)
class Case:
    """Arguments of `lightning-3d train`, or of `ThreeDStrategy` in a Trainer of so many devices.

    Args:
        told: what the error must say: the setting, and where it helps its value or its name as it should be.
    """

    rule: str
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    devices: int = 0
    told: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.rule}: {' '.join(self.arguments) or f'{self.settings} on {self.devices}'}"


# ------------------------------------------------------------------ rules

Rule = Callable[[random.Random], Case]
RULES: dict[str, Rule] = {}


def rule(make: Callable[[random.Random], Case]) -> Callable[[random.Random], Case]:
    RULES[make.__name__] = make
    return make


def _any_field(rng: random.Random) -> tuple[str, str, Values]:
    recipe = rng.choice(RECIPES)
    fields = fields_of(recipe)
    key = rng.choice(sorted(fields))
    return recipe, key, fields[key]


def _cli(rule: str, *arguments: str, told: tuple[str, ...], recipe: str | None = "digits_mlp") -> Case:
    return Case(rule, (*([f"recipe={recipe}"] if recipe else []), *arguments), told=told)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def misspell(rng: random.Random, word: str) -> str:
    """The word with a letter lost, doubled or swapped with the next."""
    while True:
        at = rng.randrange(1, len(word))
        before, here, after = word[: at - 1], word[at - 1], word[at]
        rest = word[at + 1 :]
        made = rng.choice([before + here + rest, before + here + here + after + rest, before + after + here + rest])
        if made != word and made.isidentifier():
            return made


@rule
def bad_value(rng: random.Random) -> Case:
    return _bad(rng, *_any_field(rng))


def bad(recipe: str, key: str, value: str) -> Case:
    return _cli("bad_value", f"{key}={value}", told=(_last(key),), recipe=recipe)


def _bad(rng: random.Random, recipe: str, key: str, values: Values) -> Case:
    return bad(recipe, key, rng.choice(values.bad))


@rule
def bad_value_among_good_ones(rng: random.Random) -> Case:
    recipe, key, values = _any_field(rng)
    others = [("trainer.log_every_n_steps", "5"), ("data.seed", "1"), ("metric", "train_loss"), ("name", "mine")]
    good = [f"{other}={value}" for other, value in rng.sample(others, 2) if other != key]
    arguments = [*good, f"{key}={rng.choice(values.bad)}"]
    rng.shuffle(arguments)
    return _cli("bad_value_among_good_ones", *arguments, told=(_last(key),), recipe=recipe)


@rule
def misspelt_setting(rng: random.Random) -> Case:
    recipe, key, values = _any_field(rng)
    parent, _, name = key.rpartition(".")
    wrong = f"{parent}.{misspell(rng, name)}".lstrip(".")
    return _cli(
        "misspelt_setting", f"{wrong}={rng.choice(values.good or values.bad)}", told=(name, _last(wrong)), recipe=recipe
    )


@rule
def misspelt_group(rng: random.Random) -> Case:
    recipe, key, values = _any_field(rng)
    while "." not in key:
        recipe, key, values = _any_field(rng)
    group, _, rest = key.partition(".")
    return _cli("misspelt_group", f"{misspell(rng, group)}.{rest}={values.good[0]}", told=(f"{group}.",), recipe=recipe)


@rule
def setting_without_its_group(rng: random.Random) -> Case:
    recipe, key, values = _any_field(rng)
    while "." not in key or _last(key) in EVERY_RUN:
        recipe, key, values = _any_field(rng)
    return _cli("setting_without_its_group", f"{_last(key)}={values.good[0]}", told=(f".{_last(key)}",), recipe=recipe)


@rule
def unknown_option(rng: random.Random) -> Case:
    group = rng.choice(sorted(GROUPS))
    option = rng.choice(GROUPS[group])
    wrong = rng.choice([option + "x", option[0] + option, "none_such"])
    return _cli("unknown_option", f"{group}={wrong}", told=(group, wrong, *([option] if wrong != "none_such" else [])))


@rule
def unknown_recipe(rng: random.Random) -> Case:
    name = rng.choice(RECIPES)
    wrong = rng.choice([misspell(rng, name), f"{name}.yaml", f"{rng.randrange(99)}/{name}.yml", "''"])
    return _cli("unknown_recipe", f"recipe={wrong}", told=("recipe", wrong), recipe=None)


@rule
def unknown_class(rng: random.Random) -> Case:
    path, target = rng.choice(
        [
            ("model", "lightning_3d.models.digits.DigitsMLP"),
            ("data", "lightning_3d.data.digits.DigitsDataModule"),
            ("trainer", "lightning.Trainer"),
            ("strategy", "lightning_3d.ThreeDStrategy"),
            ("callbacks.checkpoint", "lightning.pytorch.callbacks.ModelCheckpoint"),
            ("callbacks.gradient_norm", "lightning_3d.callbacks.GradientNorm"),
        ]
    )
    module, _, name = target.rpartition(".")
    wrong = rng.choice([f"{module}.{misspell(rng, name)}", f"{misspell(rng, module.split('.')[0])}.{name}", name])
    return _cli("unknown_class", f"{path}._target_={wrong}", told=(path, wrong))


@rule
def unreadable_override(rng: random.Random) -> Case:
    recipe, key, _ = _any_field(rng)
    line = rng.choice(
        [key, f"{key}=[1,2", f"{key}={{a:1", f"{key}='x", f"{key}=[1}}", f"{key}=a]", f"{key}:5", f"={key}"]
    )
    return _cli("unreadable_override", line, told=(line,), recipe=recipe)


@rule
def several_values(rng: random.Random) -> Case:
    recipe, key, _ = _any_field(rng)
    line = rng.choice([f"{key}=1,2", f"{key}=range(3)", f"{key}=choice(a,b)", f"{key}=interval(0,1)", f"{key}=glob(*)"])
    return _cli("several_values", line, told=(line, "-m"), recipe=recipe)


@rule
def unknown_option_of_the_command(rng: random.Random) -> Case:
    word = rng.choice(["--config", "-c", "--dry-run", "--cfg", "--resume", "-n", "--gpus=2", "--multi", "--print"])
    return _cli("unknown_option_of_the_command", word, told=(word,))


@rule
def hydras_own_setting(rng: random.Random) -> Case:
    line = rng.choice(["hydra.run.dir=x", "hydra/launcher=basic", "hydra.job.name=y", "hydra/sweeper=optuna"])
    return _cli("hydras_own_setting", line, told=(line,))


@rule
def reference_to_nothing(rng: random.Random) -> Case:
    recipe, key, _ = _any_field(rng)
    inside = rng.choice(
        ["nothing", "data.nothing", "trainer.max_stepz", "oc.env:NOBODY_SETS_THIS_VARIABLE", "no_resolver:1"]
    )
    line = f"{key}=${{{inside}}}"
    return _cli("reference_to_nothing", line, told=(_last(key), inside.partition(":")[2] or inside), recipe=recipe)


@rule
def setting_taken_away(rng: random.Random) -> Case:
    recipe = rng.choice(RECIPES)
    required = [
        "name",
        "seed",
        "output_dir",
        "run_dir",
        "resume",
        "layout",
        "metric",
        "trainer",
        "data",
        "model",
        "strategy",
    ]
    required += ["logger.save_dir"] + ({"stdlib_gpt": ["model.config"]}.get(recipe) or [])
    required += ["callbacks", "logger"]
    key = rng.choice(required)
    return _cli("setting_taken_away", f"~{key}", told=(key,), recipe=recipe)


@rule
def setting_given_twice(rng: random.Random) -> Case:
    recipe, key, values = _any_field(rng)
    while len(values.good) < 2:
        recipe, key, values = _any_field(rng)
    first, second = rng.sample(values.good, 2)
    return _cli(
        "setting_given_twice",
        f"{key}={first}",
        f"{key}={second}",
        told=(f"{key}={first}", f"{key}={second}"),
        recipe=recipe,
    )


@rule
def argument_of_the_trainer_with_a_group_of_its_own(rng: random.Random) -> Case:
    key = rng.choice(["strategy", "callbacks", "logger", "plugins"])
    line = f"{rng.choice(['', '+', '++'])}trainer.{key}={rng.choice(['ddp', 'true', '[a]', 'null'])}"
    return _cli("argument_of_the_trainer_with_a_group_of_its_own", line, told=(f"trainer.{key}",))


@rule
def world_of_another_size(rng: random.Random) -> Case:
    sizes = {axis: rng.choice([1, 2, 3, 4]) for axis in ("data", "tensor", "pipeline")}
    product = sizes["data"] * sizes["tensor"] * sizes["pipeline"]
    devices = rng.choice([n for n in range(1, 17) if n != product])
    settings = [f"strategy.{axis}_parallel_size={size}" for axis, size in sizes.items()]
    told = ("data_parallel_size", str(product), str(devices))
    return _cli("world_of_another_size", *settings, f"trainer.devices={devices}", told=told)


@rule
def processes_that_do_not_divide(rng: random.Random) -> Case:
    axis = rng.choice(["tensor", "pipeline"])
    size = rng.choice([2, 3, 4, 5])
    devices = rng.choice([n for n in range(1, 17) if n % size])
    settings = [f"strategy.{axis}_parallel_size={size}", f"trainer.devices={devices}"]
    return _cli("processes_that_do_not_divide", *settings, told=(f"{axis}_parallel_size", str(devices)))


@rule
def two_automatic_sizes(rng: random.Random) -> Case:
    axes = rng.sample(["data", "tensor", "pipeline"], 2)
    settings = [f"strategy.{axis}_parallel_size=auto" for axis in axes]
    rest = [] if "data" in axes else ["strategy.data_parallel_size=1"]
    told = tuple(f"{axis}_parallel_size" for axis in axes)
    return _cli("two_automatic_sizes", *settings, *rest, f"trainer.devices={rng.choice([2, 4])}", told=told)


@rule
def replicas_that_do_not_divide(rng: random.Random) -> Case:
    replicas = rng.choice([3, 4, 5, 6, 7])
    devices = rng.choice([n for n in (2, 4, 8) if n % replicas])
    stage = rng.choice([1, 2, 3])
    settings = [
        f"strategy.data_parallel_replicas={replicas}",
        f"strategy.zero_stage={stage}",
        f"trainer.devices={devices}",
    ]
    return _cli("replicas_that_do_not_divide", *settings, told=(f"data_parallel_replicas={replicas}",))


@rule
def replicas_without_shards(rng: random.Random) -> Case:
    devices = rng.choice([4, 8])
    settings = ["strategy.zero_stage=0", "strategy.data_parallel_replicas=2", f"trainer.devices={devices}"]
    if rng.random() < 0.5:
        settings.append(f"strategy.data_parallel_size={devices}")
    return _cli("replicas_without_shards", *settings, told=("data_parallel_replicas=2", "zero_stage=0"))


@rule
def layout_and_its_parts(rng: random.Random) -> Case:
    layout = rng.choice(["dp2", "zero3x2", "hsdp2x2", "tp2", "pp2", "zero1x2-tp2", "single"])
    key = rng.choice(
        ["zero_stage=2", "data_parallel_size=2", "tensor_parallel_size=2", "pipeline_parallel_size=1", "schedule=gpipe"]
    )
    arguments = [f"layout={layout}", f"strategy.{key}"]
    rng.shuffle(arguments)
    return _cli("layout_and_its_parts", *arguments, told=(f"layout={layout}", f"strategy.{key.split('=')[0]}"))


@rule
def layout_and_other_processes(rng: random.Random) -> Case:
    layout, size = rng.choice([("dp2", 2), ("zero3x4", 4), ("hsdp2x2", 4), ("tp2", 2), ("pp2", 2), ("dp2-tp2-pp2", 8)])
    devices = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if n != size])
    arguments = [f"layout={layout}", f"trainer.devices={devices}"]
    return _cli("layout_and_other_processes", *arguments, told=(str(size), str(devices)))


@rule
def batch_that_does_not_divide(rng: random.Random) -> Case:
    size = rng.choice([2, 3, 4, 6, 8])
    batch = rng.choice([n for n in range(1, 65) if n % size])
    layout = rng.choice(["dp{}", "zero1x{}", "zero3x{}"]).format(size)
    told = (f"global_batch_size={batch}", str(size))
    return _cli("batch_that_does_not_divide", f"layout={layout}", f"data.global_batch_size={batch}", told=told)


@rule
def more_microbatches_than_samples(rng: random.Random) -> Case:
    size, rows = rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
    count = rows + rng.choice([1, 2, 3, 8])
    layout = rng.choice([f"dp{size}-pp2", f"zero2x{size}-pp2@gpipe"]) if size > 1 else "pp2"
    arguments = [f"layout={layout}", f"data.global_batch_size={rows * size}", f"strategy.num_microbatches={count}"]
    told = (f"num_microbatches={count}", f"global_batch_size={rows * size}")
    return _cli("more_microbatches_than_samples", *arguments, told=told, recipe="stdlib_gpt")


@rule
def rounds_that_are_not_whole(rng: random.Random) -> Case:
    size = rng.choice([2, 3, 4])
    count = rng.choice([n for n in range(size + 1, 4 * size) if n % max(1, n // size)])
    arguments = [f"layout=pp{size}@interleaved1f1b", f"strategy.num_microbatches={count}", "model.config.num_layers=8"]
    return _cli("rounds_that_are_not_whole", *arguments, told=(f"num_microbatches={count}",), recipe="stdlib_gpt")


@rule
def fewer_blocks_than_stages(rng: random.Random) -> Case:
    recipe = rng.choice(["stdlib_gpt", "stdlib_llama_hf"])
    key = "num_layers" if recipe == "stdlib_gpt" else "num_hidden_layers"
    schedule, per_rank = rng.choice([("", 1), ("@gpipe", 1), ("@interleaved1f1b", 2)])
    stages = rng.choice([2, 3, 4])
    layers = rng.randrange(1, stages * per_rank)
    arguments = [f"layout=pp{stages}{schedule}", f"model.config.{key}={layers}"]
    told = ("pipeline_parallel_size", str(layers)) if layers > 1 else ("pipeline",)
    return _cli("fewer_blocks_than_stages", *arguments, told=told, recipe=recipe)


@rule
def heads_that_do_not_divide(rng: random.Random) -> Case:
    recipe = rng.choice(["stdlib_gpt", "stdlib_llama_hf"])
    names = ("num_heads", "num_kv_heads") if recipe == "stdlib_gpt" else ("num_attention_heads", "num_key_value_heads")
    heads = rng.choice([2, 4, 8])
    ranks = rng.choice([n for n in (3, 4, 5, 6, 8) if heads % n])
    arguments = [f"layout=tp{ranks}", f"model.config.{names[0]}={heads}", f"model.config.{names[1]}={heads}"]
    told = (f"tensor_parallel_size={ranks}", f"{heads} heads")
    return _cli("heads_that_do_not_divide", *arguments, told=told, recipe=recipe)


@rule
def width_that_does_not_divide(rng: random.Random) -> Case:
    ranks = rng.choice([2, 3, 4, 5])
    size = rng.choice([n for n in range(3, 70) if n % ranks])
    arguments = [f"layout=tp{ranks}", f"model.hidden_size={size}"]
    return _cli("width_that_does_not_divide", *arguments, told=(f"tensor_parallel_size={ranks}", str(size)))


@rule
def sequence_longer_than_positions(rng: random.Random) -> Case:
    recipe = rng.choice(["stdlib_gpt", "stdlib_llama_hf"])
    key = "max_sequence_length" if recipe == "stdlib_gpt" else "max_position_embeddings"
    most = rng.choice([16, 32, 64])
    length = most + rng.choice([1, 16, 64])
    arguments = [f"model.config.{key}={most}", f"data.sequence_length={length}"]
    return _cli(
        "sequence_longer_than_positions", *arguments, told=(f"{key}={most}", f"sequence_length={length}"), recipe=recipe
    )


@rule
def sequence_that_cannot_be_cut(rng: random.Random) -> Case:
    length = rng.choice([n for n in range(3, 100) if n % 2])
    arguments = ["layout=tp2", "strategy.sequence_parallel=true", f"data.sequence_length={length}"]
    told = ("sequence_parallel", f"sequence_length={length}")
    return _cli("sequence_that_cannot_be_cut", *arguments, told=told, recipe="stdlib_gpt")


@rule
def run_without_an_end(rng: random.Random) -> Case:
    recipe = rng.choice(["stdlib_gpt", "stdlib_llama_hf"])
    return _cli(
        "run_without_an_end",
        "trainer.max_steps=-1",
        "trainer.max_epochs=-1",
        told=("model.max_steps", "trainer.max_steps"),
        recipe=recipe,
    )


@rule
def file_in_the_way(rng: random.Random) -> Case:
    key = rng.choice(
        [
            "output_dir",
            "run_dir",
            "data.cache_dir",
            "callbacks.checkpoint.dirpath",
            "logger.save_dir",
            "trainer.default_root_dir",
        ]
    )
    path = rng.choice(["taken", "taken/x", "./taken/x/y"])
    return _cli("file_in_the_way", f"{key}={path}", told=(key, "taken"), recipe="stdlib_gpt")


@rule
def file_that_is_not_there(rng: random.Random) -> Case:
    name = f"nowhere{rng.randrange(100)}"
    line, told = rng.choice(
        [
            (f"data.files=[{name}.txt]", (name,)),
            (f"data.files=['{name}/**/*.txt']", (name,)),
            (f"resume={name}.ckpt", ("resume", name)),
            (f"resume=runs/{name}/checkpoints/step=5.ckpt", ("resume", name)),
        ]
    )
    return _cli(
        "file_that_is_not_there",
        line.replace("step=5", "'step=5'") if "step" in line else line,
        told=told,
        recipe="stdlib_gpt",
    )


@rule
def two_ways_to_resume(rng: random.Random) -> Case:
    checkpoint = "old/checkpoints/step.ckpt"
    lines = rng.choice(
        [
            ("resume=auto", f"resume={checkpoint}"),
            (f"resume={checkpoint}", f"run_dir={rng.choice(['other', 'here', 'runs/x'])}"),
            (f"resume={checkpoint}", "recipe=stdlib_gpt"),
            ("run_dir=old",),
            ("run_dir=old", "resume=null"),
        ]
    )
    recipe = None if any(line.startswith("recipe") for line in lines) else "digits_mlp"
    return _cli("two_ways_to_resume", *lines, told=("old",), recipe=recipe)


@rule
def several_machines_without_a_launcher(rng: random.Random) -> Case:
    nodes = rng.choice([2, 3, 4])
    return _cli(
        "several_machines_without_a_launcher", f"trainer.num_nodes={nodes}", told=(f"num_nodes={nodes}", "torchrun")
    )


@rule
def bad_value_in_code(rng: random.Random) -> Case:
    odd: list[Any] = [-1, 0, 1.5, "x", None, [2], {"a": 2}, float("nan"), float("inf"), b"2", (2,), 2 + 1j]
    spots = {
        "data_parallel_size": odd,
        "data_parallel_replicas": [*odd, "auto"],
        "tensor_parallel_size": odd,
        "pipeline_parallel_size": odd,
        "zero_stage": [*[value for value in odd if value != 0], 4, True, "3"],
        "schedule": odd,
        "num_microbatches": [*[value for value in odd if value is not None], "auto", True],
        "process_group_backend": [value for value in odd if value is not None],
        "timeout_seconds": [value for value in odd if value != 1.5],
        "loss_parallel": odd,
        "sequence_parallel": odd,
    }
    key = rng.choice(sorted(spots))
    value = rng.choice(spots[key])
    return Case("bad_value_in_code", settings={key: value}, devices=1, told=(f"{key}={value!r}",))


RULES["bad_value_in_code_2"] = bad_value_in_code


@rule
def bad_sizes_in_code(rng: random.Random) -> Case:
    sizes = {f"{axis}_parallel_size": rng.choice([1, 2, 3, 4]) for axis in ("data", "tensor", "pipeline")}
    product = 1
    for size in sizes.values():
        product *= size
    devices = rng.choice([n for n in range(1, 13) if n != product])
    return Case(
        "bad_sizes_in_code", settings=sizes, devices=devices, told=("data_parallel_size", str(product), str(devices))
    )


@rule
def misspelt_argument_in_code(rng: random.Random) -> Case:
    key = rng.choice(["data_parallel_size", "tensor_parallel_size", "zero_stage", "schedule", "num_microbatches"])
    wrong = misspell(rng, key)
    return Case("misspelt_argument_in_code", settings={wrong: 1}, devices=1, told=(wrong,))


def invalid(seed: int, count: int) -> list[Case]:
    """So many different cases: a bad value of every setting, and the rules in turn."""
    rng = random.Random(seed)
    first = [_bad(rng, recipe, key, values) for recipe, key, values in _settings(rng)]
    return [*first, *draw(rng, list(RULES.values()), count - len(first), apart_from=first)]


def _settings(rng: random.Random) -> list[tuple[str, str, Values]]:
    own = [(recipe, key, values) for recipe, table in OF_RECIPE.items() for key, values in table.items()]
    return [(rng.choice(RECIPES), key, values) for key, values in {**EVERY_RUN, **WANDB}.items()] + own


def draw(rng: random.Random, rules: list[Rule], count: int, *, apart_from: Sequence[Case] = ()) -> list[Case]:
    """So many different cases of these rules in turn."""
    known = {case.name for case in apart_from}
    found: dict[str, Case] = {}
    for make in _turns(rules):
        for _ in range(20):
            case = make(rng)
            if case.name not in found and case.name not in known:
                found[case.name] = case
                break
        if len(found) == count:
            return list(found.values())
    raise AssertionError(f"the rules make {len(found)} different cases only")


def _turns(rules: list[Rule]) -> Iterator[Rule]:
    for _ in range(200):
        yield from rules
