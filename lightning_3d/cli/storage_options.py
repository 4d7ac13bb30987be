"""What the file system of a URL on the command line is made with: its address, keys and the like."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import yaml

from lightning_3d.checkpoint.places import Place
from lightning_3d.checkpoint.shelf import Shelf
from lightning_3d.errors import ConfigError


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take the option that `parse_storage_options` reads."""
    parser.add_argument(
        "--storage-options",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="of fsspec's file system where CKPT or OUT is a URL; may be repeated, or one JSON object",
    )


def parse_storage_options(given: list[str]) -> dict[str, Any]:
    """
    Raises:
        ConfigError: neither key=value nor a JSON object, or a key that is given twice.

    >>> parse_storage_options(["anon=true", '{"client_kwargs": {"region_name": "eu-west-1"}}'])
    {'anon': True, 'client_kwargs': {'region_name': 'eu-west-1'}}
    """
    found: dict[str, Any] = {}
    for text in given:
        more = _parse_one(text)
        if not more:
            raise ConfigError(
                f"--storage-options {text!r} is neither key=value nor a JSON object. Write --storage-options "
                """anon=true, or --storage-options '{"client_kwargs": {"endpoint_url": "http://..."}}'."""
            )
        if twice := sorted(more.keys() & found.keys()):
            raise ConfigError(f"--storage-options sets {twice[0]} twice. Leave out one of them.")
        found.update(more)
    return found


def check_storage_options(options: Mapping[str, Any], *places: Place) -> None:
    """
    Raises:
        ConfigError: options that none of these places takes, or that would go to two services.
    """
    protocols = sorted({str(one).partition("://")[0] for one in places if isinstance(one, Shelf)})
    if options and not protocols:
        raise ConfigError(
            f"--storage-options {', '.join(options)} are for URLs, but {' and '.join(map(str, places))} "
            f"{'is a local path' if len(places) == 1 else 'are local paths'}. Leave them out."
        )
    if options and len(protocols) > 1:
        raise ConfigError(
            f"--storage-options {', '.join(options)} would go to {' and '.join(protocols)} alike. Leave them out, and "
            f"set fsspec's variables, such as FSSPEC_{protocols[0].upper()}_KEY."
        )


def _parse_one(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        return {key: yaml.safe_load(value)} if key and equals else {}
    except (json.JSONDecodeError, yaml.YAMLError):
        return {}
