"""sglang.srt.server_args

Why: our flags belong in ``--help`` of every SGLang server command.
How: add them to SGLang's parser; what was parsed travels on SGLang's own record, which
every process receives.
Gone when: SGLang lets plugins declare fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from precache_sglang.patches import Patch

from precache_sglang.config import Settings, add_cli_args


def after_add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    add_cli_args(parser)


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    server_args = original(cls, args)
    Settings.from_mapping(vars(args)).attach(server_args)
    return server_args


PATCHES = [
    Patch("sglang.srt.server_args.ServerArgs.add_cli_args", "after", after_add_cli_args),
    Patch("sglang.srt.server_args.ServerArgs.from_cli_args", "around", around_from_cli_args),
]
