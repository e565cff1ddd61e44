"""Which role a request names, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import HTTPException

from precache_sglang.request_role import chosen_role

SERVED = ("lab:llama", "/models/llama")
ROLES = ("plan", "action", "v2:plan", "lab")


def choose(**named: Any) -> Any:
    return chosen_role(SERVED, ROLES, **named)


@pytest.mark.parametrize(
    ("model", "role"),
    [
        (None, None),
        ("default", None),
        ("lab:llama", None),
        ("/models/llama", None),
        ("plan", "plan"),
        ("lab", "lab"),
        ("v2:plan", "v2:plan"),
        ("lab:llama:plan", "plan"),
        ("lab:llama:v2:plan", "v2:plan"),
        ("/models/llama:action", "action"),
    ],
)
def test_model_names_a_role_or_none(model: str | None, role: str | None) -> None:
    assert choose(model=model) == role


@pytest.mark.parametrize(
    "model",
    ["", ":", "nobody", "lab:llama:", "lab:llama:nobody", "lab:llama: plan", "lab:plan", "x:plan"],
)
def test_any_other_model_is_not_found_and_the_known_ones_are_named(model: str) -> None:
    with pytest.raises(HTTPException) as error:
        choose(model=model)
    assert error.value.status_code == 404
    for part in (repr(model), "lab:llama", *ROLES):
        assert part in error.value.detail


def test_default_is_a_role_where_one_has_that_name() -> None:
    assert chosen_role(SERVED, ["default"], model="default") == "default"
    assert chosen_role(SERVED, ["default"]) is None


@pytest.mark.parametrize(
    "named",
    [
        {"headers": ["plan"]},
        {"headers": ["plan"], "model": "lab:llama"},
        {"headers": ["plan", "plan"], "model": "plan"},
        {"headers": ["plan"], "model": "lab:llama:plan", "lora_path": "plan"},
        {"model": "plan", "lora_path": ["plan", "plan"]},
        {"model": "lab:llama", "lora_path": "plan"},
    ],
)
def test_every_place_may_name_the_role(named: dict[str, Any]) -> None:
    assert choose(**named) == "plan"


@pytest.mark.parametrize(
    "named",
    [
        {"headers": ["plan"], "model": "action"},
        {"headers": ["plan"], "lora_path": "action"},
        {"headers": ["plan"], "lora_path": ["plan", None]},
        {"headers": ["plan", "action"]},
        {"model": "lab:llama:plan", "lora_path": "action"},
        {"model": "plan", "lora_path": ["plan", "action"]},
        {"model": "plan", "lora_path": ""},
    ],
)
def test_places_that_disagree_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(HTTPException, match="name different roles") as error:
        choose(**named)
    assert error.value.status_code == 400


@pytest.mark.parametrize(
    "named",
    [
        {"headers": ["nobody"]},
        {"headers": [""]},
        {"headers": ["lab:llama"]},
        {"lora_path": "nobody"},
        {"lora_path": ["plan", None, "nobody"]},
        {"lora_path": "lab:llama:plan"},
    ],
)
def test_a_role_that_is_not_loaded_is_not_found(named: dict[str, Any]) -> None:
    with pytest.raises(HTTPException, match="plan, action, v2:plan, lab") as error:
        choose(**named)
    assert error.value.status_code == 404


def test_a_list_gives_each_prompt_its_role() -> None:
    assert choose(model="lab:llama", lora_path=["plan", None]) == ["plan", None]


@pytest.mark.parametrize("lora_path", [7, {"name": "plan"}, ["plan", 7]])
def test_a_role_is_a_name(lora_path: Any) -> None:
    with pytest.raises(HTTPException, match="must be the name of a role") as error:
        choose(lora_path=lora_path)
    assert error.value.status_code == 400
