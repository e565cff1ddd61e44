"""Which role a request over HTTP names: in ``model``, in ``lora_path`` or in a header.

`settle` runs at the door of every route that names a model and leaves the role on the request;
`apply` hands it to the engine at the one place that all of them pass. SGLang's own rules, by which
any text behind a colon is an adapter and any other name is the model without one, are not asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

from precache_sglang.config import Settings
from precache_sglang.hints import check_ids_in_body

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.requests import Request

HEADER = "X-Precache-Role"
_STATE = "precache_role"


def chosen_role(
    served: Sequence[str],
    roles: Collection[str],
    model: str | None = None,
    lora_path: str | list[str | None] | None = None,
    headers: Sequence[str] = (),
) -> str | list[str | None] | None:
    """The role, None for the model without an adapter, or a list with one of these per prompt.

    Args:
        served: What the model without an adapter is called; the first is the served name.
        roles: Names of the adapters.
        model: ``<served>``, ``<served>:<role>`` or ``<role>``. None and ``default`` (unless
            that is a role) say nothing.
        lora_path: A role, or one for each prompt.
        headers: Values of every `HEADER`.

    Raises:
        HTTPException: 404 for a name that is not known, 400 where two names disagree.
    """
    paths = lora_path if isinstance(lora_path, list) else [lora_path]
    if not all(path is None or isinstance(path, str) for path in paths):
        raise HTTPException(400, f"lora_path={lora_path!r} must be the name of a role.")
    fixed: list[tuple[str, str | None]] = [(f"{HEADER}: {name}", name) for name in headers]
    in_model = _role_in_model(served, roles, model)
    if in_model is not None:
        fixed.append((f"model={model!r}", in_model))
    named = [*fixed]
    if lora_path is not None:
        named += [(f"lora_path={path!r}", path) for path in paths]
    for where, role in named:
        # An empty lora_path has an error of its own, which the offline engine needs as well.
        if role is not None and role not in roles and where != "lora_path=''":
            raise HTTPException(
                404, f"{where} is not a loaded role; loaded: {', '.join(roles) or 'none'}."
            )
    if not fixed:
        return lora_path
    first, role = fixed[0]
    for where, other in named[1:]:
        if other != role:
            raise HTTPException(
                400, f"{first} and {where} name different roles; name one, in one place."
            )
    return role


def _role_in_model(served: Sequence[str], roles: Collection[str], model: str | None) -> str | None:
    if model is None or model in served:
        return None
    for name in served:  # which may have colons of its own, and so may a role
        if model.startswith(f"{name}:") and model[len(name) + 1 :] in roles:
            return model[len(name) + 1 :]
    if model in roles:
        return model
    if model == "default":  # what SGLang's examples write, and it fills in itself
        return None
    raise HTTPException(
        404,
        f"model={model!r} is neither the served model nor a loaded role. Served: {served[0]}; "
        f"roles, alone or as {served[0]}:<role>: {', '.join(roles) or 'none'}.",
    )


async def settle(request: Request, manager: TokenizerManager, body: Any = None) -> None:
    """Leave the role that `request` names on it, and refuse an id that it must not give.

    Args:
        body: Has the attributes ``lora_path`` and ``rid``; without it, the names are those of
            the JSON body.

    Raises:
        HTTPException: see `chosen_role`; 400 for the id.
    """
    from sglang.srt.runtime_context import get_server_args

    headers = request.headers.getlist(HEADER)
    settings = Settings.of(get_server_args())
    if (settings is None or settings.policy is None) and not headers:
        return  # SGLang as it was
    # The body as it was sent: the parsed one has defaults, and for responses no lora_path.
    names = await request.json() if body is None else vars(body)
    try:
        check_ids_in_body(names.get("rid", names.get("request_id")))
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    role = chosen_role(
        (manager.served_model_name, manager.model_path),
        manager.lora_ref_cache,
        names.get("model"),
        names.get("lora_path"),
        headers,
    )
    setattr(request.state, _STATE, role)


async def around_route(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Request
) -> Any:
    """Around the method of one of SGLang's serving classes that answers a route."""
    await settle(raw_request, serving.tokenizer_manager)
    return await original(serving, request, raw_request)


def apply(request: Request | None, engine_request: Any) -> None:
    """Give `engine_request` the role that was settled for `request`, if one was."""
    if request is not None and hasattr(request.state, _STATE):
        engine_request.lora_path = getattr(request.state, _STATE)
