"""The Triton attention backend, end to end, in Triton's interpreter.

A server on this CPU with ``--precache-kernels triton`` against the reference engine, at half the
tolerance that the PyTorch backend has (test_agreement.py): the two backends are then no further
apart than the whole. Roles of mixed ranks and targets, adapter-free requests, four trajectories at
once, chunks, and neutral tokens beside users' steps.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import TOLERANCE, Trajectory, random_turns, run_trajectories
from ops.lr_write import lr_write
from precache_sglang.launch.process import ServerProcess
from reference import ReferenceEngine, Weights
from standins import fake_lora, fake_lora_manager, quiet_imports
from tiny import make_adapter, make_model

with quiet_imports():
    from precache_sglang.patches.decode_cuda_graph_runner import after_can_run_graph
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.runtime_context import get_context

    from precache_sglang import runtime as runtime_module
    from precache_sglang.adapter_tables import NO_ADAPTER, AdapterTables
    from precache_sglang.config import Settings
    from precache_sglang.errors import AdapterError
    from precache_sglang.methods import METHODS
    from precache_sglang.roles import Adapter, Projection
    from precache_sglang.triton_attention import TritonAttnBackend

ROOT = Path(__file__).parents[1]
TARGETS: dict[str, dict[str, Any]] = {
    "plan": {"r": 8},
    "action": {"r": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj")},
    "reflect": {"r": 6, "targets": ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")},
    "mlp": {"r": 3, "targets": ("gate_proj", "up_proj", "down_proj")},
}
VARIANTS = [("prelrshared", "auto"), *(("rebaseshared", s) for s in ("lp", "db", "auto"))]


@pytest.mark.parametrize(("method", "schedule"), VARIANTS)
def test_a_server_on_the_triton_backend_agrees(method: str, schedule: str, tmp_path: Path) -> None:
    # Heads of 64, the smallest that the kernels serve.
    model = make_model(
        tmp_path / "model", hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=2,
    )  # fmt: skip
    adapters = {
        role: make_adapter(tmp_path / role, model, seed=seed, **settings)
        for seed, (role, settings) in enumerate(TARGETS.items())
    }
    weights = Weights.load(model)
    args = ["--precache-method", method, "--precache-schedule", schedule]
    args += ["--precache-kernels", "triton", "--dtype", "float32", "--skip-tokenizer-init"]
    args += ["--max-total-tokens", "4000", "--max-running-requests", "6"]
    args += ["--max-loras-per-batch", "5", "--chunked-prefill-size", "64"]
    args += ["--context-length", "1024", "--log-level", "warning"]
    with ServerProcess(model, adapters, args, {"TRITON_INTERPRET": "1"}) as server:
        rng = random.Random(3)
        roles: list[str | None] = [*adapters, None]
        turns = [random_turns(rng, 256, roles, 5, longest=70) for _ in range(4)]
        trajectories = [
            Trajectory(server, ReferenceEngine(weights, method, adapters), str(i)) for i in range(4)
        ]
        assert run_trajectories(trajectories, turns, at_once=4) < TOLERANCE / 2
        state = server.wait_for_backlog()
        assert state["problems"] == []
        assert state["kernels"] == "triton"
        if schedule == "db":
            assert state["total_neutral_beside"] > 0


def test_triton_without_a_gpu_is_refused(model: Path, adapters: dict[str, Path]) -> None:
    args = ["--precache-kernels", "triton", "--dtype", "float32", "--skip-tokenizer-init"]
    server = ServerProcess(model, adapters, args)
    with pytest.raises(RuntimeError, match="--precache-kernels triton needs a GPU"), server:
        pass


def test_heads_that_the_kernels_do_not_serve_are_refused(
    model: Path, adapters: dict[str, Path]
) -> None:
    args = ["--precache-kernels", "triton", "--dtype", "float32", "--skip-tokenizer-init"]
    server = ServerProcess(model, adapters, args, {"TRITON_INTERPRET": "1"})
    with pytest.raises(RuntimeError, match="head size 16 is not one of"), server:
        pass


# -- tables ------------------------------------------------------------------------------


def adapter(name: str, rank: int = 2, has_rows: bool = True, has_k: bool = False) -> Adapter:
    generator = torch.Generator().manual_seed(sum(name.encode()))

    def projection() -> Projection:
        a = [torch.randn(rank, 8, generator=generator) for _ in range(2)]
        b = [torch.randn(rank, 6, generator=generator) for _ in range(2)]
        return Projection(a, b)

    return Adapter(
        lora_id=f"id-{name}",
        name=name,
        content=name,
        rows_key=name if has_rows else None,
        team="default",
        rank=rank,
        k=projection() if has_k else None,
        v=projection() if has_rows else None,
    )


def tables(capacity: int, is_fixed: bool, has_k: bool = False) -> AdapterTables:
    return AdapterTables(capacity, 2, 4, 6, has_k, torch.float32, "cpu", is_fixed)


def test_adapters_keep_their_row_while_others_come_and_go() -> None:
    found = tables(2, is_fixed=False, has_k=True)
    plan, action, late = adapter("plan"), adapter("action", 4, has_k=True), adapter("late", 3)
    found.add(plan)
    found.add(action)
    found.remove(plan.lora_id)
    assert found.row_of(plan) == NO_ADAPTER
    found.add(late)
    found.add(plan)
    assert [found.row_of(a) for a in (late, action, plan)] == [0, 1, 2]
    assert found.capacity == 4, "grown, since no graph holds the addresses"
    for one in (plan, action, late):
        row = found.row_of(one)
        assert found.ranks[row] == one.rank
        for layer in range(2):
            assert one.v is not None
            assert torch.equal(found.b_v[layer][row, : one.rank], one.v.b[layer])
            assert not found.b_v[layer][row, one.rank :].any()
            assert found.b_k is not None
            if one.k is None:
                assert not found.b_k[layer][row].any()
            else:
                assert torch.equal(found.b_k[layer][row, : one.rank], one.k.b[layer])


def test_adapters_without_rows_have_none_in_the_tables() -> None:
    found = tables(1, is_fixed=True)
    mlp = adapter("mlp", has_rows=False)
    found.add(mlp)
    found.add(adapter("plan"))
    assert found.row_of(mlp) == NO_ADAPTER and found.row_of(None) == NO_ADAPTER


def test_tables_that_graphs_hold_do_not_move_and_refuse_what_does_not_fit() -> None:
    found = tables(1, is_fixed=True)
    before = [t.data_ptr() for t in (found.ranks, *found.b_v)]
    found.add(adapter("plan"))
    with pytest.raises(AdapterError, match="--max-loaded-loras"):
        found.add(adapter("action"))
    found.remove("id-plan")
    found.add(adapter("action"))
    assert [t.data_ptr() for t in (found.ranks, *found.b_v)] == before


def test_a_captured_step_stores_the_rows_of_whoever_replays_it(make: Callable[..., Any]) -> None:
    """Without a GPU, the captured kernels are the same call on the tensors that a graph holds."""
    runtime = make("prelrshared").runtime
    roles, pool = runtime.roles, runtime.lr_pool
    room = AdapterTables(
        4, runtime.num_layers, roles.width, runtime.kv_size, False, torch.float32, "cpu", True
    )
    roles.use_tables(room)
    runtime.hold_write_slots(8)
    runtime.begin_capture(8)
    held = [(runtime.write_slots, roles.stack[layer]) for layer in range(runtime.num_layers)]
    x = torch.randn(8, 8)

    def replay(slots: torch.Tensor | None) -> None:
        runtime.write_slots, runtime._stored_layers = slots, 0
        runtime.begin_replay(8)
        for layer, (at, stack) in enumerate(held):
            lr_write(x, stack, at, pool.v[layer], None)
        runtime.require_rows_stored(SimpleNamespace(precache_write_slots=slots))

    slots = torch.tensor([[3, 9], [0, 4], [7, 0]])  # three adapters, two tokens
    replay(slots)
    for layer in range(runtime.num_layers):
        for key, block in roles.blocks.items():
            a = next(a for a in roles.adapters.values() if a.rows_key == key).v.a[layer]
            for token, slot in enumerate(slots[block].tolist()):
                if slot:
                    torch.testing.assert_close(pool.v[layer][slot][: len(a)], a @ x[token])
    before = pool.v.clone()
    replay(None)  # nobody writes; what the step before has left in the buffers is gone
    assert torch.equal(pool.v, before)
    # Adapters come and go; the graph still sees what is loaded.
    gone = next(iter(roles.adapters))
    last = list(roles.blocks)[-1]
    roles.remove(gone)
    assert roles.blocks[last] == 1
    replay(torch.tensor([[0], [11]]))
    a = next(a for a in roles.adapters.values() if a.rows_key == last).v.a[0]
    torch.testing.assert_close(pool.v[0][11][: len(a)], a @ x[0])


class LlamaForCausalLM(torch.nn.Module):
    """As much of a model as an attention backend looks at: two layers, heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for layer_id in range(2):
            layer = torch.nn.Module()
            layer.qkv_proj = torch.nn.Linear(128, 256, bias=False)
            layer.rotary_emb = SimpleNamespace(
                cos_sin_cache=torch.randn(64, 64), is_neox_style=True
            )
            layer.attn = RadixAttention(2, 64, 0.125, num_kv_heads=1, layer_id=layer_id)
            self.layers.append(layer)
        self.logits_processor = torch.nn.Identity()


def test_a_replayed_step_is_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and replay call what SGLang's runner calls, in its order, on its static tensors."""
    loras = {
        name: fake_lora(seed, rank=rank, hidden=128, kv_size=64)
        for seed, (name, rank) in enumerate((("plan", 4), ("action", 8)))
    }
    manager = fake_lora_manager(loras, hidden=128, kv_size=64)
    monkeypatch.setattr(runtime_module, "_current", None)
    settings = Settings(method="prelrshared", lr_tokens=200, cuda_graph=True)
    with get_context().override_server_args():
        runtime = runtime_module.Runtime(settings, METHODS["prelrshared"], manager)
    keys, values = torch.randn(2, 2, 100, 1, 64)
    kv_pool = SimpleNamespace(
        dtype=torch.float32,
        mem_usage=0.0,
        get_key_buffer=lambda layer_id: keys[layer_id],
        get_value_buffer=lambda layer_id: values[layer_id],
    )
    table = torch.randint(1, 100, (6, 64), dtype=torch.int32)
    runner = SimpleNamespace(
        device="cpu",
        model=LlamaForCausalLM(),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=kv_pool,
        max_total_num_tokens=99,
        server_args=SimpleNamespace(max_loaded_loras=4),
    )
    runtime.build_pools(runner)
    pool = runtime.lr_pool
    assert pool is not None
    pool.v.normal_()
    backend = TritonAttnBackend(runner, runtime)
    tables = runtime.roles.tables
    assert tables is not None
    runtime.req_to_lr = torch.randint(1, 200, (6, 64), dtype=torch.int32)
    adapters = runtime.roles.adapters
    for row, name in ((1, "plan"), (2, None), (3, "action"), (4, "plan")):
        runtime.req_to_adapter[row] = tables.row_of(adapters[name] if name else None)

    def batch(rows: list[int], lengths: list[int]) -> Any:
        return SimpleNamespace(
            batch_size=len(rows),
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            lora_ids=[None] * len(rows),
            forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True),
        )

    def forward(size: int, x: torch.Tensor, fb: Any) -> list[torch.Tensor]:
        out = []
        for layer in runner.model.layers:
            q, k, v = layer.qkv_proj(x[:size]).split((128, 64, 64), dim=1)
            out.append(backend.forward_decode(q, k, v, layer.attn, fb, save_kv_cache=False))
        return out

    with torch.no_grad():
        backend.init_cuda_graph_state(4, 4)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        static = batch([0] * 4, [fill] * 4)
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        captured_parts, captured_slots = backend.parts, runtime.write_slots
        x = torch.zeros(4, 128)
        for rows, lengths in (([1, 2, 3], [20, 33, 64]), ([3, 4, 1, 2], [1, 2, 50, 7])):
            size = len(rows)
            x[:size].normal_()
            slots = torch.randperm(199)[: 2 * size].view(2, size) + 1
            # Eagerly
            eager = batch(rows, lengths)
            runtime.write_slots = slots
            runtime._stored_layers = 0
            before = pool.v.clone()
            backend.init_forward_metadata(eager)
            expected = forward(size, x, eager)
            stored = pool.v.clone()
            pool.v.copy_(before)
            # As a graph of four, with padding
            static.req_pool_indices.fill_(0)
            static.seq_lens.fill_(fill)
            static.req_pool_indices[:size] = torch.tensor(rows)
            static.seq_lens[:size] = torch.tensor(lengths)
            runtime.write_slots = slots
            runtime._stored_layers = 0
            backend.init_forward_metadata_out_graph(static)
            runtime.require_rows_stored(SimpleNamespace(precache_write_slots=slots))
            # What a replay does: the captured calls on the captured tensors.
            backend.parts, runtime.write_slots = captured_parts, captured_slots
            backend.init_forward_metadata_in_graph(static)
            found = forward(4, x, static)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one[:size], other)
            torch.testing.assert_close(pool.v[:, 1:], stored[:, 1:])


def test_steps_that_neutral_tokens_ride_along_in_do_not_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for spans, expected in (([], True), ([object()], False)):
        monkeypatch.setattr(runtime_module, "_current", SimpleNamespace(neutral_spans=spans))
        assert after_can_run_graph(True, None, None) is expected
        assert after_can_run_graph(False, None, None) is False
    monkeypatch.setattr(runtime_module, "_current", None)
    assert after_can_run_graph(True, None, None) is True


# -- scripts for a GPU -------------------------------------------------------------------


def run_script(name: str, *args: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "kernels/bench" / name), *args],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def test_gpu_check_runs_in_the_interpreter(tmp_path: Path) -> None:
    out = run_script("gpu_check.py", "--seed", "1", "--json", str(tmp_path / "check.json"))
    assert "random cases of each kernel" in out
    for kernel in ("decode", "extend", "write"):
        assert f"\n{kernel} " in out
    assert (tmp_path / "check.json").stat().st_size > 500


def test_gpu_serve_measures_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    trace = tmp_path / "short.csv"
    trace.write_text("agent,prefill_len,decode_len\nplan,30,4\naction,20,4\n")
    args = ["--out", str(tmp_path / "out"), "--shape", "tiny", "--parts", "lengths"]
    args += ["--variants", "nonshared", "--no-schedules", "--lengths", str(trace)]
    args += ["--repeats", "1", "--", "--dtype", "float32"]
    first = run_script("gpu_serve.py", *args)
    assert "starting the server" in first and "nonshared" in first
    again = run_script("gpu_serve.py", *args)
    assert "starting the server" not in again
    assert again.splitlines()[-1] == first.splitlines()[-1]
