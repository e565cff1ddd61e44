"""Settings are validated once, and every engine option we cannot serve with is refused."""

from __future__ import annotations

import argparse
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from standins import quiet_imports

from precache_sglang.config import (
    SCHEDULES,
    Settings,
    add_cli_args,
    parse_teams,
)
from precache_sglang.errors import SettingsError, UnsupportedError
from precache_sglang.methods import DEFAULT_METHOD, METHODS, OFF, Rows
from precache_sglang.resolution import (
    _REFUSED,
    _REFUSED_ENVIRONMENT,
    _graph_config,
    refuse_unsupported,
)

with quiet_imports():
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
    from sglang.srt.server_args import ServerArgs

# A value of each refused option that is in use, and what SGLang has when it is not.
IN_USE: dict[str, tuple[Any, Any]] = {
    "tp_size": (2, 1),
    "pp_size": (2, 1),
    "dp_size": (2, 1),
    "dcp_size": (2, 1),
    "attn_cp_size": (2, 1),
    "page_size": (16, None),
    "speculative_algorithm": ("EAGLE", None),
    "disaggregation_mode": ("prefill", "null"),
    "kv_cache_dtype": ("fp8_e4m3", "auto"),
    "lora_backend": ("triton_v2", "csgmv"),
    "kv_events_config": ("{}", None),
    "tokenizer_worker_num": (2, 1),
    "dllm_algorithm": ("LowConfidence", None),
}
FLAGS = [flag for flag, *_ in _REFUSED]


class Config:
    """The options of `_REFUSED`, none in use but the ones given."""

    def __init__(self, **given: Any) -> None:
        for _, name, _, _ in _REFUSED:
            setattr(self, name, IN_USE.get(name, (True, False))[1])
        for name, value in given.items():
            setattr(self, name, value)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "METHOD",
        "SCHEDULE",
        "LR_TOKENS",
        "TEAM",
        "MAX_NEUTRAL_WAIT",
        "KERNELS",
        "CUDA_GRAPH",
    ):
        monkeypatch.delenv(f"PRECACHE_{name}", raising=False)
    for name in _REFUSED_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


# -- values ------------------------------------------------------------------


def test_nothing_given_leaves_the_method_open() -> None:
    settings = Settings.from_mapping({})
    assert settings == Settings()
    assert settings.method is None and settings.policy is None
    assert settings.schedule == "auto" and settings.max_neutral_wait_ms == -1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_table_is_a_setting(method: str) -> None:
    assert Settings(method=method).policy is METHODS[method]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_a_setting(schedule: str) -> None:
    assert Settings(schedule=schedule).schedule == schedule


def test_off_has_no_policy() -> None:
    assert Settings(method=OFF).policy is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "sharedbase"}, ("--precache-method", "sharedbase", DEFAULT_METHOD)),
        ({"schedule": "eager"}, ("--precache-schedule", "eager", "lp")),
        ({"lr_tokens": 0}, ("--precache-lr-tokens", "0", "positive")),
        ({"lr_tokens": -5}, ("--precache-lr-tokens", "-5", "positive")),
        ({"max_neutral_wait_ms": -2}, ("--precache-max-neutral-wait", "-2", "-1")),
        ({"metrics_roles": -1}, ("--precache-metrics-roles", "-1", "0")),
        ({"teams": {"a": ["plan"], "b": ["plan"]}}, ("--precache-team", "'plan'", "'a'", "'b'")),
        ({"teams": {"a": ["plan", "plan"]}}, ("--precache-team", "'plan'", "once")),
        ({"teams": {"default": ["plan"]}}, ("--precache-team", "'default'", "another name")),
    ],
)
def test_a_wrong_value_is_refused_with_flag_value_and_remedy(
    values: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as error:
        Settings(**values)
    for part in named:
        assert part in str(error.value)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().method = "nonshared"  # type: ignore[misc]


# -- where they come from ----------------------------------------------------


def test_keyword_arguments_are_read_by_their_flags_names() -> None:
    settings = Settings.from_mapping(
        {
            "precache_method": "prelrshared",
            "precache_schedule": "lp",
            "precache_lr_tokens": "900",
            "precache_team": ["qa=plan,action"],
            "precache_max_neutral_wait": -1,
            "model_path": "ignored",
        }
    )
    assert settings == Settings("prelrshared", "lp", 900, {"qa": ["plan", "action"]}, -1)


def test_the_environment_fills_in_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECACHE_METHOD", "baseshared")
    monkeypatch.setenv("PRECACHE_LR_TOKENS", "700")
    monkeypatch.setenv("PRECACHE_TEAM", "qa=plan,action code=fix")
    settings = Settings.from_mapping({"precache_method": "fullshared"})
    assert settings.method == "fullshared"
    assert settings.lr_tokens == 700
    assert settings.teams == {"qa": ["plan", "action"], "code": ["fix"]}


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "METHOD",
        "SCHEDULE",
        "LR_TOKENS",
        "TEAM",
        "MAX_NEUTRAL_WAIT",
        "KERNELS",
        "CUDA_GRAPH",
    ):
        monkeypatch.setenv(f"PRECACHE_{name}", "")
    assert Settings.from_mapping({}) == Settings()


@pytest.mark.parametrize("value", ["many", "1.5", [], {}])
def test_a_number_that_is_none_is_refused(value: Any) -> None:
    for name, flag in (
        ("precache_lr_tokens", "--precache-lr-tokens"),
        ("precache_max_neutral_wait", "--precache-max-neutral-wait"),
        ("precache_metrics_roles", "--precache-metrics-roles"),
    ):
        with pytest.raises(SettingsError, match=f"{flag} .* is not a whole number"):
            Settings.from_mapping({name: value})


def test_a_wait_of_zero_is_not_taken_for_the_default() -> None:
    assert Settings.from_mapping({"precache_max_neutral_wait": 0}).max_neutral_wait_ms == 0


def test_the_command_lines_flags_reach_the_settings() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    args = parser.parse_args(
        [
            "--precache-method",
            "nonshared",
            "--precache-lr-tokens",
            "50",
            "--precache-team",
            "a=x,y",
            "--precache-team",
            "b=z",
        ]
    )
    settings = Settings.from_mapping(vars(args))
    assert settings == Settings("nonshared", "auto", 50, {"a": ["x", "y"], "b": ["z"]})
    assert Settings.from_mapping(vars(parser.parse_args([]))) == Settings()


def test_settings_travel_on_sglangs_record_through_pickle() -> None:
    server_args = ServerArgs(model_path="dummy")
    assert Settings.of(server_args) is None
    settings = Settings("rebaseshared", lr_tokens=5, teams={"a": ["x"]})
    settings.attach(server_args)
    assert Settings.of(pickle.loads(pickle.dumps(server_args))) == settings


# -- teams -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "teams"),
    [
        (None, {}),
        ("", {}),
        ([], {}),
        ("qa=plan", {"qa": ["plan"]}),
        (["qa= plan , action,"], {"qa": ["plan", "action"]}),
        ("qa=plan,action code=fix", {"qa": ["plan", "action"], "code": ["fix"]}),
        ({"qa": ("plan",)}, {"qa": ["plan"]}),
    ],
)
def test_teams_are_read_from_flags_text_and_mappings(
    value: Any, teams: dict[str, list[str]]
) -> None:
    assert parse_teams(value) == teams


@pytest.mark.parametrize("item", ["plan", "qa=", "=plan", "qa=,", " = "])
def test_a_team_that_is_not_name_and_roles_is_refused(item: str) -> None:
    with pytest.raises(SettingsError, match="NAME=role,role"):
        parse_teams([item])


def test_a_team_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match="'qa' twice"):
        parse_teams(["qa=plan", " qa =action"])


# -- the methods table -------------------------------------------------------


def test_the_methods_table_is_consistent() -> None:
    assert DEFAULT_METHOD in METHODS and OFF not in METHODS
    for name, method in METHODS.items():
        assert method.name == name and method.summary
        # Rows are what base KV lacks, and base KV is of use to others only.
        assert method.base_kv == (method.rows is not Rows.NONE)
        assert method.shared or not method.base_kv
        # Rows of a neutral pass complete a turn whose own rows the adapted pass wrote.
        if method.neutral_base:
            assert method.rows is Rows.OWN and method.neutral_rows is Rows.TEAM
        if method.rows is Rows.NONE:
            assert method.neutral_rows is Rows.NONE


# -- engine options ----------------------------------------------------------


def test_a_plain_engine_is_not_refused() -> None:
    refuse_unsupported(Config())
    refuse_unsupported(Config(page_size=1, kv_cache_dtype="bf16"))


@pytest.mark.parametrize(("flag", "name", "_in_use", "remedy"), _REFUSED, ids=FLAGS)
def test_an_option_in_use_is_refused_with_flag_value_and_remedy(
    flag: str, name: str, _in_use: Any, remedy: str
) -> None:
    value, _ = IN_USE.get(name, (True, False))
    with pytest.raises(UnsupportedError) as error:
        refuse_unsupported(Config(**{name: value}))
    for part in (f"{flag} {value}", remedy, "--precache-method off"):
        assert part in str(error.value)


@pytest.mark.parametrize("name", _REFUSED_ENVIRONMENT)
@pytest.mark.parametrize("value", ["1", "true", "True", "yes", "y"])
def test_a_variable_in_use_is_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=f"{name}={value}.*unset it"):
        refuse_unsupported(Config())


@pytest.mark.parametrize("value", ["0", "false", "no", ""])
def test_a_variable_that_is_off_is_not_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _REFUSED_ENVIRONMENT:
        monkeypatch.setenv(name, value)
    refuse_unsupported(Config())


def test_sglang_knows_every_option_and_flag_that_we_refuse() -> None:
    server_args = ServerArgs(model_path="dummy")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    view = resolving_view(server_args)
    for flag, name, in_use, _ in _REFUSED:
        assert hasattr(server_args, name) and hasattr(view, name), name
        assert flag in known, flag
        assert not in_use(getattr(view, name)), f"{name} is refused at its default"


def test_sglang_knows_every_variable_that_we_refuse() -> None:
    with quiet_imports():
        from sglang.srt.environ import envs
    for name in _REFUSED_ENVIRONMENT:
        assert getattr(envs, name).get() is False


# -- graphs ------------------------------------------------------------------------


def graphs(
    decode: str = "full", prefill: str = "breakable", device: str = "cuda", compiled: bool = False
) -> Any:
    """What SGLang has settled by the time that it asks us."""
    config = CudaGraphConfig(PhaseConfig(backend=decode), PhaseConfig(backend=prefill))
    return SimpleNamespace(
        cuda_graph_config=config,
        device=device,
        enable_torch_compile=compiled,
        debug_cuda_graph=False,
    )


def test_graphs_are_off_unless_asked_for() -> None:
    found = _graph_config(Settings(method="prelrshared"), graphs())
    assert found.decode.backend == found.prefill.backend == "disabled"


def test_decode_steps_alone_are_captured() -> None:
    config = graphs(decode="breakable")
    config.cuda_graph_config.decode.max_bs = 24
    found = _graph_config(Settings(method="prelrshared", cuda_graph=True), config)
    assert (found.decode.backend, found.prefill.backend) == ("full", "disabled")
    assert found.decode.max_bs == 24, "what else the operator said still holds"


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        ({}, graphs(device="cpu"), "the device is cpu"),
        ({"kernels": "torch"}, graphs(), "--precache-kernels is torch"),
        ({}, graphs(decode="disabled"), "--cuda-graph-backend-decode"),
        ({}, graphs(compiled=True), "--enable-torch-compile"),
    ],
)
def test_graphs_that_cannot_be_are_refused(
    settings: dict[str, Any], config: Any, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        _graph_config(Settings(method="prelrshared", cuda_graph=True, **settings), config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precache_kernels": "cuda"}, "--precache-kernels 'cuda'"),
        ({"precache_cuda_graph": "perhaps"}, "--precache-cuda-graph 'perhaps'"),
    ],
)
def test_wrong_kernel_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_mapping(values)


def test_kernel_settings_come_from_flags_and_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Settings.from_mapping({}).kernels == "auto"
    assert not Settings.from_mapping({}).cuda_graph
    assert Settings.from_mapping({"precache_cuda_graph": True}).cuda_graph
    monkeypatch.setenv("PRECACHE_KERNELS", "triton")
    monkeypatch.setenv("PRECACHE_CUDA_GRAPH", "1")
    assert Settings.from_mapping({}) == Settings(kernels="triton", cuda_graph=True)
    assert not Settings.from_mapping({"precache_cuda_graph": "0"}).cuda_graph
