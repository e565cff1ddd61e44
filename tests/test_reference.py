"""The reference engine against transformers and PEFT.

The oracle is always a full forward by transformers. To stand for a shared prefix, hooks put the
rows that a method would have stored in place of what k_proj and v_proj return for it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from reference import METHODS, ReferenceEngine, Weights
from tiny import MODELS, make_adapter, make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOLERANCE = 1e-4
ROLES = ("plan", "action", "reflect")
SHARED = [name for name in METHODS if name != "nonshared"]
QV = ("q_proj", "v_proj")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

Rows = list[Tensor]  # one [tokens, width] per layer
Turns = list[tuple[str | None, list[int], list[int]]]


@dataclass
class Observed:
    log_softmax: Tensor  # [tokens, vocab]
    x: Rows  # attention inputs after the norm
    base: dict[str, Rows]  # "k_proj" and "v_proj" without the adapter's term, before RoPE
    full: dict[str, Rows]  # the same with it


class Oracle:
    """A transformers model with a team of PEFT adapters."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        self.base_model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        first, *others = adapters.items()
        self.model = PeftModel.from_pretrained(self.base_model, first[1], adapter_name=first[0])
        for role, folder in others:
            self.model.load_adapter(folder, adapter_name=role)
        self.model.eval()
        self.layers = self.base_model.model.layers

    @torch.no_grad()
    def run(
        self,
        role: str | None,
        tokens: list[int],
        base: dict[str, Rows] | None = None,
        full: dict[str, Rows] | None = None,
    ) -> Observed:
        """A full forward; `base` or `full` replace the leading rows of k_proj and v_proj."""
        seen = Observed(torch.empty(0), [], {}, {})
        with ExitStack() as hooks:
            for index, layer in enumerate(self.layers):
                hooks.enter_context(_hook(layer.input_layernorm, seen.x))
                for name in ("k_proj", "v_proj"):
                    module = getattr(layer.self_attn, name)
                    for target, given, into in (
                        (getattr(module, "base_layer", module), base, seen.base),
                        (module, full, seen.full),
                    ):
                        rows = given[name][index] if given else None
                        hooks.enter_context(_hook(target, into.setdefault(name, []), rows))
            if role is None:
                hooks.enter_context(self.model.disable_adapter())
            else:
                self.model.set_adapter(role)
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        seen.log_softmax = logits.log_softmax(-1)
        return seen

    def lr_rows(self, role: str, name: str, x: Rows) -> Rows | None:
        """x A, or None when the role's adapter does not adapt `name`."""
        modules = [getattr(layer.self_attn, name) for layer in self.layers]
        if role not in getattr(modules[0], "lora_A", {}):
            return None
        return [m.lora_A[role](rows).detach() for m, rows in zip(modules, x, strict=True)]

    def expanded(self, role: str | None, name: str, base: Rows, x: Rows | None) -> Rows:
        """Base rows plus the role's term over x."""
        rows = self.lr_rows(role, name, x) if role is not None and x is not None else None
        if rows is None:
            return base
        modules = [getattr(layer.self_attn, name) for layer in self.layers]
        return [
            b + m.scaling[role] * m.lora_B[role](z).detach()
            for m, b, z in zip(modules, base, rows, strict=True)
        ]

    def base_rows(self, base: dict[str, Rows]) -> Tensor:
        """[tokens, layers, 2, kv_heads, head_dim] with RoPE on keys, as the engine keeps them."""
        rotary = self.base_model.model.rotary_emb
        layers = []
        for keys, values in zip(base["k_proj"], base["v_proj"], strict=True):
            positions = torch.arange(len(keys))[None]
            cos, sin = rotary(keys, positions)
            keys = keys.view(len(keys), -1, cos.shape[-1]).transpose(0, 1)[None]
            keys = apply_rotary_pos_emb(keys, keys, cos, sin)[1][0].transpose(0, 1)
            layers.append(torch.stack((keys, values.view_as(keys)), dim=1))
        return torch.stack(layers, dim=1)


def _hook(module: nn.Module, into: Rows, replacement: Tensor | None = None) -> Any:
    """Record a module's output, after replacing its first rows."""

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        if replacement is not None:
            output = torch.cat((replacement[None], output[:, len(replacement) :]), dim=1)
        into.append(output[0])
        return output

    handle = module.register_forward_hook(hook)
    context = ExitStack()
    context.callback(handle.remove)
    return context


@dataclass
class Setup:
    model_dir: Path
    weights: Weights
    adapters: dict[str, Path]

    def engine(self, method: str) -> ReferenceEngine:
        return ReferenceEngine(self.weights, method, self.adapters)

    def oracle(self) -> Oracle:
        return Oracle(self.model_dir, self.adapters)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only lose time to threads, a factor of three where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Weights]]:
    made = {}
    for architecture in MODELS:
        folder = make_model(tmp_path_factory.mktemp(architecture), architecture)
        made[architecture] = (folder, Weights.load(folder))
    return made


@pytest.fixture
def setup(models: dict[str, tuple[Path, Weights]], tmp_path: Path) -> Callable[..., Setup]:
    def make(architecture: str = "llama", team: str = "qv") -> Setup:
        model_dir, weights = models[architecture]
        teams: dict[str, list[dict[str, Any]]] = {
            "qv": [{"targets": QV}] * 3,
            "qkvo": [{"targets": QKVO, "r": 4}] * 3,
            # Different targets, ranks and scaling.
            "mixed": [
                {"targets": QV},
                {"targets": QKVO, "r": 4, "use_rslora": True},
                {"targets": ("k_proj", *MLP), "r": 3, "alpha": 5},
            ],
            "mlp": [{"targets": QV}, {"targets": MLP}, {"targets": ("o_proj", "q_proj")}],
            # One A for all, and still different B, scaling and other modules.
            "same-a": [
                {"targets": QKVO},
                {"targets": QKVO, "alpha": 8, "share_a_with": tmp_path / "plan"},
                {"targets": (*QKVO, *MLP), "share_a_with": tmp_path / "plan"},
            ],
            "zero-b": [
                {"targets": QKVO, "zero_b": True},
                {"targets": QKVO, "zero_b": True, "share_a_with": tmp_path / "plan"},
                {"targets": QKVO, "zero_b": True, "share_a_with": tmp_path / "plan"},
            ],
        }
        adapters = {
            role: make_adapter(tmp_path / role, model_dir, seed=seed, **setting)
            for seed, (role, setting) in enumerate(zip(ROLES, teams[team], strict=True), start=1)
        }
        return Setup(model_dir, weights, adapters)

    return make


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), generator=generator).tolist()


def trajectory(*roles: str | None) -> Turns:
    """Turns of one growing token sequence."""
    turns: Turns = []
    tokens = random_tokens(11, seed=99)
    for index, role in enumerate(roles):
        output = random_tokens(1 + index % 4, seed=index)
        turns.append((role, tokens, output))
        tokens = tokens + output + random_tokens(index % 3, seed=50 + index)
    return turns


def fed(prompt: list[int], output: list[int]) -> list[int]:
    return prompt + output[:-1]


def play(engine: ReferenceEngine, turns: Turns) -> Tensor:
    return torch.cat([engine.turn(*turn).log_softmax for turn in turns])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def full_prefills(oracle: Oracle, turns: Turns) -> Tensor:
    rows = [
        oracle.run(role, fed(prompt, output)).log_softmax[len(prompt) - 1 :]
        for role, prompt, output in turns
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("team", ["qv", "qkvo", "mixed", "mlp"])
def test_nonshared_equals_a_full_prefill_under_each_adapter(
    setup: Callable[..., Setup], architecture: str, team: str
) -> None:
    case = setup(architecture, team)
    turns = trajectory("plan", "action", None, "reflect", "plan", None, "action")
    assert_close(play(case.engine("nonshared"), turns), full_prefills(case.oracle(), turns))


def test_tied_embeddings_and_odd_head_width_load(tmp_path: Path) -> None:
    model = make_model(
        tmp_path / "model", tie_word_embeddings=True, head_dim=24, num_hidden_layers=2
    )
    adapter = make_adapter(tmp_path / "plan", model)
    turns = trajectory("plan", None)
    engine = ReferenceEngine(model, "nonshared", {"plan": adapter})
    assert_close(play(engine, turns), full_prefills(Oracle(model, {"plan": adapter}), turns))


def test_logprobs_are_those_of_the_output_tokens(setup: Callable[..., Setup]) -> None:
    turn = setup().engine("prelrshared").turn("plan", [3, 1, 4], [1, 5, 9])
    assert turn.logprobs.tolist() == [
        turn.log_softmax[i, t].item() for i, t in enumerate([1, 5, 9])
    ]


class Expected:
    """Plays a method with full forwards of the oracle: the same bookkeeping, no code in common."""

    def __init__(self, oracle: Oracle, method: str) -> None:
        self.oracle = oracle
        self.method = method
        self.kv: dict[str, Rows] = {}  # stored k_proj and v_proj rows, before RoPE
        self.x: dict[str, Rows] = {}  # role -> the input its LR rows were made from
        self.own: dict[str, Rows] = {}  # as `kv`, from the passes of those who fed the tokens
        self.feeders: list[str | None] = []

    def read_by(self, role: str | None) -> dict[str, Rows]:
        """The stored rows as `role` reads them."""
        if self.method != "rebaseown":
            return self.kv
        is_own = torch.tensor([feeder == role for feeder in self.feeders])[:, None]
        return {
            name: [torch.where(is_own, a, b) for a, b in zip(self.own[name], rows, strict=True)]
            for name, rows in self.kv.items()
        }

    def turn(self, role: str | None, tokens: list[int]) -> Tensor:
        oracle, kv = self.oracle, self.read_by(role)
        known = len(kv["k_proj"][0]) if kv else 0
        if not kv:
            seen = oracle.run(role, tokens)
        elif self.method == "fullshared":
            seen = oracle.run(role, tokens, full=kv)
        elif self.method == "baseshared":
            # All of the context again: rows that this role already has come out the same.
            seen = oracle.run(role, tokens, base=kv)
        else:
            x = self.x[role] if role is not None else None
            merged = {name: oracle.expanded(role, name, rows, x) for name, rows in kv.items()}
            seen = oracle.run(role, tokens, full=merged)

        writer = seen
        if METHODS[self.method].neutral_base:
            writer = oracle.run(None, tokens)
        self.own = _extended(self.own, seen.base, known)
        self.feeders += [role] * (len(tokens) - known)
        self.kv = _extended(
            self.kv, writer.full if self.method == "fullshared" else writer.base, known
        )
        for name in ROLES:
            source = seen if name == role else writer
            self.x[name] = _appended(self.x.get(name), source.x, known)
        return seen.log_softmax


def _appended(old: Rows | None, new: Rows, known: int) -> Rows:
    if old is None:
        return new
    return [torch.cat((o, n[known:])) for o, n in zip(old, new, strict=True)]


def _extended(old: dict[str, Rows], new: dict[str, Rows], known: int) -> dict[str, Rows]:
    return {name: _appended(old.get(name), rows, known) for name, rows in new.items()}


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(
    ("method", "team"),
    [
        (method, team)
        for method in SHARED
        for team in ("mixed", "same-a")
        if method != "baselrshared" or team == "same-a"
    ],
)
def test_shared_methods_equal_transformers_reading_the_same_rows(
    setup: Callable[..., Setup], architecture: str, method: str, team: str
) -> None:
    case = setup(architecture, team)
    engine, oracle = case.engine(method), case.oracle()
    expected = Expected(oracle, method)
    for role, prompt, output in trajectory("plan", "action", None, "reflect", "plan", "action"):
        tokens = fed(prompt, output)
        actual = engine.turn(role, prompt, output)
        assert_close(actual.log_softmax, expected.turn(role, tokens)[len(prompt) - 1 :])
        # The stored rows too: base KV, and x A of every adapter the method keeps rows of.
        assert_close(engine.base_rows(tokens), oracle.base_rows(expected.kv))
        if not METHODS[method].team_rows:
            continue
        for other in ROLES:
            for (layer, name), rows in engine.lr_rows(tokens, other).items():
                wanted = oracle.lr_rows(other, name, expected.x[other])
                assert wanted is not None
                assert_close(rows, wanted[layer])


@pytest.mark.parametrize("method", SHARED)
def test_a_cached_prompt_is_read_and_only_its_last_token_computed(
    setup: Callable[..., Setup], method: str
) -> None:
    case = setup(team="same-a")
    engine, expected = case.engine(method), Expected(case.oracle(), method)
    prompt, output = random_tokens(9, seed=1), [7, 8, 9]
    engine.turn("plan", prompt, output)
    expected.turn("plan", fed(prompt, output))
    prompt = fed(prompt, output)
    before = engine.base_rows(prompt)
    # A single output token adds nothing: there is no token left for a neutral pass either.
    for output in ([5], [5, 6]):
        turn = engine.turn("action", prompt, output)
        assert_close(
            turn.log_softmax, expected.turn("action", fed(prompt, output))[len(prompt) - 1 :]
        )
        assert turn.base_len == len(prompt)
    assert torch.equal(engine.base_rows(prompt), before)
    assert turn.compute_from == len(prompt) - 1


@pytest.mark.parametrize("role", [*ROLES, None])
@pytest.mark.parametrize("method", METHODS)
def test_a_first_turn_is_the_same_under_every_method(
    setup: Callable[..., Setup], method: str, role: str | None
) -> None:
    case = setup(team="same-a")
    turns: Turns = [(role, random_tokens(9, seed=1), [4, 5, 6])]
    assert_close(play(case.engine(method), turns), play(case.engine("nonshared"), turns))


def test_rebaseshared_base_does_not_depend_on_the_roles(setup: Callable[..., Setup]) -> None:
    case = setup(team="mixed")
    turns = trajectory("plan", "action", "reflect")
    engine, neutral = case.engine("rebaseshared"), case.engine("nonshared")
    play(engine, turns)
    play(neutral, [(None, prompt, output) for _, prompt, output in turns])
    tokens = fed(*turns[-1][1:])
    assert_close(engine.base_rows(tokens), neutral.base_rows(tokens))


def test_methods_with_one_a_agree_where_they_should(setup: Callable[..., Setup]) -> None:
    case = setup(team="same-a")
    turns = trajectory("plan", "action", None, "reflect", "plan")
    assert_close(play(case.engine("baselrshared"), turns), play(case.engine("prelrshared"), turns))


@pytest.mark.parametrize("method", METHODS)
def test_adapters_with_zero_b_change_nothing(setup: Callable[..., Setup], method: str) -> None:
    case = setup(team="zero-b")
    turns = trajectory("plan", None, "action", "reflect", "plan")
    neutral: Turns = [(None, prompt, output) for _, prompt, output in turns]
    assert_close(
        play(case.engine(method), turns),
        play(ReferenceEngine(case.weights, "nonshared"), neutral),
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name != "rebaseshared"])
def test_roles_with_one_adapter_share_without_loss(
    setup: Callable[..., Setup], method: str
) -> None:
    case = setup(team="qkvo")
    case.adapters = dict.fromkeys(ROLES, case.adapters["plan"])
    turns = trajectory("plan", "action", "reflect", "plan")
    alone: Turns = [("plan", prompt, output) for _, prompt, output in turns]
    assert_close(play(case.engine(method), turns), play(case.engine("nonshared"), alone))


@pytest.mark.parametrize("team", ["qv", "mixed"])
def test_swapped_adapters_and_other_methods_are_far_apart(
    setup: Callable[..., Setup], team: str
) -> None:
    """Else the comparisons in this file, and those of the server, could not fail."""
    case = setup(team=team)
    turns = trajectory("plan", "action", "reflect", "plan", "action")
    results = [play(case.engine(method), turns) for method in METHODS if method != "baselrshared"]
    case.adapters["plan"], case.adapters["action"] = case.adapters["action"], case.adapters["plan"]
    results.append(play(case.engine("prelrshared"), turns))
    for index, one in enumerate(results):
        for other in results[:index]:
            assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_diverging_prompt_reads_only_the_common_prefix(
    setup: Callable[..., Setup], method: str
) -> None:
    case = setup(team="same-a")
    stem, branch = random_tokens(8, seed=1), random_tokens(6, seed=2)
    engine, fresh = case.engine(method), case.engine(method)
    engine.turn("plan", [*stem, 1, 2, 3], [4, 5])
    fresh.turn("plan", stem, [9])
    diverging = engine.turn("plan", stem + branch, [6, 7])
    assert diverging.base_len == len(stem)
    assert_close(diverging.log_softmax, fresh.turn("plan", stem + branch, [6, 7]).log_softmax)
    # As in a prefix tree, the branch that was left is still there.
    assert engine.turn("plan", [*stem, 1, 2, 3, 4], [5]).base_len == len(stem) + 4


@pytest.mark.parametrize("method", ["baseshared", "prelrshared", "rebaseshared"])
def test_an_adapter_loaded_late_replays(setup: Callable[..., Setup], method: str) -> None:
    case = setup(team="qkvo")
    engine, oracle = case.engine(method), case.oracle()
    engine.unload("reflect")
    (_, first, output), (_, second, reply) = trajectory("plan", "reflect")
    engine.turn("plan", first, output)
    engine.load("reflect", case.adapters["reflect"])
    tokens = fed(first, output)
    base = oracle.run(None if method == "rebaseshared" else "plan", tokens).base
    before = engine.base_rows(tokens)
    turn = engine.turn("reflect", second, reply)
    assert (turn.base_len, turn.lr_len, turn.compute_from) == (len(tokens), 0, 0)
    seen = oracle.run("reflect", fed(second, reply), base=base)
    assert_close(turn.log_softmax, seen.log_softmax[len(second) - 1 :])
    assert torch.equal(engine.base_rows(tokens), before)
    for (layer, name), rows in engine.lr_rows(fed(second, reply), "reflect").items():
        wanted = oracle.lr_rows("reflect", name, seen.x)
        assert wanted is not None
        assert_close(rows, wanted[layer])


def test_a_replay_gives_rows_to_its_own_adapter_only(setup: Callable[..., Setup]) -> None:
    case = setup()
    engine = case.engine("prelrshared")
    engine.unload("action")
    engine.unload("reflect")
    (_, first, output), (_, second, reply) = trajectory("plan", "action")
    engine.turn("plan", first, output)
    engine.load("action", case.adapters["action"])
    engine.load("reflect", case.adapters["reflect"])
    assert engine.turn("action", second, reply).lr_len == 0
    following = fed(second, reply)
    assert engine.turn("action", following, [3]).lr_len == len(following)
    # The middle of the trajectory has rows of reflect, its beginning has none.
    turn = engine.turn("reflect", following, [3])
    assert (turn.base_len, turn.lr_len) == (len(following), 0)


def test_baseshared_replays_what_others_fed(setup: Callable[..., Setup]) -> None:
    engine = setup().engine("baseshared")
    turns = trajectory("plan", "action", "plan")
    lengths = [engine.turn(*turn).lr_len for turn in turns]
    assert lengths == [0, 0, len(fed(*turns[0][1:]))]


def test_rows_that_exist_beyond_a_gap_are_kept(setup: Callable[..., Setup]) -> None:
    case = setup(team="qkvo")
    engine = case.engine("prelrshared")
    engine.unload("reflect")
    (_, first, output), (_, second, reply), (_, third, end) = trajectory(
        "plan", "action", "reflect"
    )
    engine.turn("plan", first, output)
    engine.load("reflect", case.adapters["reflect"])
    engine.turn("action", second, reply)
    old = fed(first, output)
    middle = fed(second, reply)
    engine.turn("reflect", third, end)
    untouched = case.engine("prelrshared")
    untouched.turn("plan", first, output)
    untouched.turn("action", second, reply)
    for slot, rows in engine.lr_rows(middle, "reflect").items():
        wanted = untouched.lr_rows(middle, "reflect")[slot]
        assert_close(rows[len(old) :], wanted[len(old) :])
        # Layer 0 of a pass has no context yet: every pass gives the same rows there.
        if slot[0] > 0:
            assert (rows[: len(old)] - wanted[: len(old)]).abs().max() > 1e-2


def test_an_adapter_on_neither_k_nor_v_never_replays(setup: Callable[..., Setup]) -> None:
    engine = setup(team="mlp").engine("baseshared")
    (_, first, output), (_, second, reply) = trajectory("plan", "action")
    engine.turn("plan", first, output)
    turn = engine.turn("action", second, reply)
    assert turn.lr_len == turn.base_len == len(fed(first, output))
    assert engine.lr_rows(second, "action") == {}


@pytest.mark.parametrize("method", ["baseshared", "prelrshared", "rebaseshared"])
def test_unloading_or_replacing_an_adapter_drops_its_rows_only(
    setup: Callable[..., Setup], method: str
) -> None:
    case = setup(team="same-a")
    engine = case.engine(method)
    play(engine, trajectory("plan", "action", "reflect", "action", "plan"))
    prompt = trajectory("plan", "action", "reflect")[-1][1]
    tokens = prompt[: len(engine.base_rows(prompt))]

    def lr_len(role: str) -> int:
        rows = engine.lr_rows(tokens, role)
        return min(len(layer) for layer in rows.values())

    assert [lr_len(role) for role in ("plan", "action")] == [len(tokens)] * 2
    engine.load("action", case.adapters["action"])
    assert lr_len("action") == len(tokens)
    # The same A and scaling with another B: rows depend on all of the adapter.
    plan = case.adapters["plan"]
    other_b = make_adapter(plan.parent / "b", case.model_dir, QKVO, seed=9, share_a_with=plan)
    engine.load("plan", other_b)
    engine.load("plan", plan)
    assert [lr_len(role) for role in ("plan", "action")] == [0, len(tokens)]
    engine.unload("action")
    engine.load("action", case.adapters["action"])
    assert lr_len("action") == 0
    assert len(engine.base_rows(tokens)) == len(tokens)


def test_nonshared_forgets_an_unloaded_adapter(setup: Callable[..., Setup]) -> None:
    case = setup()
    engine = case.engine("nonshared")
    prompt = random_tokens(6, seed=1)
    for role in ("plan", "action", None):
        assert engine.turn(role, prompt, [2]).base_len == 0
    engine.unload("plan")
    engine.load("plan", case.adapters["plan"])
    assert engine.turn("plan", prompt, [2]).base_len == 0
    assert engine.turn("action", prompt, [2]).base_len == len(prompt)
    assert engine.turn(None, prompt, [2]).base_len == len(prompt)


def test_baselrshared_refuses_different_a(setup: Callable[..., Setup]) -> None:
    case = setup(team="qv")
    with pytest.raises(ValueError, match="plan and action differ"):
        case.engine("baselrshared")
    engine = ReferenceEngine(case.weights, "baselrshared", {"plan": case.adapters["plan"]})
    with pytest.raises(ValueError, match="plan and reflect differ"):
        engine.load("reflect", case.adapters["reflect"])
    # A refused adapter is not loaded; the one in its place may be replaced when it is alone.
    with pytest.raises(KeyError):
        engine.turn("reflect", [1, 2], [3])
    engine.load("plan", case.adapters["reflect"])


def test_turns_without_adapter_write_the_rows_of_all(setup: Callable[..., Setup]) -> None:
    case = setup(team="same-a")
    (_, prompt, output), (_, second, reply) = trajectory(None, "plan")
    tokens = fed(prompt, output)
    for method, expected in {
        "baseshared": 0,
        "baselrshared": len(tokens),
        "prelrshared": len(tokens),
        "rebaseshared": len(tokens),
    }.items():
        engine = case.engine(method)
        engine.turn(None, prompt, output)
        assert engine.turn("plan", second, reply).lr_len == expected
