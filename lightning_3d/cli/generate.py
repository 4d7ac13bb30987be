"""``lightning-3d generate``: text from a checkpoint of any layout, in one process."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from lightning_3d.checkpoint.places import Place, place_among
from lightning_3d.checkpoint.plain import read_plain
from lightning_3d.cli.build import build
from lightning_3d.cli.config import check_once, first_line
from lightning_3d.cli.saved_run import find_run, read_config
from lightning_3d.cli.storage_options import add_storage_options, check_storage_options, parse_storage_options
from lightning_3d.errors import ConfigError
from lightning_3d.models.generation import check_sampling, generate_tokens, longest_input


@dataclass(frozen=True)
class Request:
    """What a call asks for.

    Args:
        config: the config.yaml of a run folder, where the checkpoint does not lie in one.
        trust: load objects of the checkpoint too, which can run code of whoever wrote them.
    """

    prompt: str
    max_new_tokens: int = 64
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0
    device: str = "cpu"
    config: str | None = None
    trust: bool = False


# How the settings that are no texts are read, and what they are.
_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_new_tokens": (int, "a whole number"),
    "temperature": (float, "a number"),
    "top_k": (lambda text: None if text == "null" else int(text), "a whole number or null"),
    "seed": (int, "a whole number"),
    "trust": (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
}


def main(argv: Sequence[str]) -> int:
    """Mistakes in the call are raised as errors of ours."""
    if any(argument in ("-h", "--help") for argument in argv):
        print(help_text())
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_storage_options(parser)
    try:
        options, argv = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}. See lightning-3d generate --help.") from error
    # A checkpoint's name has a "=" too, as in step=50.ckpt.
    settings = tuple(f"{field.name}=" for field in fields(Request))
    named = [argument for argument in argv if not argument.startswith(settings)]
    if len(named) != 1 or named[0].startswith("-"):
        raise ConfigError(
            f"{' '.join(named) or 'nothing'} is not one checkpoint. Write lightning-3d generate CKPT prompt='def ', "
            f"with any of {', '.join(settings)}..."
        )
    request = parse([argument for argument in argv if argument not in named])
    storage_options = parse_storage_options(options.storage_options)
    run = find_run(named[0], storage_options=storage_options)
    config = run.config
    check_storage_options(storage_options, run.checkpoint)
    if request.config:
        config = read_config(place_among(request.config, storage_options=storage_options))
    if config is None:
        raise ConfigError(
            f"{run.checkpoint} lies in no run folder, so nothing tells its model and tokenizer. Give config=FILE, the "
            "config.yaml of the run that made it, or that run's folder instead of the checkpoint."
        )
    print(generate(run.checkpoint, config, request), flush=True)
    return 0


def parse(arguments: Sequence[str]) -> Request:
    """
    Raises:
        ConfigError: a setting that is missing or of the wrong type.
    """
    check_once(arguments)
    given: dict[str, Any] = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        read, meant = _READ.get(name, (str, "text"))
        try:
            given[name] = read(text)
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{name}={text!r} is not {meant}.") from error
    if not given.get("prompt"):
        raise ConfigError("there is no prompt to go on from. Write prompt='def ', say.")
    request = Request(**given)
    check_sampling(count=request.max_new_tokens, temperature=request.temperature, top_k=request.top_k)
    if not 0 <= request.seed < 2**64:
        raise ConfigError(f"seed={request.seed} is not a whole number from 0 to {2**64 - 1}. Set seed=0, say.")
    _check_device(request.device)
    return request


def _check_device(name: str) -> None:
    """Refuse a device that holds no numbers here, before a checkpoint is read for it."""
    try:
        torch.zeros((), device=name).item()
    except Exception as error:
        known = "cpu, cuda, cuda:1" if torch.cuda.is_available() else "cpu"
        raise ConfigError(
            f"device={name!r} cannot be computed on here: {first_line(error)}. Set device to one like {known}."
        ) from error


def generate(checkpoint: Place, config: Mapping[str, Any], request: Request) -> str:
    """The prompt and what the model writes after it.

    Raises:
        ConfigError: a model without `token_logits`, or data without a tokenizer.
    """
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    module, data = build(config["model"]), build(config["data"])
    if not callable(getattr(module, "token_logits", None)) or not hasattr(type(data), "tokenizer"):
        raise ConfigError(
            f"{type(module).__name__} on {type(data).__name__} writes no text: that takes a module with token_logits() "
            "and a data module with a tokenizer. It can be loaded with load_from_checkpoint()."
        )
    module.configure_model()
    state = read_plain(checkpoint, optimizer=False, weights_only=not request.trust)["state_dict"]
    module.load_state_dict(state)
    # In the precision that it was trained in.
    dtype = next(v.dtype for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
    del state
    module = module.to(request.device, dtype).eval()
    data.prepare_data()
    tokenizer = data.tokenizer
    tokens = torch.tensor([tokenizer.encode(request.prompt).ids], device=request.device)
    with torch.inference_mode():
        written = generate_tokens(
            module.token_logits,
            tokens,
            count=request.max_new_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            seed=request.seed,
            longest=longest_input(module),
        )
    return str(tokenizer.decode(written[0].tolist()))


def help_text() -> str:
    """Usage, settings and examples."""
    return "\n".join(
        [
            "usage: lightning-3d generate CKPT prompt=TEXT [key=value ...] [--storage-options KEY=VALUE]",
            "",
            "Writes text with the model of a checkpoint of any layout, or of a run folder's newest, in one process.",
            "The model and its tokenizer are those of the run folder. CKPT is a path or a URL that fsspec knows, whose",
            "file system takes --storage-options (repeated, or one JSON object).",
            "",
            "  prompt          the text to go on from",
            "  max_new_tokens  default 64",
            "  temperature     default 0.8; 0 takes the likeliest token each time",
            "  top_k           choose among so many of the likeliest; default null, all",
            "  seed            of the choices; default 0",
            "  device          default cpu",
            "  config          the config.yaml of a run, where the checkpoint lies in no run folder",
            "  trust           load objects of the checkpoint, which can run code of their writer; default false",
            "",
            "examples:",
            "  lightning-3d generate runs/stdlib_gpt-20260101-120000-1a2b prompt='def '",
            "  lightning-3d generate runs/.../checkpoints/step=150.ckpt prompt='import ' temperature=0",
            "  lightning-3d generate s3://bucket/step=150.ckpt config=c.yaml prompt='def ' --storage-options anon=true",
        ]
    )
