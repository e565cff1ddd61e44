"""SGLang programs in which every call names its role.

Example::

    import sglang as sgl
    from precache_sglang.frontend import RuntimeEndpoint, gen, select

    @sgl.function
    def agent(s, question):
        s += question + "\\n\\nThought: \\n### Response:\\n"
        s += gen("thought", role="plan", max_tokens=64, stop="\\n")
        s += "\\nAction: \\n### Response:\\n"
        s += select("tool", ["Search", "Finish"], role="action")

    state = agent.run("…", backend=RuntimeEndpoint("http://localhost:30000"))
    state["thought"], state.get_meta_info("thought")["precache"]

Everything else of ``sglang.lang`` works as before: fork and join, streams, batches. A call without
a role goes to the model without an adapter, and so does what SGLang sends by itself at a fork.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from sglang.lang import api
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as SGLangRuntimeEndpoint
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod, token_length_normalized
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglExpr, SglSamplingParams, SglSelect

# SGLang's interpreter copies a fixed list of parameters for a backend, and a role is not among
# them. It travels inside a parameter that the interpreter passes on unread, so that it belongs to
# one call of one program, however many run at once. Another backend fails on it, with this text.
_ELSEWHERE = "role={!r} needs a backend that knows roles: precache_sglang.frontend.RuntimeEndpoint."


@dataclasses.dataclass(frozen=True)
class _RoleAndDtype:
    """What `gen` passes as ``dtype``."""

    role: str
    dtype: type | str | None

    def __str__(self) -> str:
        return _ELSEWHERE.format(self.role)


@dataclasses.dataclass(frozen=True)
class _RoleAndMethod:
    """What `select` passes as ``choices_method``."""

    role: str
    method: ChoicesSamplingMethod

    @property
    def requires_unconditional_logprobs(self) -> bool:
        raise TypeError(_ELSEWHERE.format(self.role))


def gen(name: str | None = None, *args: Any, role: str | None = None, **kwargs: Any) -> SglExpr:
    """``sglang.gen`` by the adapter `role`; all other arguments are SGLang's."""
    expr = api.gen(name, *args, **kwargs)
    if role is None:
        return expr
    if isinstance(expr, SglSelect):  # given choices
        expr.choices_method = _RoleAndMethod(role, expr.choices_method)
    else:
        expr.sampling_params.dtype = _RoleAndDtype(role, expr.sampling_params.dtype)
    return expr


def select(
    name: str | None = None,
    choices: list[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
    *,
    role: str | None = None,
) -> SglExpr:
    """``sglang.select`` by the adapter `role`."""
    method = choices_method if role is None else _RoleAndMethod(role, choices_method)
    return api.select(name, choices, temperature, method)


class RuntimeEndpoint(SGLangRuntimeEndpoint):
    """SGLang's endpoint for a server, whose calls go to the roles that they name.

    One endpoint serves any number of programs at once: a call that names a role is made by a
    copy, and nothing is written to the endpoint itself.

    Attributes:
        role: Of calls that name none; None: the model without an adapter.
    """

    role: str | None = None

    def as_role(self, role: str | None) -> RuntimeEndpoint:
        """The same endpoint, whose calls go to `role` unless they name another."""
        endpoint = copy.copy(self)
        endpoint.role = role
        return endpoint

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        endpoint, sampling_params = self._for_call(sampling_params)
        return SGLangRuntimeEndpoint.generate(endpoint, s, sampling_params)

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        endpoint, sampling_params = self._for_call(sampling_params)
        return SGLangRuntimeEndpoint.generate_stream(endpoint, s, sampling_params)

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | _RoleAndMethod,
    ) -> ChoicesDecision:
        endpoint = self
        if isinstance(choices_method, _RoleAndMethod):
            endpoint = self.as_role(choices_method.role)
            choices_method = choices_method.method
        return SGLangRuntimeEndpoint.select(endpoint, s, choices, temperature, choices_method)

    def _for_call(
        self, sampling_params: SglSamplingParams
    ) -> tuple[RuntimeEndpoint, SglSamplingParams]:
        carried = sampling_params.dtype
        if not isinstance(carried, _RoleAndDtype):
            return self, sampling_params
        return self.as_role(carried.role), dataclasses.replace(sampling_params, dtype=carried.dtype)

    def _add_images(self, s: StreamExecutor, data: dict[str, Any]) -> None:
        """SGLang's last step before it sends `data`, on every path."""
        super()._add_images(s, data)
        if self.role is not None:
            data["lora_path"] = self.role
