"""Checks that P and D agree on what a hand-off needs.

What must be equal is what NIXL's handshake compares in vLLM 0.32 (``compute_nixl_compatibility_hash`` and
``_validate_remote_agent_handshake``), and what it cannot compare: the revision of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.facts import SIDES, Facts, PairSide, SourcedValue
from handrail_doctor.kv_size.shape import LayerKind

_NIXL_PULL: Final = ("NixlConnector", "NixlPullConnector")
_HASHED: Final = "NIXL's handshake compares it and refuses the peer, so every hand-off fails"
DEFAULT: Final = "the default"
MORE: Final = "--config with the file that starts the engines; or VLLM_SERVER_DEV_MODE=1 on a test system, for /server_info"


@dataclass(frozen=True, slots=True)
class Equal:
    """One setting that must be equal on P and D. ``loose``: a difference is a warning."""

    name: str  # a field of Setup
    title: str
    why: str
    do: str
    loose: bool = False


EQUAL: Final = (
    Equal("version", "engine version", _HASHED, "use the same image on both sides"),
    Equal(
        "model",
        "model",
        f"{_HASHED}; it compares the path or name as given, so /models/a and /mnt/a differ",
        "use the same path or name in both command lines",
    ),
    Equal(
        "revision",
        "model revision",
        "nothing compares it: KV of other weights is read without an error, and the answers are wrong",
        "set --revision to the same commit on both sides",
    ),
    Equal("dtype", "dtype", _HASHED, "set the same --dtype on both sides"),
    Equal("kv_cache_dtype", "KV dtype", _HASHED, "set the same --kv-cache-dtype on both sides"),
    Equal(
        "block_size",
        "block size",
        "vLLM 0.32 reads blocks of another size in pieces, and not at all through a host buffer; older versions refuse them",
        "set the same --block-size on both sides",
        loose=True,
    ),
    Equal(
        "kv_layout",
        "KV layout",
        "the handshake refuses a hand-off between layouts (MLA has only one)",
        "set the same VLLM_KV_CACHE_LAYOUT and attention backend on both sides",
    ),
    Equal("hybrid", "hybrid KV cache manager", _HASHED, "set --disable-hybrid-kv-cache-manager on both sides or on neither"),
)


def check_equal(facts: Facts, equal: Equal) -> CheckResult | None:
    """Check one row of ``EQUAL``."""
    if not _pair(facts):
        return None
    check, title = f"pair.{equal.name}", f"{equal.title} on P and D"
    prefill, decode = _resolved(facts, PairSide.PREFILL, equal.name), _resolved(facts, PairSide.DECODE, equal.name)
    if prefill is None and decode is None:
        return skipped(check, title, "neither says", MORE)
    if prefill is None or decode is None:
        side, sourced_value = (PairSide.PREFILL, prefill) if prefill is not None else (PairSide.DECODE, decode)
        text = shown(sourced_value.value) if sourced_value is not None else ""
        return skipped(check, title, f"{side.value} says {text}, the other does not say", MORE)
    if prefill.value == decode.value:
        return passed(check, title, shown(prefill.value))
    if equal.name == "kv_layout" and _is_mla(facts):
        return passed(check, title, f"P {shown(prefill.value)}, D {shown(decode.value)}: MLA has only one layout")
    make = warned if equal.loose else failed
    seen = f"P {shown(prefill.value)} ({prefill.by}), D {shown(decode.value)} ({decode.by})"
    return make(check, title, seen, why=equal.why, do=equal.do)


def _resolved(facts: Facts, side: PairSide, name: str) -> SourcedValue | None:
    """Return the effective value of a setting.

    What a command line leaves out has its default. A dtype of auto is the model's own. The version and the model have no default.
    """
    engine = facts.engine(side)
    sourced_value = engine.setting(name)
    if sourced_value is None and engine.whole and name not in ("version", "model"):
        return SourcedValue(DEFAULT, next(each.by for each in engine.setups if each.whole))
    if sourced_value is not None and name == "dtype" and sourced_value.value == "auto":
        return SourcedValue(facts.sizes.shape.dtype, sourced_value.by) if facts.sizes is not None else None
    return sourced_value


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
    heads = [layer.kv_heads for layer, _ in facts.sizes.shape.layers if layer.by_token] if facts.sizes else []
    if prefill.value > decode.value and heads and not _is_mla(facts) and prefill.value > min(heads):
        return failed(
            check,
            title,
            f"{shown}, {min(heads)} KV heads",
            why="P holds each KV head on several ranks, and vLLM 0.32 can then not hand over from more ranks to fewer",
            do=f"at most {min(heads)} ranks on P, or as many on D",
        )
    return passed(check, title, shown)


def check_connector(facts: Facts) -> CheckResult | None:
    """Check that both run the same connector, in matching roles and one direction."""
    if not _pair(facts):
        return None
    check, title = "pair.connector", "KV connector"
    sides = {side: facts.engine(side).setting("connector") for side in SIDES}
    roles = {side: facts.engine(side).value("kv_role") for side in SIDES}
    if not any(sides.values()):
        return skipped(check, title, "neither engine says", MORE)
    wrong = [(PairSide.PREFILL, "kv_consumer"), (PairSide.DECODE, "kv_producer")]
    turned = [f"{side.value} is {role}" for side, role in wrong if roles[side] == role]
    if turned:
        return failed(
            check,
            title,
            "; ".join(turned),
            why="this direction hands nothing over",
            do="set kv_producer on P and kv_consumer on D, or kv_both",
        )
    kinds = {side: _kind(sourced_value.value) for side, sourced_value in sides.items() if sourced_value is not None}
    if len(set(kinds.values())) > 1:
        shown = ", ".join(
            f"{side.value} {sourced_value.value}" for side, sourced_value in sides.items() if sourced_value is not None
        )
        return failed(
            check,
            title,
            shown,
            why="push and pull, or two connectors, do not understand each other",
            do="use one connector on both sides",
        )
    policy = facts.engine(PairSide.DECODE).value("failure_policy")
    names = ", ".join(
        f"{side.value} {sourced_value.value}{f' as {roles[side]}' if roles[side] else ''}"
        for side, sourced_value in sides.items()
        if sourced_value
    )
    return passed(
        check, title, f"{names}; a failed load {'is recomputed' if policy == 'recompute' else 'fails the request (the default)'}"
    )


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    yield check_two_engines(facts)
    yield check_served(facts)
    for equal in EQUAL:
        yield check_equal(facts, equal)
    yield check_tp(facts)
    yield check_connector(facts)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _pair(facts: Facts) -> bool:
    """Test whether something is known of both engines."""
    return all(facts.engine(side).setups for side in SIDES)


def _is_mla(facts: Facts) -> bool:
    return facts.sizes is not None and any(layer.kind is LayerKind.MLA for layer, _ in facts.sizes.shape.layers)


def _kind(connector: str) -> str:
    return "NixlPullConnector" if connector in _NIXL_PULL else connector


def shown(value: Any) -> str:
    """Format a value of a setup for a person."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
