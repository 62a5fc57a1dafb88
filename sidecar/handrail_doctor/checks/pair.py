"""Checks that P and D agree on what a hand-off needs.

Settings that must be equal are in ``handshake``. Here stand the names that they serve, their ranks, their connectors, and the
backends and transports that carry the KV from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from handrail_doctor.checks.handshake import (
    EQUAL,
    MORE,
    both_known,
    check_block_size,
    check_buffer_device,
    check_equal,
    check_kv_layout,
    is_mla,
    nixl_pair,
    release,
)
from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.connectors import Connector, ConnectorKind
from handrail_doctor.facts import SIDES, EngineView, Facts, PairSide, Placement
from handrail_doctor.kv_size.shape import LayerKind
from handrail_doctor.nixl_handshake import MORE_RANKS_ON_P
from handrail_doctor.transports import RDMA, carriers, nixl_backends, uses_ucx

_STORAGE: Final = frozenset({"GDS", "GDS_MT", "POSIX", "OBJ", "HF3FS"})
"""NIXL's backends that write to storage; the others carry KV from engine to engine."""


def check_two_engines(facts: Facts) -> CheckResult | None:
    """Check that P and D have two addresses.

    At one address they are one engine, which agrees with itself in everything.
    """
    prefill, decode = facts.engine(PairSide.PREFILL).url, facts.engine(PairSide.DECODE).url
    if prefill is None or prefill != decode:
        return None
    return warned(
        "pair.two_engines",
        "two engines",
        f"--prefill and --decode are both {prefill}",
        why="the doctor looked at one engine twice, and compared it with itself",
        do="give the other engine's own address; if one engine serves both phases, there is no hand-off to check",
    )


def check_served(facts: Facts) -> CheckResult | None:
    """Check that both serve a model under one name, which a router puts into requests."""
    prefill, decode = facts.engine(PairSide.PREFILL).live, facts.engine(PairSide.DECODE).live
    if prefill is None or decode is None or not prefill.models or not decode.models:
        return None
    check, title = "pair.served", "served model name"
    common = set(prefill.models) & set(decode.models)
    if common:
        return passed(check, title, ", ".join(sorted(common)))
    return failed(
        check,
        title,
        f"P serves {', '.join(prefill.models)}; D serves {', '.join(decode.models)}",
        why="one of the two answers 404 to every request of the router",
        do="set the same --served-model-name on both sides",
    )


def check_tp(facts: Facts) -> CheckResult | None:
    """Check the tensor-parallel sizes.

    More ranks on P than on D is refused where P holds KV heads several times.
    """
    prefill, decode = facts.engine(PairSide.PREFILL).setting("tp"), facts.engine(PairSide.DECODE).setting("tp")
    if prefill is None or decode is None:
        return None
    check, title = "pair.tp", "tensor-parallel ranks"
    shown = f"P {prefill.value}, D {decode.value}"
    if prefill.value % decode.value and decode.value % prefill.value:
        return failed(
            check,
            title,
            shown,
            why="one must divide the other for the hand-off",
            do="use numbers of ranks of which one divides the other",
        )
    if prefill.value > decode.value and release(facts) < MORE_RANKS_ON_P and nixl_pair(facts):
        return failed(
            check, title, shown, why="vLLM before 0.14 refuses more ranks on P than on D", do="use as many ranks on P as on D"
        )
    layers = [layer for layer, _ in facts.sizes.shape.layers] if facts.sizes else []
    heads = [layer.kv_heads for layer in layers if layer.by_token]
    if prefill.value > decode.value and heads and not _heads_are_free(facts) and prefill.value > min(heads):
        return failed(
            check,
            title,
            f"{shown}, {min(heads)} KV heads",
            why="P holds each KV head on several ranks, and vLLM 0.32 can then not hand over from more ranks to fewer",
            do=f"use at most {min(heads)} ranks on P, or as many on D",
        )
    return passed(check, title, shown)


def check_context_parallel(facts: Facts) -> CheckResult | None:
    """Check the context-parallel ranks of decode, of which one must divide the other."""
    prefill, decode = facts.engine(PairSide.PREFILL).value("dcp"), facts.engine(PairSide.DECODE).value("dcp")
    if prefill is None or decode is None or prefill == decode == 1:
        return None
    check, title = "pair.dcp", "decode context-parallel ranks"
    seen = f"P {prefill}, D {decode}"
    if prefill % decode and decode % prefill:
        return failed(
            check,
            title,
            seen,
            why="one must divide the other for the hand-off",
            do="use numbers of ranks of which one divides the other",
        )
    if prefill != decode and is_mla(facts) and _has_states(facts):
        return failed(
            check,
            title,
            seen,
            why="vLLM needs equal ranks where a model has MLA and states",
            do="use the same ranks on both sides",
        )
    return passed(check, title, seen)


def check_connector(facts: Facts) -> CheckResult | None:
    """Check that P and D hand over with the same connector, in matching roles and one direction.

    A wrapper counts as what it wraps. Of a class that is not known nothing is concluded, neither good nor bad.
    """
    if not both_known(facts):
        return None
    check, title = "pair.connector", "KV connector"
    sides = {side: facts.engine(side).connector for side in SIDES}
    roles = {side: facts.engine(side).value("kv_role") for side in SIDES}
    known = [each for each in sides.values() if each is not None]
    if not known:
        return skipped(check, title, "neither engine says", MORE)
    turned = [
        f"{side.value} is {role}"
        for side, role in ((PairSide.PREFILL, "kv_consumer"), (PairSide.DECODE, "kv_producer"))
        if roles[side] == role
    ]
    if turned:
        return failed(
            check,
            title,
            "; ".join(turned),
            why="this direction hands nothing over",
            do="set kv_producer on P and kv_consumer on D, or kv_both",
        )
    names = ", ".join(
        f"{side.value} {each.described}{f' as {roles[side]}' if roles[side] else ''}"
        for side, each in sides.items()
        if each is not None
    )
    if len(known) < len(SIDES):
        return skipped(check, title, f"{names}; the other does not say", MORE)
    return _connectors(facts, check, title, names, *known)


def _connectors(facts: Facts, check: str, title: str, names: str, prefill: Connector, decode: Connector) -> CheckResult:
    policy = facts.engine(PairSide.DECODE).value("failure_policy")
    failure = f"a failed load {'is recomputed' if policy == 'recompute' else 'fails the request (the default)'}"
    if prefill.direct & decode.direct:
        way = "" if prefill.name == decode.name and not prefill.children else f": {_ways(prefill.direct & decode.direct)} on both"
        return passed(check, title, f"{names}{way}; {failure}")
    unknown = dict.fromkeys((*prefill.unknown(), *decode.unknown()))
    if unknown:
        return skipped(
            check,
            title,
            f"{names}: {', '.join(unknown)} is unknown, so the doctor cannot tell whether the two hand over to each other",
            "one hand-off, and the engines' logs",
        )
    common = prefill.kinds & decode.kinds
    if common - {ConnectorKind.STORE} or (common and prefill.name == decode.name):
        return skipped(
            check,
            title,
            f"{names}: {_ways(common)} hands over by its own configuration, which is not read here",
            "the configuration of both (LMCACHE_CONFIG_FILE for LMCache)",
        )
    return failed(
        check,
        title,
        names,
        why=f"P hands over by {_ways(prefill.kinds)}, D by {_ways(decode.kinds)}: they do not understand each other",
        do="use one connector on both sides",
    )


def check_backends(facts: Facts) -> CheckResult | None:
    """Check that NIXL has a backend on both sides that carries KV between engines."""
    found = [nixl_backends(facts.engine(side)) for side in SIDES]
    prefill, decode = found
    if prefill is None or decode is None:
        return None
    check, title = "pair.backends", "NIXL's backends on P and D"
    both = [name for name in decode if name in prefill and name not in _STORAGE]
    seen = f"P {', '.join(prefill)}; D {', '.join(decode)}"
    if both:
        return passed(check, title, ", ".join(both) if set(prefill) == set(decode) else f"{seen}; both have {', '.join(both)}")
    return failed(
        check,
        title,
        seen,
        why="they have no backend in common that carries KV from engine to engine, so NIXL cannot reach the peer",
        do='set the same "backends" in kv_connector_extra_config of both NIXL connectors (without it: UCX)',
    )


def check_transports(facts: Facts) -> CheckResult | None:
    """Check that UCX_TLS and UCX_NET_DEVICES of P and D leave a transport that both have."""
    engines = [facts.engine(side) for side in SIDES]
    if not all(engine.environment_known for engine in engines) or not all(map(uses_ucx, engines)):
        return None
    if any(engine.set_elsewhere(name) for engine in engines for name in ("UCX_TLS", "UCX_NET_DEVICES")):
        return None
    within = facts.placement is not Placement.ACROSS_HOSTS
    prefill, decode = (carriers(engine, within=within) for engine in engines)
    check, title = "pair.transports", "UCX transports of P and D"
    seen = "; ".join(
        f"{engine.side.value}: UCX_TLS {_said(engine, 'UCX_TLS')}, UCX_NET_DEVICES {_said(engine, 'UCX_NET_DEVICES')}"
        for engine in engines
    )
    both = prefill & decode
    do = "set the same UCX_TLS on both, and UCX_NET_DEVICES of one kind; or unset both, so that UCX chooses"
    if not both:
        return failed(check, title, seen, why="no transport is left on both that leads to the other engine", do=do)
    if facts.placement is Placement.ACROSS_HOSTS and bool(prefill & RDMA) != bool(decode & RDMA):
        return warned(check, title, seen, why=f"RDMA is left on one side alone, so KV goes over {', '.join(sorted(both))}", do=do)
    restricted = any(engine.variable(name) for engine in engines for name in ("UCX_TLS", "UCX_NET_DEVICES"))
    return passed(check, title, seen if restricted else "neither side restricts UCX")


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    yield check_two_engines(facts)
    yield check_served(facts)
    for equal in EQUAL:
        yield check_equal(facts, equal)
    yield check_kv_layout(facts)
    yield check_block_size(facts)
    yield check_buffer_device(facts)
    yield check_tp(facts)
    yield check_context_parallel(facts)
    yield check_connector(facts)
    yield check_backends(facts)
    yield check_transports(facts)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _ways(kinds: frozenset[ConnectorKind]) -> str:
    return ", ".join(sorted(kind.value for kind in kinds))


def _said(engine: EngineView, name: str) -> str:
    found = engine.variable(name)
    return str(found.value) if found is not None else "not set"


def _has_states(facts: Facts) -> bool:
    return facts.sizes is not None and any(layer.kind is LayerKind.STATE for layer, _ in facts.sizes.shape.layers)


def _heads_are_free(facts: Facts) -> bool:
    """Test whether P may hold KV heads on several ranks: MLA has none, and models with states may."""
    return is_mla(facts) or _has_states(facts)
