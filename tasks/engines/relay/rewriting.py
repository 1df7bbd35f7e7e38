"""Walks and rewrites Relay functions without recursion: deep models would overflow Python's stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relay

from tasks.errors import ModelError


def post_order(func: Any) -> list[Any]:
    """Every node of the body, each after those that it reads, the inside of nested functions left out.

    Raises ModelError where the function has control flow.
    """
    nodes: list[Any] = []
    seen: set[Any] = set()
    pending: list[tuple[Any, bool]] = [(func.body, False)]
    while pending:
        node, ready = pending.pop()
        if ready:
            nodes.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        pending.append((node, True))
        pending.extend((child, False) for child in reversed(children(node)))
    return nodes


def children(node: Any) -> list[Any]:
    """The nodes whose values ``node`` reads."""
    if isinstance(node, relay.Call):
        return list(node.args)
    if isinstance(node, relay.Tuple):
        return list(node.fields)
    if isinstance(node, relay.TupleGetItem):
        return [node.tuple_value]
    if isinstance(node, (relay.Let, relay.If, relay.Match)):
        raise ModelError(
            "the relay engine compiles models without control flow (If, Loop, Scan); export the model without it"
        )
    return []


def rebuild(func: Any, rewrite: Callable[[Any, Any], Any]) -> Any:
    """``func`` with every call replaced by ``rewrite(old, new)``, where ``new`` reads rewritten arguments."""
    made: dict[Any, Any] = {}
    for node in post_order(func):
        if isinstance(node, relay.Call):
            args = [made[arg] for arg in node.args]
            same = all(new.same_as(old) for new, old in zip(args, node.args))  # noqa: B905 - Python 3.9 has no strict
            new = node if same else relay.Call(node.op, args, node.attrs, node.type_args, node.span)
            made[node] = rewrite(node, new)
        elif isinstance(node, relay.Tuple):
            made[node] = relay.Tuple([made[field] for field in node.fields])
        elif isinstance(node, relay.TupleGetItem):
            made[node] = relay.TupleGetItem(made[node.tuple_value], node.index)
        else:
            made[node] = node
    return relay.Function(func.params, made[func.body], None, func.type_params, func.attrs)
