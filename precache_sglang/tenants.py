"""Tenants: callers with an API key of their own, who share no cached token with others.

A tenant's name is part of the namespace of everything it asks for, whatever ``cache_salt`` or
``extra_key`` it writes.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from pathlib import Path

from precache_sglang.errors import SettingsError

_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # no colon: see `namespace`

# Of the request that is being served; None where the server knows no tenants.
current_tenant: ContextVar[str | None] = ContextVar("current_tenant", default=None)


class Tenants:
    """The callers of a server, by key. Holders of ``--api-key`` are the tenant without a name."""

    def __init__(self, keys: dict[str, str], api_key: str) -> None:
        self._keys = keys
        self._api_key = api_key.encode()

    def name_of(self, authorization: bytes) -> str | None:
        """The tenant whose key an ``Authorization`` header holds, or None."""
        kind, _, key = authorization.partition(b" ")
        if kind.lower() != b"bearer":
            return None
        for name, own in self._keys.items():
            if secrets.compare_digest(key, own.encode()):
                return name
        return None

    @property
    def api_key_header(self) -> bytes:
        return b"Bearer " + self._api_key


def read_tenants(path: str, api_key: str | None, admin_api_key: str | None) -> Tenants:
    """Tenants from lines ``NAME=KEY``; empty ones and ``# comments`` are passed over.

    Raises:
        SettingsError: if the file cannot be read, a line is none of these, or a key opens
            two doors. No message holds a key.
    """
    if not api_key or not admin_api_key:
        raise SettingsError(
            "--precache-tenants needs --api-key, or everybody is let in, and --admin-api-key, or "
            "every tenant may load and unload adapters; give both."
        )
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--precache-tenants {path!r} cannot be read: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, separator, key = (part.strip() for part in line.partition("="))
        if not line.strip() or name.startswith("#"):
            continue
        where = f"--precache-tenants: line {number} of {path}"
        if not separator or not key or not _NAME.fullmatch(name):
            raise SettingsError(
                f"{where} is not NAME=KEY; a name has letters, digits and the characters . _ -"
            )
        if name in keys:
            raise SettingsError(f"{where} names the tenant {name!r} again.")
        if key in (*keys.values(), api_key, admin_api_key):
            raise SettingsError(f"{where} has a key that opens something else already.")
        keys[name] = key
    return Tenants(keys, api_key)


def namespace(tenant: str, extra_key: str | None) -> str:
    """An ``extra_key`` that no other tenant can have: names end at the first colon."""
    return f"{tenant}:{extra_key or ''}"
