"""Settings: one frozen record, validated once, read by every process."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from precache_sglang.errors import SettingsError
from precache_sglang.methods import DEFAULT_METHOD, METHODS, OFF, Method
from precache_sglang.schedules import DEFAULT_SCHEDULE, SCHEDULES

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

DEFAULT_TEAM = "default"  # of the roles that no team lists
KERNELS = ("auto", "torch", "triton")
_Number = TypeVar("_Number", int, float)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")
_RECORD = "_precache_settings"  # ServerArgs keeps underscore attributes when pickled


@dataclass(frozen=True)
class Settings:
    """What the operator asked for.

    Attributes:
        method: Name in `METHODS`, ``"off"``, or None: the default method where adapters
            are served, off where none are.
        schedule: When neutral passes run.
        lr_tokens: Size of the LR pool in slots, one slot for one token of one adapter
            over all layers. None: enough for every adapter given at start-up.
        teams: Team name to its roles. Roles that no team lists form one team more.
        max_neutral_wait_ms: How long a request may wait for the neutral pass over the
            tokens it extends; -1 waits until it is done. After that it reads the turn as
            its adapted pass left it, with rows that this pass wrote for the whole team.
        own_base_fraction: Share of the KV slots that are not in use which own base may take,
            where the method has it.
        kernels: Which implementation of attention; ``auto`` is ``triton`` on a GPU.
        cuda_graph: Capture decode steps in CUDA graphs.
        metrics_roles: How many role names metrics list; the rest is counted as one.
        cors_origins: Origins whose pages may read answers; ``*`` for all.
        max_body_bytes: Size of the largest request body.
        drain_timeout_s: How long running requests may go on after SIGTERM.
        tenants: Name of a file with an API key for each tenant; None: ``--api-key`` is
            everybody's.
    """

    method: str | None = None
    schedule: str = DEFAULT_SCHEDULE
    lr_tokens: int | None = None
    teams: dict[str, list[str]] = field(default_factory=dict)
    max_neutral_wait_ms: int = -1
    own_base_fraction: float = 0.5
    kernels: str = "auto"
    cuda_graph: bool = False
    metrics_roles: int = 32
    cors_origins: list[str] = field(default_factory=list)
    max_body_bytes: int = 64 << 20
    drain_timeout_s: float = 20.0
    tenants: str | None = None

    def __post_init__(self) -> None:
        if self.method not in (None, OFF, *METHODS):
            raise SettingsError(
                f"--precache-method {self.method!r} is unknown; choose one of "
                f"{', '.join([*METHODS, OFF])}."
            )
        if self.schedule not in SCHEDULES:
            raise SettingsError(
                f"--precache-schedule {self.schedule!r} is unknown; choose one of "
                f"{', '.join(SCHEDULES)}."
            )
        if self.kernels not in KERNELS:
            raise SettingsError(
                f"--precache-kernels {self.kernels!r} is unknown; choose one of "
                f"{', '.join(KERNELS)}."
            )
        if self.lr_tokens is not None and self.lr_tokens < 1:
            raise SettingsError(
                f"--precache-lr-tokens {self.lr_tokens} leaves no room for a token; "
                "give a positive number, or leave the flag out."
            )
        if self.max_neutral_wait_ms < -1:
            raise SettingsError(
                f"--precache-max-neutral-wait {self.max_neutral_wait_ms} is no time; give "
                "milliseconds, or -1 to wait until the neutral pass is done."
            )
        if not 0 <= self.own_base_fraction <= 1:
            raise SettingsError(
                f"--precache-own-base-fraction {self.own_base_fraction} is no share; give a number "
                "from 0 (no own base is kept) to 1."
            )
        if self.metrics_roles < 0:
            raise SettingsError(
                f"--precache-metrics-roles {self.metrics_roles} is negative; give the number of "
                "role names that metrics list, 0 to count all roles as one."
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SettingsError(
                    f"--precache-cors-origins {origin!r} is no origin; give scheme, host and port "
                    "as browsers send them, for example https://console.example.com, or '*'."
                )
        if self.max_body_bytes < 1:
            raise SettingsError(
                f"--precache-max-body-bytes {self.max_body_bytes} lets no request in; give a "
                "positive number."
            )
        if not 0 <= self.drain_timeout_s < math.inf:
            raise SettingsError(
                f"--precache-drain-timeout {self.drain_timeout_s} is no time; give seconds, 0 to "
                "cut running requests off at once."
            )
        seen: dict[str, str] = {}
        for team, roles in self.teams.items():
            if team == DEFAULT_TEAM:
                raise SettingsError(
                    f"--precache-team {team!r} is the team of the roles that no team lists; give "
                    "another name."
                )
            for role in roles:
                if role in seen:
                    raise SettingsError(
                        f"--precache-team: role {role!r} is in {seen[role]!r} and in {team!r}; "
                        "a role belongs to one team, once."
                    )
                seen[role] = team

    @property
    def policy(self) -> Method | None:
        """The method's row of the table; None when off."""
        if self.method in (None, OFF):
            return None
        return METHODS[self.method]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from flags or keyword arguments named ``precache_*``.

        What is missing or None comes from the environment (``PRECACHE_METHOD`` …),
        so that a plain ``sglang.Engine(...)`` can be configured too.
        """

        def value(name: str) -> Any:
            given = values.get(f"precache_{name}")
            # An empty variable is one that was not set.
            return os.environ.get(f"PRECACHE_{name.upper()}") or None if given is None else given

        wait = _optional(int, "--precache-max-neutral-wait", value("max_neutral_wait"))
        fraction = _optional(float, "--precache-own-base-fraction", value("own_base_fraction"))
        metrics_roles = _optional(int, "--precache-metrics-roles", value("metrics_roles"))
        body = _optional(int, "--precache-max-body-bytes", value("max_body_bytes"))
        drain = _optional(float, "--precache-drain-timeout", value("drain_timeout"))
        origins = value("cors_origins") or []
        return cls(
            method=value("method"),
            schedule=value("schedule") or cls.schedule,
            lr_tokens=_optional(int, "--precache-lr-tokens", value("lr_tokens")),
            teams=parse_teams(value("team")),
            max_neutral_wait_ms=cls.max_neutral_wait_ms if wait is None else wait,
            own_base_fraction=cls.own_base_fraction if fraction is None else fraction,
            kernels=value("kernels") or cls.kernels,
            cuda_graph=_flag("--precache-cuda-graph", value("cuda_graph")),
            metrics_roles=cls.metrics_roles if metrics_roles is None else metrics_roles,
            cors_origins=origins.split() if isinstance(origins, str) else list(origins),
            max_body_bytes=cls.max_body_bytes if body is None else body,
            drain_timeout_s=cls.drain_timeout_s if drain is None else drain,
            tenants=value("tenants"),
        )

    # -- travelling with SGLang's own record ---------------------------------

    def attach(self, server_args: ServerArgs) -> None:
        """Store these settings on SGLang's record, which every process receives."""
        setattr(server_args, _RECORD, asdict(self))

    @classmethod
    def of(cls, server_args: ServerArgs) -> Settings | None:
        """The settings stored on `server_args`, or None."""
        values = getattr(server_args, _RECORD, None)
        return None if values is None else cls(**values)


def parse_teams(value: str | list[str] | Mapping[str, list[str]] | None) -> dict[str, list[str]]:
    """``NAME=role,role…`` items (or one string of them, split at blanks) to a dict."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {team: list(roles) for team, roles in value.items()}
    items = value.split() if isinstance(value, str) else value
    teams: dict[str, list[str]] = {}
    for item in items:
        name, separator, roles = item.partition("=")
        name = name.strip()
        members = [role.strip() for role in roles.split(",") if role.strip()]
        if not separator or not name or not members:
            raise SettingsError(
                f"--precache-team {item!r} is not NAME=role,role…; for example "
                "--precache-team qa=plan,action,reflect."
            )
        if name in teams:
            raise SettingsError(
                f"--precache-team names the team {name!r} twice; list all its roles once."
            )
        teams[name] = members
    return teams


def _optional(number: type[_Number], flag: str, value: Any) -> _Number | None:
    if value is None:
        return None
    try:
        return number(value)
    except (TypeError, ValueError):
        kind = "a whole number" if number is int else "a number"
        raise SettingsError(f"{flag} {value!r} is not {kind}; give one.") from None


def _flag(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if str(value).lower() in ("1", "true", "yes"):
        return True
    if str(value).lower() in ("0", "false", "no"):
        return False
    raise SettingsError(f"{name} {value!r} is neither yes nor no; give 1 or 0.")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the ``--precache-*`` flags to SGLang's parser."""
    group = parser.add_argument_group("precache-sglang")
    group.add_argument(
        "--precache-method",
        choices=[*METHODS, OFF],
        help="How roles share the KV cache. Default: "
        f"{DEFAULT_METHOD} where LoRA adapters are served, else off. "
        + "; ".join(f"{m.name}: {m.summary}" for m in METHODS.values())
        + "; off: SGLang as it is.",
    )
    group.add_argument(
        "--precache-schedule",
        choices=SCHEDULES,
        help="When the adapter-free pass of rebaseshared and rebaseown runs. "
        + "; ".join(f"{s.name}: {s.summary}" for s in SCHEDULES.values())
        + f". Default: {DEFAULT_SCHEDULE}.",
    )
    group.add_argument(
        "--precache-lr-tokens",
        type=int,
        metavar="N",
        help="Size of the low-rank row pool in slots (one token of one adapter). "
        "Default: the KV pool's tokens times the number of adapters at start-up.",
    )
    group.add_argument(
        "--precache-team",
        action="append",
        metavar="NAME=role,role…",
        help="Roles that share; once for each team. Default: all roles share.",
    )
    group.add_argument(
        "--precache-max-neutral-wait",
        type=int,
        metavar="MS",
        help="How long a request may wait for the neutral pass over the context it "
        "extends; -1 (default): until it is done. After that it reads the turn as prelrshared "
        "would have left it, and the neutral pass replaces that when nobody reads it.",
    )
    group.add_argument(
        "--precache-own-base-fraction",
        type=float,
        metavar="SHARE",
        help="Share of the KV slots not in use that rebaseown may take for the base KV of roles' "
        f"own turns. Default: {Settings.own_base_fraction}.",
    )
    group.add_argument(
        "--precache-kernels",
        choices=KERNELS,
        help="Attention over base KV and low-rank rows: triton kernels, or plain PyTorch. "
        "Default: auto, that is triton on a GPU.",
    )
    group.add_argument(
        "--precache-cuda-graph",
        action="store_true",
        default=None,
        help="Capture decode steps in CUDA graphs. Off unless given: it has not been "
        "validated on a GPU yet.",
    )
    group.add_argument(
        "--precache-metrics-roles",
        type=int,
        metavar="N",
        help="How many role names metrics and GET /precache/state list, the first ones loaded; "
        f"the rest is counted under 'other'. Default: {Settings.metrics_roles}.",
    )
    group.add_argument(
        "--precache-cors-origins",
        nargs="+",
        metavar="ORIGIN",
        help="Origins whose pages may read answers (scheme://host:port, or '*'). Default: none.",
    )
    group.add_argument(
        "--precache-max-body-bytes",
        type=int,
        metavar="N",
        help="Largest request body; above it the answer is 413. "
        f"Default: {Settings.max_body_bytes}.",
    )
    group.add_argument(
        "--precache-drain-timeout",
        type=float,
        metavar="SECONDS",
        help="After SIGTERM, how long running requests may go on; new ones get 503. "
        f"Default: {Settings.drain_timeout_s:g}.",
    )
    group.add_argument(
        "--precache-tenants",
        metavar="FILE",
        help="File with lines NAME=KEY: API keys beside --api-key, each of a tenant whose requests "
        "share with no other tenant's.",
    )
