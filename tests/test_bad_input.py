"""Bad input gets a clear error from a server that loses nothing by it.

Real servers over HTTP. The tests that start their own server come first, so that only
one runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from precache_sglang.launch.model import demo_adapters, ensure_demo_model
from precache_sglang.launch.process import ServerError, ServerProcess
from safetensors.torch import load_file, save_file
from sglang.srt.sampling.sampling_params import SamplingParams
from tiny import make_adapter
from torch import Tensor

CONTEXT = 512
LR_TOKENS = 300
SMALL = ["--skip-tokenizer-init", "--dtype", "float32", "--log-level", "warning"]
SMALL += ["--max-total-tokens", "2048", "--max-running-requests", "8"]
SMALL += ["--context-length", str(CONTEXT), "--max-loras-per-batch", "4"]


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 256) for _ in range(count)]


def request(num_tokens: int = 20, **changes: Any) -> dict[str, Any]:
    """A good request to ``/generate`` with `changes`; ``sampling`` changes its parameters."""
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    sampling |= changes.pop("sampling", {})
    body: dict[str, Any] = {"input_ids": tokens(num_tokens), "lora_path": "plan"}
    return body | {"sampling_params": sampling} | changes


def refused(server: ServerProcess, path: str, body: dict[str, Any]) -> str:
    """The error text of a request that must be answered with status 4xx."""
    with pytest.raises(ServerError) as error:
        server.post(path, body, timeout=60)
    text = str(error.value)
    assert text.startswith("4"), text
    return text


def at_rest(server: ServerProcess) -> dict[str, Any]:
    """The state once no neutral tokens are owed; checked to be sound."""
    state = server.wait_for_backlog(timeout=60)
    assert state["problems"] == []
    assert state["lr_slots_pinned"] == 0
    assert state["base_tokens_in_use"] == state["base_tokens"] + state["own_base_tokens"]
    assert state["lr_slots_in_use"] == state["lr_slots_evictable"]
    return {
        name: state[name]
        for name in ("tree_nodes", "base_tokens", "lr_slots_in_use", "teams", "lr")
    }


# -- at start-up -------------------------------------------------------------


def failed_start(server: ServerProcess) -> str:
    """The log of a server that must end by itself, with a status other than 0."""
    with pytest.raises(ServerError, match=r"The server ended with status -?[1-9]"), server:
        pass
    return server.log()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--page-size", "16"], ("--page-size 16", "use 1")),
        (["--tp-size", "2"], ("--tp-size 2", "use 1")),
        (["--enable-mixed-chunk"], ("--enable-mixed-chunk True", "leave it out")),
        (["--precache-lr-tokens", "0"], ("--precache-lr-tokens 0", "positive")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_engine_option_that_we_cannot_serve_with_ends_the_start(
    args: list[str], named: tuple[str, ...], model: Path, adapters: dict[str, Path]
) -> None:
    server = ServerProcess(model, adapters, [*SMALL, *args], start_timeout=60)
    last = failed_start(server).strip().splitlines()[-1]
    assert last.startswith("precache-sglang: ")
    for part in named:
        assert part in last


def test_too_few_adapter_slots_end_the_start(model: Path, adapters: dict[str, Path]) -> None:
    log = failed_start(ServerProcess(model, adapters, [*SMALL, "--max-loras-per-batch", "2"]))
    assert "--max-loras-per-batch 2 with 2 adapters" in log
    assert "start with --max-loras-per-batch 3" in log


def test_unequal_a_ends_the_start_of_baselrshared(model: Path, adapters: dict[str, Path]) -> None:
    log = failed_start(
        ServerProcess(model, adapters, [*SMALL, "--precache-method", "baselrshared"])
    )
    assert "baselrshared needs adapters with one common A" in log
    assert "'plan'" in log and "'action'" in log and "prelrshared" in log


# -- baselrshared ------------------------------------------------------------


def test_baselrshared_refuses_to_load_an_adapter_with_another_a(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    plan = adapters["plan"]
    same = make_adapter(tmp_path / "same", model, seed=5, share_a_with=plan)
    args = [*SMALL, "--precache-method", "baselrshared"]
    with ServerProcess(model, {"plan": plan, "same": same}, args) as server:
        good = server.post("/generate", request())["output_ids"]
        before = at_rest(server)
        other = {"lora_name": "other", "lora_path": str(adapters["action"])}
        text = refused(server, "/load_lora_adapter", other)
        assert "'other'" in text and "'plan'" in text and "prelrshared" in text
        assert "other" in refused(server, "/generate", request(lora_path="other"))
        assert at_rest(server) == before
        assert server.post("/generate", request())["output_ids"] == good
        # The name is free for an adapter that fits.
        third = make_adapter(tmp_path / "third", model, seed=6, share_a_with=plan)
        server.post("/load_lora_adapter", {"lora_name": "other", "lora_path": str(third)})
        answer = server.post("/generate", request(lora_path="other"))
        assert answer["meta_info"]["precache"]["shared"] == 19
        at_rest(server)


# -- OpenAI endpoints --------------------------------------------------------


def test_openai_endpoints_refuse_names_and_values_that_they_do_not_know() -> None:
    args = ["--served-model-name", "smollm2", "--precache-method", "prelrshared"]
    args += ["--max-total-tokens", "4000", "--max-loras-per-batch", "4", "--log-level", "warning"]
    args += ["--context-length", "2000"]
    prompt = "Question: Why is the sky blue?\n\nThought:"

    def ask(model: str, **changes: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return body | changes

    with ServerProcess(ensure_demo_model(), demo_adapters(), args) as server:
        answers = {
            model: server.post("/v1/completions", ask(model))["choices"][0]["text"]
            for model in ("smollm2", "smollm2:plan", "plan", "default")
        }
        assert answers["plan"] == answers["smollm2:plan"] != answers["smollm2"]
        assert answers["default"] == answers["smollm2"]
        before = at_rest(server)
        for path, body, named in (
            ("completions", ask("smollm2:nobody"), ("nobody",)),
            ("completions", ask("nobody"), ("'nobody'", "smollm2", "plan, action, reflect")),
            ("completions", ask("smollm2", lora_path="nobody"), ("nobody",)),
            ("completions", ask("smollm2", lora_path=""), ("lora_path is empty",)),
            ("completions", ask("plan", prompt={"a": 1}), ("prompt",)),
            ("completions", ask("plan", max_tokens="x"), ("max_tokens",)),
            ("completions", ask("plan", prompt="sky " * 3000), ("context length",)),
            (
                "chat/completions",
                {"model": "nobody", "messages": [{"role": "user", "content": "Hello"}]},
                ("'nobody'",),
            ),
            ("chat/completions", {"model": "plan", "messages": "Hello"}, ("messages",)),
        ):
            text = refused(server, f"/v1/{path}", body)
            for part in named:
                assert part in text, (body, text)
            assert at_rest(server) == before
        again = server.post("/v1/completions", ask("plan"))["choices"][0]["text"]
        assert again == answers["plan"]


# -- requests ----------------------------------------------------------------


@pytest.fixture(scope="module")
def running(model: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    args = [*SMALL, "--precache-method", "rebaseshared", "--precache-lr-tokens", str(LR_TOKENS)]
    # Else SGLang refuses hidden states before we can.
    args += ["--enable-return-hidden-states"]
    with ServerProcess(model, adapters, args) as server:
        # The first answer is of an adapted context, later ones of its neutral base: only
        # from the second on are they all the same.
        for _ in range(2):
            server.post("/generate", request())
            at_rest(server)
        yield server


@pytest.fixture
def server(running: ServerProcess) -> Iterator[ServerProcess]:
    """The running server. After the test it must be whole and hold what it held before."""
    good = running.post("/generate", request())["output_ids"]
    before = at_rest(running)
    yield running
    assert running.alive()
    running.get("/health")
    assert at_rest(running) == before
    assert running.post("/generate", request())["output_ids"] == good


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lora_path": "nobody"}, ["nobody"]),
        ({"lora_path": ""}, ["lora_path is empty"]),
        ({"lora_path": ["plan"]}, ["lora_path is a list", "one prompt"]),
        ({"lora_path": ["plan", "action"]}, ["lora_path is a list", "one prompt"]),
        ({"lora_path": 7}, ["lora_path"]),
        ({"lora_path": {"name": "plan"}}, ["lora_path"]),
        ({"cache_salt": 5}, ["cache_salt"]),
        ({"cache_salt": {"tenant": 5}}, ["cache_salt"]),
        ({"extra_key": ["a"]}, ["extra_key"]),
        ({"input_ids": []}, ["input_ids"]),
        ({"input_ids": ["a", "b"]}, ["input_ids"]),
        ({"input_ids": [5, 3.5]}, ["input_ids"]),
        ({"input_ids": [30, 100000]}, ["input_ids", "100000", "0 to 255"]),
        ({"input_ids": [30, -3]}, ["input_ids", "-3", "0 to 255"]),
        ({"input_ids": tokens(CONTEXT + 100)}, [str(CONTEXT), "context length"]),
        (
            {"input_ids": tokens(LR_TOKENS + 100)},
            ["--precache-lr-tokens", str(LR_TOKENS), str(LR_TOKENS + 101), "larger pool"],
        ),
        ({"input_ids": None, "input_embeds": [[0.1] * 64] * 3}, ["input_embeds"]),
        ({"return_hidden_states": True}, ["return_hidden_states", "leave it out"]),
        ({"lora_path": None, "sampling": {"beam_width": 2}}, ["beam search", "leave it out"]),
        ({"sampling": {"beam_width": 2}}, ["eam search"]),
        ({"session_id": "one"}, ["session_id", "leave it out"]),
        ({"session_params": {"id": "nowhere"}}, ["session_params", "leave it out"]),
        ({"sampling": {"max_new_tokens": -1}}, ["max_new_tokens"]),
        ({"sampling": {"no_such_parameter": 1}}, ["no_such_parameter"]),
        (
            {"input_ids": [tokens(9)] * 3, "lora_path": ["plan", None, "nobody"]},
            ["nobody"],
        ),
        (
            {"input_ids": [tokens(9)] * 3, "lora_path": ["plan", "action"]},
            ["lora_path lists 2 roles for 3 prompts"],
        ),
        ({"input_ids": [tokens(9)], "lora_path": ["plan"] * 2}, ["2 roles for 1 prompts"]),
        ({"input_ids": [tokens(9)] * 2, "lora_path": ["plan", ""]}, ["lora_path is empty"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_refused_by_name(
    change: dict[str, Any], named: list[str], server: ServerProcess
) -> None:
    text = refused(server, "/generate", request(**change))
    for part in named:
        assert part in text


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_no_type_of_a_sampling_parameter_ends_the_server(
    field: str, running: ServerProcess
) -> None:
    for value in (5, -7.5, "x", [1], ["a", None], {"a": 1}, {"a": {"b": []}}, True):
        sampling = {"max_new_tokens": 2, field: value}
        with contextlib.suppress(ServerError):
            running.call("POST", "/generate", request(sampling=sampling), timeout=20)
        assert running.alive(), f"{field} = {value!r}"
    # Some of it is taken for what it is, and served: another output, which stays in the cache.
    at_rest(running)
    if field == "custom_params":
        text = refused(running, "/generate", request(sampling={"custom_params": 5}))
        assert "custom_params 5 is not an object" in text


def test_a_request_to_an_open_session_is_refused(server: ServerProcess) -> None:
    session = server.post("/open_session", {"capacity_of_str_len": 100})
    text = refused(server, "/generate", request(session_params={"id": session}))
    assert "session_params is not supported" in text
    server.post("/close_session", {"session_id": session})


@pytest.mark.parametrize("text", ["", "{", '{"input_ids": [1, 2', "[]", "null", "7", "\x00"])
def test_text_that_is_no_request_is_refused(text: str, server: ServerProcess) -> None:
    raw = urllib.request.Request(
        f"{server.url}/generate",
        data=text.encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as error:
        opener.open(raw, timeout=60)
    with error.value:
        assert 400 <= error.value.code < 500


def test_one_role_or_one_for_each_prompt_is_served(running: ServerProcess) -> None:
    prompts = [tokens(9, seed) for seed in range(3)]
    for roles in ("plan", ["plan", None, "action"]):
        answers = running.post("/generate", request(input_ids=prompts, lora_path=roles))
        assert len(answers) == 3
    answers = running.post("/generate", request(input_ids=prompts[:1], lora_path=["plan"]))
    assert len(answers) == 1
    samples = running.post("/generate", request(lora_path=["plan"], sampling={"n": 2}))
    assert len(samples) == 2
    at_rest(running)


# -- the row pool ------------------------------------------------------------


def test_an_answer_ends_where_the_row_pool_does(running: ServerProcess) -> None:
    """As SGLang bounds an answer by the KV pool, instead of failing in its middle."""
    answer = running.post(
        "/generate", request(LR_TOKENS - 20, sampling={"max_new_tokens": 60}), timeout=60
    )
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 20
    at_rest(running)


def test_a_finished_turn_makes_room_for_an_answer_that_fits(running: ServerProcess) -> None:
    """Rows that wait for their neutral pass must not starve a running request."""
    answers: dict[str, Any] = {}

    def ask(role: str, num_tokens: int, num_output: int) -> None:
        body = request(num_tokens, lora_path=role, sampling={"max_new_tokens": num_output})
        body["input_ids"] = tokens(num_tokens, seed=num_tokens)
        answers[role] = running.post("/generate", body, timeout=120)

    long = threading.Thread(target=ask, args=("plan", 21, LR_TOKENS - 30))
    long.start()
    ask("action", 100, 2)
    long.join()
    assert len(answers["action"]["output_ids"]) == 2
    assert len(answers["plan"]["output_ids"]) == LR_TOKENS - 30
    at_rest(running)


# -- adapters ----------------------------------------------------------------

Tensors = dict[str, Tensor]


def config(**changes: Any) -> Callable[[Path], None]:
    """Change ``adapter_config.json``; None takes a field out."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))

    return change


def weights(edit: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(edit(load_file(path)), path)

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return weights(lambda found: {k.replace(old, new): v for k, v in found.items()})


def without(*parts: str) -> Callable[[Path], None]:
    return weights(lambda found: {k: v for k, v in found.items() if not all(p in k for p in parts)})


def file(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return change


def cut_in_half(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BAD_ADAPTERS: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, list[str]]] = {
    # name: (arguments of make_adapter, what is done to the folder, what the error names)
    "tensors-of-another-model": (
        {},
        renamed("model.layers", "transformer.h"),
        ["no tensor that belongs to this model"],
    ),
    "modules-of-another-model": (
        {},
        weights(
            lambda found: {
                k.replace("q_proj", "query").replace("v_proj", "value"): v for k, v in found.items()
            }
        ),
        ["self_attn.query", "another architecture"],
    ),
    "too-many-layers": ({}, renamed("layers.2", "layers.7"), ["7"]),
    "a-layer-too-few": ({}, without("layers.2"), ["2 of 3 layers"]),
    "half-a-pair": ({}, without("layers.1", "lora_B"), ["layer 1", "lora_A only"]),
    "another-width": (
        {},
        weights(
            lambda found: {
                k: v[:, :32].contiguous() if "lora_A" in k else v for k, v in found.items()
            }
        ),
        ["shape (24, 32)", "(24, 64)"],
    ),
    "not-finite": (
        {},
        weights(lambda found: {k: v * float("nan") for k, v in found.items()}),
        ["not finite"],
    ),
    "another-rank-than-it-says": ({}, config(r=4), ["shape (24, 64)", "r=4"]),
    "rank-too-large": ({"r": 16}, None, ["rank 16", "--max-lora-rank 16"]),
    "rank-zero": ({}, config(r=0), ["r=0", "positive"]),
    "rank-as-text": ({}, config(r="8"), ["r='8'", "whole number"]),
    "no-rank": ({}, config(r=None), ["'r'", "PEFT"]),
    "no-alpha": ({}, config(lora_alpha=None), ["'lora_alpha'", "PEFT"]),
    "no-targets": ({}, config(target_modules=None), ["'target_modules'", "PEFT"]),
    "targets-as-pattern": ({}, config(target_modules=".*attn.*"), [".*attn.*", "list"]),
    "embeddings": (
        {},
        config(target_modules=["q_proj", "v_proj", "embed_tokens"]),
        ["embed_tokens", "supported are"],
    ),
    "made-up-module": (
        {},
        config(target_modules=["q_proj", "v_proj", "frob_proj"]),
        ["frob_proj", "supported are"],
    ),
    "v-only": ({"targets": ["v_proj"]}, None, ["v_proj", "needs both q_proj and v_proj"]),
    "q-only": ({"targets": ["q_proj"]}, None, ["q_proj", "needs both q_proj and v_proj"]),
    "not-served-module": ({"targets": ["o_proj"]}, None, ["--lora-target-modules"]),
    "keys": (
        {"targets": ["q_proj", "k_proj", "v_proj"]},
        None,
        ["k_proj", "--lora-target-modules"],
    ),
    "dora": ({}, config(use_dora=True), ["use_dora", "plain LoRA"]),
    "rank-pattern": ({}, config(rank_pattern={"q_proj": 4}), ["rank_pattern", "plain LoRA"]),
    "bias": ({}, config(bias="all"), ["bias='all'", "bias='none'"]),
    "ia3": ({}, config(peft_type="IA3"), ["IA3", "LORA"]),
    "corrupted": ({}, file("adapter_model.safetensors", b"noise" * 100), ["header"]),
    "cut-in-half": ({}, cut_in_half, ["header"]),
    "no-weights": ({}, file("adapter_model.safetensors", None), ["weights"]),
    "no-config": ({}, file("adapter_config.json", None), ["adapter_config.json"]),
    "config-that-is-no-json": ({}, file("adapter_config.json", b'{"r":'), ["line 1"]),
    "config-that-is-no-object": ({}, file("adapter_config.json", b"[1]"), ["no object"]),
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_a_bad_adapter_is_refused_by_name_and_reason(
    name: str, server: ServerProcess, model: Path, tmp_path: Path
) -> None:
    arguments, change, named = BAD_ADAPTERS[name]
    folder = make_adapter(tmp_path / "folder", model, seed=9, **arguments)
    if change is not None:
        change(folder)
    text = refused(server, "/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
    for part in (f"'{name}'", *named):
        assert part in text
    # Not served by the model without an adapter instead.
    assert name in refused(server, "/generate", request(lora_path=name))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"lora_name": "x", "lora_path": "/nowhere/at/all"}, ["'x'", "/nowhere/at/all"]),
        ({"lora_name": "plan", "lora_path": "ADAPTER"}, ["'plan'", "already loaded"]),
        ({"lora_name": "", "lora_path": "ADAPTER"}, ["needs a name"]),
        ({"lora_name": "MODEL", "lora_path": "ADAPTER"}, ["like the served model"]),
        ({"lora_path": "ADAPTER"}, ["lora_name"]),
        ({"lora_name": "x", "lora_path": 5}, ["lora_path"]),
    ],
    ids=[
        "no such folder",
        "name taken",
        "empty name",
        "the model's",
        "no name",
        "number for a path",
    ],
)
def test_a_bad_load_is_refused(
    body: dict[str, Any],
    named: list[str],
    server: ServerProcess,
    model: Path,
    adapters: dict[str, Path],
) -> None:
    if body["lora_path"] == "ADAPTER":
        body = body | {"lora_path": str(adapters["action"])}
    if body.get("lora_name") == "MODEL":
        body = body | {"lora_name": str(model)}
    text = refused(server, "/load_lora_adapter", body)
    for part in named:
        assert part in text


def test_unloading_what_is_not_loaded_is_refused(server: ServerProcess) -> None:
    assert "nobody" in refused(server, "/unload_lora_adapter", {"lora_name": "nobody"})


def test_a_refused_name_is_free_for_a_good_adapter(
    running: ServerProcess, adapters: dict[str, Path], tmp_path: Path
) -> None:
    body = {"lora_name": "third", "lora_path": str(tmp_path)}
    refused(running, "/load_lora_adapter", body)
    running.post("/load_lora_adapter", body | {"lora_path": str(adapters["action"])})
    answer = running.post("/generate", request(lora_path="third"))
    assert (
        answer["output_ids"] == running.post("/generate", request(lora_path="action"))["output_ids"]
    )
    running.post("/unload_lora_adapter", {"lora_name": "third"})
    assert set(at_rest(running)["lr"]) == {"plan", "action"}
