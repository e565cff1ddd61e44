"""Roles: adapters read out of SGLang, their stack, and who writes which rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standins import fake_lora, fake_lora_manager, fake_lora_pool, quiet_imports

from precache_sglang.config import Settings
from precache_sglang.errors import AdapterError
from precache_sglang.methods import METHODS
from precache_sglang.roles import (
    COMMON_ROWS,
    Adapter,
    RoleRegistry,
    read_adapter,
    registered_names,
    targets_k,
    validate_config,
)

HIDDEN, KV_SIZE = 8, 4


pytestmark = pytest.mark.usefixtures("one_thread")


def registry(
    method: str = "prelrshared",
    width: int = 8,
    has_k: bool = False,
    teams: dict[str, list[str]] | None = None,
) -> RoleRegistry:
    return RoleRegistry(METHODS[method], teams or {}, width, has_k)


def read(
    roles: RoleRegistry,
    name: str,
    lora: Any,
    lora_id: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Adapter:
    pool = fake_lora_pool(max_rank=8)
    return read_adapter(
        lora_id or f"id-{name}", name, lora, pool, roles, torch.device("cpu"), dtype, KV_SIZE
    )


def add(roles: RoleRegistry, name: str, lora: Any, lora_id: str | None = None) -> Adapter:
    adapter = read(roles, name, lora, lora_id)
    roles.add(adapter)
    return adapter


# -- reading an adapter --------------------------------------------------------------


def test_a_and_b_of_k_and_v_are_taken_out_of_sglangs_stack() -> None:
    lora = fake_lora(rank=2, targets=("q_proj", "k_proj", "v_proj"), alpha=6)
    adapter = read(registry(has_k=True), "plan", lora)
    assert adapter.rank == 2 and adapter.v is not None and adapter.k is not None
    for layer, weights in enumerate(lora.layers):
        a = next(w for n, w in weights.weights.items() if "lora_A" in n)
        b = next(w for n, w in weights.weights.items() if "lora_B" in n)
        assert torch.equal(adapter.k.a[layer], a[2:4])
        assert torch.equal(adapter.v.a[layer], a[4:6])
        # q's rows come first in B; the scale, alpha / r = 3, is in B and not in A.
        assert torch.equal(adapter.k.b[layer], 3 * b[HIDDEN : HIDDEN + KV_SIZE].T)
        assert torch.equal(adapter.v.b[layer], 3 * b[HIDDEN + KV_SIZE :].T)


def test_the_delta_of_the_projections_is_the_adapters() -> None:
    lora = fake_lora(rank=2, targets=("q_proj", "v_proj"), alpha=6)
    adapter = read(registry(), "plan", lora)
    assert adapter.v is not None
    x = torch.randn(5, HIDDEN)
    weights = lora.layers[1].weights
    a = next(w for n, w in weights.items() if "lora_A" in n)[4:]
    b = next(w for n, w in weights.items() if "lora_B" in n)[-KV_SIZE:]
    torch.testing.assert_close((x @ adapter.v.a[1].T) @ adapter.v.b[1], 3.0 * (x @ a.T) @ b.T)


def test_the_scale_is_multiplied_in_before_rounding() -> None:
    lora = fake_lora(rank=3, alpha=1, targets=("q_proj", "v_proj"))
    adapter = read(registry(), "plan", lora, dtype=torch.bfloat16)
    assert adapter.v is not None and adapter.v.a[0].dtype == torch.bfloat16
    b = next(w for n, w in lora.layers[0].weights.items() if "lora_B" in n)[-KV_SIZE:]
    assert torch.equal(adapter.v.b[0], (b / 3).bfloat16().T)


def test_an_adapter_without_k_proj_has_no_key_rows() -> None:
    lora = fake_lora(targets=("q_proj", "v_proj"))
    assert not targets_k(lora)
    adapter = read(registry(has_k=True), "plan", lora)
    assert adapter.k is None and adapter.v is not None


def test_an_adapter_of_neither_k_nor_v_needs_no_rows() -> None:
    adapter = read(registry(), "plan", fake_lora(targets=("o_proj", "down_proj")))
    assert (adapter.rows_key, adapter.k, adapter.v) == (None, None, None)
    assert adapter.content


@pytest.mark.parametrize("method", ["nonshared", "fullshared"])
def test_methods_that_store_complete_kv_keep_no_rows(method: str) -> None:
    adapter = read(registry(method), "plan", fake_lora(targets=("q_proj", "k_proj", "v_proj")))
    assert (adapter.rows_key, adapter.k, adapter.v) == (None, None, None)


def test_a_target_may_be_given_by_its_path() -> None:
    lora = fake_lora(targets=("q_proj", "v_proj"))
    lora.config.target_modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    assert targets_k(lora)


# -- content -------------------------------------------------------------------------


def test_the_same_weights_under_another_name_have_one_content() -> None:
    roles = registry()
    first = read(roles, "plan", fake_lora(seed=1), lora_id="1")
    again = read(roles, "action", fake_lora(seed=1), lora_id="2")
    assert first.content == again.content
    assert first.rows_key == again.rows_key == first.content


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"rank": 4},
        {"alpha": 7},
        {"targets": ("q_proj", "k_proj", "v_proj")},
        {"targets": ("q_proj", "v_proj", "o_proj")},
        {"num_layers": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_anything_else_has_another_content(change: dict[str, Any]) -> None:
    roles = registry(has_k=True)
    first = read(roles, "plan", fake_lora(**{"seed": 1}))
    other = read(roles, "plan", fake_lora(**{"seed": 1} | change))
    assert first.content != other.content


def test_one_changed_weight_is_another_content() -> None:
    changed = fake_lora(seed=1, targets=("q_proj", "v_proj", "o_proj"))
    name = next(n for n in changed.layers[1].weights if "o_proj.lora_B" in n)
    changed.layers[1].weights[name][0, 0] += 1e-3
    roles = registry()
    first = read(roles, "plan", fake_lora(seed=1, targets=("q_proj", "v_proj", "o_proj")))
    assert first.content != read(roles, "plan", changed).content


def test_bfloat16_weights_have_a_content_too() -> None:
    lora = fake_lora()
    for layer in lora.layers:
        layer.weights = {name: weight.bfloat16() for name, weight in layer.weights.items()}
    assert read(registry(), "plan", lora).content != read(registry(), "plan", fake_lora()).content


# -- the stack -----------------------------------------------------------------------


def test_a_stack_without_adapters_is_empty() -> None:
    roles = registry()
    assert roles.stack == [] and roles.blocks == {}


def test_mixed_ranks_are_padded_with_zeros_to_the_pools_width() -> None:
    roles = registry(width=8)
    small = add(roles, "plan", fake_lora(seed=1, rank=2))
    large = add(roles, "action", fake_lora(seed=2, rank=8))
    assert roles.blocks == {small.rows_key: 0, large.rows_key: 1}
    assert small.v is not None and large.v is not None
    for layer, stack in enumerate(roles.stack):
        assert stack.shape == (2 * 8, HIDDEN)
        blocks = stack.view(2, 8, HIDDEN)
        assert torch.equal(blocks[0, :2], small.v.a[layer])
        assert not blocks[0, 2:].any()
        assert torch.equal(blocks[1], large.v.a[layer])


def test_a_stack_with_keys_holds_v_then_k_of_each_adapter() -> None:
    roles = registry(width=4, has_k=True)
    with_k = add(roles, "plan", fake_lora(seed=1, targets=("q_proj", "k_proj", "v_proj")))
    without = add(roles, "action", fake_lora(seed=2))
    assert with_k.v is not None and with_k.k is not None and without.v is not None
    blocks = roles.stack[1].view(2, 2, 4, HIDDEN)
    assert torch.equal(blocks[0, 0, :2], with_k.v.a[1])
    assert torch.equal(blocks[0, 1, :2], with_k.k.a[1])
    assert torch.equal(blocks[1, 0, :2], without.v.a[1])
    assert not blocks[1, 1].any()


def test_equal_adapters_share_one_block() -> None:
    roles = registry()
    add(roles, "plan", fake_lora(seed=1), lora_id="1")
    add(roles, "twin", fake_lora(seed=1), lora_id="2")
    add(roles, "action", fake_lora(seed=2), lora_id="3")
    assert len(roles.blocks) == 2 and len(roles.adapters) == 3
    assert roles.stack[0].shape == (2 * 8, HIDDEN)


def test_adapters_without_rows_take_no_block() -> None:
    roles = registry()
    add(roles, "plan", fake_lora(targets=("o_proj",)))
    assert roles.blocks == {} and roles.stack == []
    action = add(roles, "action", fake_lora(seed=2))
    assert roles.blocks == {action.rows_key: 0}


def test_removing_an_adapter_takes_its_block_out() -> None:
    roles = registry()
    plan = add(roles, "plan", fake_lora(seed=1))
    action = add(roles, "action", fake_lora(seed=2))
    assert roles.remove(plan.lora_id) == plan.rows_key
    assert roles.blocks == {action.rows_key: 0}
    assert action.v is not None
    assert torch.equal(roles.stack[0][:2], action.v.a[0])
    assert roles.remove(action.lora_id) == action.rows_key
    assert roles.stack == [] and roles.adapters == {}


def test_slices_outlive_one_of_two_equal_adapters() -> None:
    roles = registry()
    add(roles, "plan", fake_lora(seed=1), lora_id="1")
    twin = add(roles, "twin", fake_lora(seed=1), lora_id="2")
    assert roles.remove("1") is None, "the other one still reads them"
    assert roles.remove("2") == twin.rows_key


def test_removing_an_adapter_without_rows_drops_no_slices() -> None:
    roles = registry()
    add(roles, "plan", fake_lora(targets=("o_proj",)), lora_id="1")
    assert roles.remove("1") is None


# -- who writes which rows -------------------------------------------------------------

TEAMS = {"qa": ["plan", "action", "mlp"], "other": ["stranger"]}


def team_registry(method: str) -> tuple[RoleRegistry, dict[str, Adapter]]:
    """Two roles with rows and one without in team qa, one role each in two other teams."""
    roles = registry(method, teams=TEAMS)
    common = 99 if method == "baselrshared" else None
    adapters = {
        name: add(roles, name, fake_lora(seed=seed, a_seed=common))
        for seed, name in enumerate(("plan", "action", "stranger", "teamless"))
    }
    if method != "baselrshared":  # it needs equal A in every adapter
        adapters["mlp"] = add(roles, "mlp", fake_lora(targets=("o_proj",)))
    return roles, adapters


def written(method: str, role: str | None, team: str, leave_out: str | None = None) -> list[str]:
    """Names of the roles whose rows the pass writes; ``common`` stays as it is."""
    roles, adapters = team_registry(method)
    adapter = adapters[role] if role else None
    key = adapters[leave_out].rows_key if leave_out else None
    names = {a.rows_key: name for name, a in adapters.items() if a.rows_key != COMMON_ROWS}
    return [names.get(key, key) for key in roles.rows_written(adapter, team, leave_out=key)]


@pytest.mark.parametrize(
    ("method", "role", "team", "expected"),
    [
        ("nonshared", "plan", "qa", []),
        ("nonshared", None, "qa", []),
        ("fullshared", "plan", "qa", []),
        ("fullshared", None, "qa", []),
        ("baseshared", "plan", "qa", ["plan"]),
        ("baseshared", "action", "qa", ["action"]),
        ("baseshared", "mlp", "qa", []),
        ("baseshared", None, "qa", []),
        ("baselrshared", "plan", "qa", ["common"]),
        ("baselrshared", None, "qa", ["common"]),
        ("prelrshared", "plan", "qa", ["plan", "action"]),
        ("prelrshared", "action", "qa", ["action", "plan"]),
        ("prelrshared", "mlp", "qa", ["plan", "action"]),
        ("prelrshared", "stranger", "other", ["stranger"]),
        ("prelrshared", "teamless", "default", ["teamless"]),
        ("prelrshared", None, "qa", ["plan", "action"]),
        ("prelrshared", None, "nobody", []),
        ("rebaseshared", "plan", "qa", ["plan"]),
        ("rebaseshared", "mlp", "qa", []),
        ("rebaseshared", None, "qa", ["plan", "action"]),
        ("rebaseshared", None, "other", ["stranger"]),
    ],
)
def test_a_pass_writes_the_rows_its_method_says(
    method: str, role: str | None, team: str, expected: list[str]
) -> None:
    assert written(method, role, team) == expected


def test_a_neutral_pass_leaves_out_the_role_whose_turn_it_rebuilds() -> None:
    assert written("rebaseshared", None, "qa", leave_out="plan") == ["action"]
    assert written("rebaseshared", None, "qa", leave_out="action") == ["plan"]
    # A role of another team changes nothing, nor does one that needs no rows.
    assert written("rebaseshared", None, "qa", leave_out="stranger") == ["plan", "action"]
    assert written("rebaseshared", None, "qa", leave_out="mlp") == ["plan", "action"]


def test_equal_adapters_of_a_team_are_written_once() -> None:
    roles = registry("prelrshared")
    plan = add(roles, "plan", fake_lora(seed=1), lora_id="1")
    add(roles, "twin", fake_lora(seed=1), lora_id="2")
    action = add(roles, "action", fake_lora(seed=2), lora_id="3")
    assert roles.rows_written(plan, "default", leave_out=None) == [plan.rows_key, action.rows_key]


def test_no_common_rows_are_written_for_adapters_without_any() -> None:
    roles = registry("baselrshared")
    plan = add(roles, "plan", fake_lora(targets=("o_proj",)))
    assert roles.rows_written(plan, "default", leave_out=None) == []


def test_roles_that_no_team_lists_form_one_more() -> None:
    roles, _ = team_registry("prelrshared")
    assert [a.name for a in roles.of_team("qa")] == ["plan", "action", "mlp"]
    assert [a.name for a in roles.of_team("default")] == ["teamless"]
    assert roles.team_of("never heard of") == "default"


def test_requests_without_an_adapter_belong_to_the_first_team() -> None:
    assert registry(teams=TEAMS).base_team() == "qa"
    assert registry().base_team() == "default"


# -- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"a_seed": 8},
        {"a_seed": 7, "rank": 4},
        {"a_seed": 7, "targets": ("q_proj", "k_proj", "v_proj")},
        {"targets": ("o_proj",)},
    ],
    ids=["other A", "other rank", "one adapts k", "one adapts neither"],
)
def test_baselrshared_refuses_adapters_with_different_a(other: dict[str, Any]) -> None:
    roles = registry("baselrshared", has_k=True)
    add(roles, "plan", fake_lora(seed=1, a_seed=7))
    with pytest.raises(AdapterError, match=r"'action' and 'plan' differ.*prelrshared"):
        add(roles, "action", fake_lora(seed=2, **other))
    assert list(roles.adapters) == ["id-plan"]


def test_baselrshared_takes_adapters_with_one_a() -> None:
    roles = registry("baselrshared")
    plan = add(roles, "plan", fake_lora(seed=1, a_seed=7))
    action = add(roles, "action", fake_lora(seed=2, a_seed=7, alpha=9))
    assert plan.rows_key == action.rows_key == COMMON_ROWS
    assert plan.content != action.content
    assert roles.blocks == {COMMON_ROWS: 0}
    assert roles.remove(plan.lora_id) is None, "action still reads the common rows"


def test_a_rank_above_the_servers_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"'plan' has rank 16.*--max-lora-rank 16"):
        read(registry(), "plan", fake_lora(rank=16))


def test_key_rows_without_room_for_them_are_refused() -> None:
    lora = fake_lora(targets=("q_proj", "k_proj", "v_proj"))
    with pytest.raises(AdapterError, match=r"'plan' adapts k_proj.*--lora-target-modules"):
        read(registry(has_k=False), "plan", lora)


def test_an_adapter_of_another_model_is_refused() -> None:
    with pytest.raises(AdapterError, match="'plan' has no tensor"):
        read(registry(), "plan", fake_lora(targets=()))


def test_an_adapter_of_only_some_layers_is_refused() -> None:
    lora = fake_lora(num_layers=3)
    lora.layers[1].weights.clear()
    with pytest.raises(AdapterError, match="in 2 of 3 layers"):
        read(registry(), "plan", lora)


def spoil(weights: dict[str, torch.Tensor], name: str, how: str) -> None:
    name = next(n for n in weights if name in n)
    match how:
        case "drop":
            del weights[name]
        case "narrow":
            weights[name] = weights[name][:, :-1]
        case "shorten":
            weights[name] = weights[name][:-1]
        case "infinite":
            weights[name][0, 0] = float("inf")
        case "rename":
            weights[name.replace("qkv_proj", "c_attn")] = weights.pop(name)


@pytest.mark.parametrize(
    ("tensor", "how", "message"),
    [
        ("lora_A", "narrow", "has shape .* need .*another model"),
        ("lora_A", "shorten", "has shape .* need .*another model"),
        ("lora_B", "narrow", "has shape .* need .*another model"),
        ("lora_B", "shorten", "has shape .* need .*another model"),
        ("lora_A", "infinite", "not finite"),
        ("lora_B", "infinite", "not finite"),
        ("lora_A", "drop", "has lora_B only"),
        ("lora_B", "drop", "has lora_A only"),
        ("lora_B", "rename", "no LoRA of this server takes .*c_attn"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensor: str, how: str, message: str) -> None:
    lora = fake_lora()
    spoil(lora.layers[1].weights, tensor, how)
    with pytest.raises(AdapterError, match=f"'plan'.*{message}"):
        read(registry(), "plan", lora)


CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": None}, "no 'r'"),
        ({"r": 0}, "r=0"),
        ({"r": "8"}, "r='8'"),
        ({"lora_alpha": None}, "no 'lora_alpha'"),
        ({"target_modules": None}, "no 'target_modules'"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"v_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"v_proj": 4}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ["v_proj"]}, "needs both q_proj and v_proj"),
        ({"target_modules": ["q_proj"]}, "needs both q_proj and v_proj"),
        ({"target_modules": ["k_proj", "q_proj"]}, "needs both q_proj and v_proj"),
        ({"target_modules": ["up_proj"]}, "needs gate_proj"),
    ],
)
def test_adapters_that_would_be_served_wrongly_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message) as error:
        validate_config("plan", CONFIG | change, METHODS["prelrshared"], has_qk_norm=False)
    assert "'plan'" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bias": "none", "rank_pattern": {}, "modules_to_save": None},
        {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        {"target_modules": ["self_attn.q_proj", "self_attn.v_proj"]},
        {"use_rslora": True},
    ],
)
def test_ordinary_adapters_are_taken(change: dict[str, Any]) -> None:
    validate_config("plan", CONFIG | change, METHODS["prelrshared"], has_qk_norm=False)


def test_adapted_keys_of_a_model_that_normalises_them_are_refused_where_base_is_shared() -> None:
    config = CONFIG | {"target_modules": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(AdapterError, match="normalises keys"):
        validate_config("plan", config, METHODS["rebaseshared"], has_qk_norm=True)
    validate_config("plan", config, METHODS["fullshared"], has_qk_norm=True)
    validate_config("plan", CONFIG, METHODS["rebaseshared"], has_qk_norm=True)


# -- against SGLang ------------------------------------------------------------------


def test_sglang_stacks_as_the_stand_in_does() -> None:
    with quiet_imports():
        from sglang.srt.lora.lora import LoRAAdapter
    q, k, v = (torch.full((2, HIDDEN), float(i)) for i in (1, 2, 3))
    q_b, k_b, v_b = (torch.full((n, 2), float(i)) for i, n in ((1, HIDDEN), (2, 4), (3, 4)))
    prefix = "base_model.model.model.layers.0.self_attn"
    weights = {}
    for name, a, b in (("q_proj", q, q_b), ("k_proj", k, k_b), ("v_proj", v, v_b)):
        weights[f"{prefix}.{name}.lora_A.weight"] = a
        weights[f"{prefix}.{name}.lora_B.weight"] = b
    without_k = {name: weight for name, weight in weights.items() if "k_proj" not in name}
    for given, has_k in ((weights, True), (without_k, False)):
        LoRAAdapter.normalize_qkv_proj(None, list(given), given)
        made = fake_lora(targets=("q_proj", "k_proj", "v_proj") if has_k else ("q_proj", "v_proj"))
        expected = made.layers[0].weights
        assert {n: w.shape for n, w in given.items()} == {n: w.shape for n, w in expected.items()}
        a = given[f"{prefix}.qkv_proj.lora_A.weight"]
        assert a[:, 0].tolist() == [1, 1, 2 * has_k, 2 * has_k, 3, 3]


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_their_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang scales every adapter by alpha / r; we correct both its scale and ours."""
    with quiet_imports():
        from precache_sglang import runtime as module
    monkeypatch.setattr(module, "_raw_target_modules", set)
    monkeypatch.setattr(module, "_current", None)
    loras = {
        "plan": fake_lora(seed=1, rank=4, alpha=6, use_rslora=True),
        "action": fake_lora(seed=1, rank=4, alpha=6),
    }
    method = METHODS["prelrshared"]
    runtime = module.Runtime(Settings(method=method.name), method, fake_lora_manager(loras))
    assert loras["plan"].scaling == 3.0, "6 / sqrt(4)"
    assert loras["action"].scaling == 1.5, "6 / 4"
    plan, action = runtime.roles.adapters["plan"], runtime.roles.adapters["action"]
    assert plan.v is not None and action.v is not None
    torch.testing.assert_close(plan.v.b[0], 2 * action.v.b[0])
    assert plan.content != action.content


def test_names_come_from_sglangs_registry() -> None:
    manager = SimpleNamespace(
        lora_refs={
            "1": SimpleNamespace(lora_name="plan"),
            "2": SimpleNamespace(lora_name=None),
        }
    )
    assert registered_names(manager) == {"1": "plan", "2": "2"}
