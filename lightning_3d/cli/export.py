"""``lightning-3d export``: a checkpoint folder to a Hugging Face folder, a plain .ckpt, or a .safetensors file."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.export import (
    export_ckpt,
    export_safetensors,
    left_out,
    model_tensors,
    write_shards,
)
from lightning_3d.checkpoint.names import find_prefix
from lightning_3d.checkpoint.outputs import refuse_existing, replacing
from lightning_3d.checkpoint.places import Place, place_among
from lightning_3d.cli.saved_run import SavedRun, find_run
from lightning_3d.cli.storage_options import add_storage_options, check_storage_options, parse_storage_options
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.models import hf_folder
from lightning_3d.models.huggingface import read_config
from lightning_3d.models.lora import adapter_names, write_adapter_config
from lightning_3d.models.weight_files import some

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Files of a tokenizer in a Hugging Face folder.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
              "merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json")  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Mistakes in the call, and a checkpoint that cannot be exported, are raised as errors of ours."""
    arguments = _parser().parse_args(list(argv))
    options = parse_storage_options(arguments.storage_options)
    run, out = (
        find_run(arguments.checkpoint, storage_options=options),
        place_among(arguments.out, storage_options=options),
    )
    check_storage_options(options, run.checkpoint, out)
    # Before the checkpoint is read.
    refuse_existing(out)
    EXPORTS[arguments.to](run, out, arguments)
    print(f"{run.checkpoint} -> {out}", flush=True)
    return 0


def to_ckpt(run: SavedRun, out: Place, arguments: argparse.Namespace) -> None:
    """Plain Lightning's file."""
    _refuse(arguments, "dtype", "config_from", "shard_size")
    export_ckpt(run.checkpoint, out, weights_only=arguments.weights_only, trust=arguments.trust)


def to_safetensors(run: SavedRun, out: Place, arguments: argparse.Namespace) -> None:
    """One file with the module's own names."""
    _refuse(arguments, "config_from", "shard_size", "weights_only", "trust")
    source = run.checkpoint
    export_safetensors(source, out, names={name: name for name in model_tensors(source)}, dtype=_dtype(arguments))
    _tell_left_out(left_out(source))


def to_hf(run: SavedRun, out: Place, arguments: argparse.Namespace) -> None:
    """A folder that `transformers` loads."""
    _refuse(arguments, "weights_only")
    source = run.checkpoint
    extra = store.load_extra(source, weights_only=not arguments.trust)
    model = _counterpart(extra.get("hyper_parameters", {}), arguments.config_from)
    own = model_tensors(source)
    if adapter_names(own):
        raise CheckpointError(
            f"{source} has LoRA adapters beside the model's weights. Use --to peft; PEFT then merges them: "
            "PeftModel.from_pretrained(model, OUT).merge_and_unload().save_pretrained(...)."
        )
    shapes = hf_folder.weight_shapes(model.config)
    prefix = find_prefix([model.own_name(name) for name in shapes], own)
    names = {prefix + model.own_name(name): name for name in shapes}
    missing = [name for name in names if name not in own]
    misshapen = [
        f"{name} is {tuple(own[name])} for {tuple(shapes[stored])}"
        for name, stored in names.items()
        if name in own and own[name] != shapes[stored]
    ]
    if missing or misshapen:
        told = [f"missing: {some(missing)}." if missing else "", f"Misshapen: {some(misshapen)}." if misshapen else ""]
        raise CheckpointError(
            f"{source} does not hold the weights of a {model.config.model_type} model. It has "
            f"{some(list(own), most=3)}. {' '.join(filter(None, told))} Name the folder of the right config with "
            "--config-from."
        )
    dtype = _dtype(arguments)
    with replacing(out) as draft:
        draft.mkdir()
        shard_bytes = int((5 if arguments.shard_size is None else arguments.shard_size) * 10**9)
        write_shards(source, draft, names=names, dtype=dtype, shard_bytes=shard_bytes)
        saved = store.saved_tensors(source)
        dtype = dtype or saved[f"model.{next(iter(names))}"].properties.dtype
        hf_folder.write_config(draft, model.config, dtype=dtype)
        _write_tokenizer(draft, run.config, model.folder)
    tied = {prefix + model.own_name(name) for name in hf_folder.all_names(model.config)} - names.keys()
    _tell_left_out([*left_out(source), *(name for name in own if name not in names and name not in tied)])


def to_peft(run: SavedRun, out: Place, arguments: argparse.Namespace) -> None:
    """The LoRA adapters alone, as `PeftModel.from_pretrained` loads them onto their base model."""
    _refuse(arguments, "weights_only", "config_from", "shard_size")
    source = run.checkpoint
    own = model_tensors(source)
    names = adapter_names(own)
    if not names:
        raise CheckpointError(f"{source} has no LoRA adapters. Export all of its weights with --to hf.")
    hyper_parameters = store.load_extra(source, weights_only=not arguments.trust).get("hyper_parameters", {})
    settings = hyper_parameters.get("lora")
    if not settings and settings != {}:
        raise CheckpointError(
            f"{source} has adapters, but no hyper-parameter `lora` tells their settings. Save them in the module's "
            "hyper-parameters (save_hyperparameters), as HFCausalLM does."
        )
    with replacing(out) as draft:
        draft.mkdir()
        export_safetensors(source, draft / "adapter_model.safetensors", names=names, dtype=_dtype(arguments))
        write_adapter_config(draft, settings, names=names, base=hyper_parameters.get("path"))
    _tell_left_out([*left_out(source), *(name for name in own if name not in names)])


EXPORTS: dict[str, Callable[[SavedRun, Place, argparse.Namespace], None]] = {
    "hf": to_hf,
    "ckpt": to_ckpt,
    "safetensors": to_safetensors,
    "peft": to_peft,
}


def _counterpart(hyper_parameters: Any, folder: str | None) -> hf_folder.Counterpart:
    if folder is not None:
        return hf_folder.Counterpart(read_config(Path(folder)), Path(folder))
    found = hf_folder.counterpart_of(hyper_parameters)
    if found is None:
        raise ConfigError(
            "the checkpoint's hyper-parameters name no transformers config (config={model_type: ...} or path=FOLDER). "
            "Give a folder with the model's config.json: --config-from FOLDER. A model of your own is "
            "exported with --to safetensors or --to ckpt."
        )
    return found


def _write_tokenizer(draft: Path, config: dict[str, Any] | None, folder: Path | None) -> None:
    """The tokenizer of the folder that the model is from, else that of the run's data."""
    from lightning_3d.cli.build import build

    files = [folder / name for name in _TOKENIZER if (folder / name).is_file()] if folder is not None else []
    for file in files:
        shutil.copy(file, draft / file.name)
    if any(file.name == "tokenizer.json" for file in files) or config is None:
        return
    data = build(config["data"])
    if hasattr(type(data), "tokenizer"):
        data.prepare_data()
        hf_folder.write_tokenizer(draft, data.tokenizer, end_of_text=data.end_of_text)


def _dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    return _DTYPES[arguments.dtype] if arguments.dtype else None


def _refuse(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        # Not by its truth: a 0 was given too.
        if getattr(arguments, name) is not None and getattr(arguments, name) is not False:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing with --to {arguments.to}. Leave it out.")


def _gigabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    # A bound, for infinity and NaN.
    if not 0 < size <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of gigabytes. Write --shard-size 5, say")
    return size


def _tell_left_out(names: Sequence[str]) -> None:
    if names:
        print(f"left out: {some(list(names))}", flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See lightning-3d export --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lightning-3d export",
        description="Write a checkpoint folder of any layout in another format: in one process, tensor by tensor.",
        epilog="hf: transformers' AutoModelForCausalLM.from_pretrained(OUT). ckpt: plain Lightning resumes from it "
        "(Trainer.fit(ckpt_path=OUT)) and load_from_checkpoint loads it. peft: "
        "LoRA adapters alone. safetensors: weights by the module's names.",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a checkpoint, or a run folder (its newest one): a path or URL"
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        help="a new folder (hf, peft) or file, or its URL; below a URL it is written to TMPDIR first",
    )
    parser.add_argument("--to", required=True, choices=list(EXPORTS))
    parser.add_argument("--dtype", choices=list(_DTYPES), help="of the weights; default: as saved")
    parser.add_argument("--config-from", metavar="FOLDER", help="hf: a folder with the model's config.json, tokenizer")
    parser.add_argument(
        "--shard-size", metavar="GB", type=_gigabytes, help="hf: of one file of weights at most; default 5"
    )
    add_storage_options(parser)
    parser.add_argument(
        "--trust", action="store_true", help="load objects of the hyper-parameters, which can run code of their writer"
    )
    parser.add_argument("--weights-only", action="store_true", help="ckpt: without optimizer states and averages")
    return parser
