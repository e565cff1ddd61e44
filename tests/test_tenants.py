"""Tenants never share a token, whatever they write; the roles of one tenant do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerError, ServerProcess
from standins import quiet_imports

from precache_sglang.config import DEFAULT_TEAM
from precache_sglang.errors import SettingsError
from precache_sglang.methods import METHODS
from precache_sglang.tenants import namespace, read_tenants

with quiet_imports():
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from precache_sglang.runtime import Runtime

KEY, ADMIN = "nameless tenants'", "operator's"
PROMPT = "Question: Why is the sky blue?\n\nThought: \n### Response:\n" * 3
LONG = "x" * 20_000
UNICODE = "планировщик-é"
# Names that look like our own: a team's prefix, the team of those that no team lists, the
# namespace of requests without an adapter, the key of common rows.
ROLES = ("t0:", "default", "none")
LATE = ("common", UNICODE, "r" * 300)
TENANTS: list[dict[str, str]] = [
    {},
    {"cache_salt": "a"},
    {"extra_key": "a"},
    {"extra_key": "a", "cache_salt": "a"},
    *({key: text} for key in ("cache_salt", "extra_key") for text in (":", "t0:", "t1:", "t0:a")),
    {"extra_key": "ab"},
    {"extra_key": "a", "cache_salt": "b"},
    {"extra_key": "b", "cache_salt": "a"},
    {"cache_salt": "ab"},
    {"extra_key": "none:"},
    {"extra_key": "None"},
    {"cache_salt": "None"},
    {"extra_key": "default"},
    {"extra_key": "('t0:', 'a')"},
    {"extra_key": " "},
    {"extra_key": "a\x00"},
    {"extra_key": "a\nb"},
    {"cache_salt": "é"},
    {"cache_salt": "e\u0301"},  # the same letter to the eye
    {"cache_salt": LONG},
    {"cache_salt": LONG + "y"},
    {"extra_key": LONG + "z"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    paths = list(demo_adapters().values())
    args = ["--max-total-tokens", "9000", "--max-loras-per-batch", "5", "--context-length", "2000"]
    args += ["--served-model-name", "smollm2", "--log-level", "warning"]
    tenants = tmp_path_factory.mktemp("tenants") / "keys"
    tenants.write_text("# name = key\nacme = acme's\n\nother=other's\n")
    args += ["--api-key", KEY, "--admin-api-key", ADMIN, "--precache-tenants", str(tenants)]
    args += ["--precache-method", "prelrshared", "--precache-team", "t1=t0:,default"]
    adapters = dict(zip(ROLES, paths, strict=True))
    with ServerProcess(ensure_demo_model(), adapters, args, api_key=KEY) as running:
        yield running


def by(server: ServerProcess, key: str) -> ServerProcess:
    """The same server, asked with another key."""
    caller = copy.copy(server)
    caller.headers = server.headers | {"Authorization": f"Bearer {key}"}
    return caller


@pytest.fixture
def clean(server: ServerProcess) -> ServerProcess:
    by(server, ADMIN).post("/flush_cache?timeout=30")
    return server


def counts(server: ServerProcess, role: str | None, **fields: Any) -> dict[str, int]:
    """Where the tokens of `PROMPT` came from."""
    sampling = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    body = {"text": PROMPT, "lora_path": role, "sampling_params": sampling, **fields}
    meta = server.post("/generate", body)["meta_info"]
    found: dict[str, int] = meta["precache"]
    assert sum(found.values()) == meta["prompt_tokens"]
    return found


def computes_all(found: dict[str, int]) -> bool:
    return found["shared"] == found["own"] == found["replayed"] == 0


def test_no_tenant_gets_a_token_of_another(clean: ServerProcess) -> None:
    for tenant in TENANTS:
        assert computes_all(counts(clean, "t0:", **tenant)), {k: v[:20] for k, v in tenant.items()}
    for tenant in TENANTS:
        again = counts(clean, "t0:", **tenant)
        assert again["computed"] == 0 and again["own"] > 0
        other = counts(clean, "default", **tenant)
        assert other["computed"] == 0 and other["shared"] > 0 and other["own"] == 0


def test_no_role_name_leads_to_another_team(clean: ServerProcess) -> None:
    """`t0:` and `default` are a team, called t1; the rest is the team `default`."""
    assert computes_all(counts(clean, "t0:"))
    assert counts(clean, "default")["shared"] > 0
    assert computes_all(counts(clean, "none"))
    path = str(demo_adapters()["plan"])
    for name in LATE:
        by(clean, ADMIN).post("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        # These are in the team of `none`; loaded late, they have its base and no rows yet.
        assert counts(clean, name)["computed"] == 0
        assert computes_all(counts(clean, name, extra_key=f"t0:{name}"))
        by(clean, ADMIN).post("/unload_lora_adapter", {"lora_name": name})
        with pytest.raises(ServerError, match=r"^4"):
            counts(clean, name)


def test_openai_routes_keep_tenants_apart_too(clean: ServerProcess) -> None:
    def ask(path: str, **fields: Any) -> dict[str, int]:
        body = {"model": "smollm2:default", "max_tokens": 2, "temperature": 0, **fields}
        answer = clean.post(path, body)
        found: dict[str, int] = answer["usage"]["precache"]
        return found

    for path, prompt in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        for tenant in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "t0:"}):
            assert computes_all(ask(path, **prompt, **tenant)), (path, tenant)
            assert ask(path, **prompt, **tenant)["computed"] == 0, (path, tenant)
    # One tenant is one tenant on every route.
    assert counts(clean, "t0:", cache_salt="a")["computed"] == 0


def test_a_list_of_prompts_has_a_tenant_for_each(clean: ServerProcess) -> None:
    sampling = {"max_new_tokens": 2, "temperature": 0}
    body = {"text": [PROMPT] * 3, "lora_path": "t0:", "sampling_params": sampling}
    for answer in clean.post("/generate", body | {"cache_salt": ["a", "b", "t0:a"]}):
        assert computes_all(answer["meta_info"]["precache"])
    assert computes_all(counts(clean, "t0:", cache_salt="c"))
    assert counts(clean, "default", cache_salt="b")["computed"] == 0


def test_each_key_of_a_tenant_opens_a_cache_of_its_own(clean: ServerProcess) -> None:
    """Also where a caller writes what another tenant's namespace looks like."""

    acme, other, nameless = (by(clean, key) for key in ("acme's", "other's", KEY))
    for caller in (acme, other, nameless):
        assert computes_all(counts(caller, "t0:"))
        assert counts(caller, "default")["computed"] == 0
    for caller, forged in (
        (other, {"extra_key": "acme:"}),
        (other, {"cache_salt": "acme:"}),
        (nameless, {"extra_key": "acme:"}),
        (nameless, {"extra_key": "t0:acme:"}),
        (nameless, {"extra_key": ":"}),
    ):
        assert computes_all(counts(caller, "t0:", **forged)), forged
    # A tenant may still separate its own users.
    assert computes_all(counts(acme, "t0:", cache_salt="user"))
    assert counts(acme, "default", cache_salt="user")["computed"] == 0
    for fields in ({"n": 2}, {"prompt": [PROMPT, PROMPT]}):
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 2, **fields}
        assert acme.post("/v1/completions", body)["usage"]["precache"]["computed"] == 0
    # A tenant is no administrator, and a wrong key is nobody's.
    for caller, path in ((acme, "/precache/state"), (acme, "/server_info")):
        with pytest.raises(ServerError, match=r"^401 "):
            caller.get(path)
    with pytest.raises(ServerError, match=r"^401 "):
        counts(by(clean, "nobody's"), "t0:")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("acme", "line 1"),
        ("acme=", "line 1"),
        ("a:b=key", "line 1"),
        ("# keys\n\nacme=1\nacme=2", "line 4"),
        ("acme=1\nother=1", "line 2"),
        ("acme=api", "line 1"),
        ("acme=admin", "line 1"),
    ],
)
def test_a_bad_file_of_tenants_is_refused(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text(text)
    with pytest.raises(SettingsError, match=named):
        read_tenants(str(file), "api", "admin")


def test_tenants_need_the_other_keys_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text("acme=1")
    for keys in ((None, "admin"), ("api", None), ("", "admin")):
        with pytest.raises(SettingsError, match="--api-key"):
            read_tenants(str(file), *keys)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_tenants(str(tmp_path), "api", "admin")


# -- the namespace of the tree -------------------------------------------------

_TEXT = st.text(alphabet=st.sampled_from("t01:nodefault|\x00é ("), max_size=6) | st.text(max_size=6)
Caller = tuple[str, str, str | None, str | None]  # team, tenant, extra_key, cache_salt
_CALLER = st.tuples(
    st.sampled_from(["one", "two", "default"]),
    st.sampled_from(["", "a", "t0"]),
    st.none() | _TEXT,
    st.none() | _TEXT,
)


def _cache_key(method: str, teams: list[str], caller: Caller) -> Any:
    """What the tree tells children of its root apart by, for one prompt."""
    team, tenant, extra_key, salt = caller
    runtime: Any = SimpleNamespace(
        method=METHODS[method], roles=SimpleNamespace(team_names=lambda: [*teams, DEFAULT_TEAM])
    )
    state: Any = SimpleNamespace(team=team, adapter=SimpleNamespace(content=f"hash of {team}"))
    name = Runtime.namespace(runtime, state, namespace(tenant, extra_key))
    return RadixKey([5, 6, 7], name, cache_salt=salt).child_key(1)


@pytest.mark.parametrize("method", ["prelrshared", "nonshared"])
@settings(max_examples=500, deadline=None, database=None)
@given(callers=st.lists(_CALLER, min_size=2, max_size=6))
def test_callers_meet_in_the_tree_only_if_they_are_the_same(
    method: str, callers: list[Caller]
) -> None:
    for one, other in itertools.combinations(callers, 2):
        # SGLang takes an empty text for none.
        same = [part or None for part in one] == [part or None for part in other]
        keys = [_cache_key(method, ["one", "two"], caller) for caller in (one, other)]
        assert (keys[0] == keys[1]) == same, (one, other)
