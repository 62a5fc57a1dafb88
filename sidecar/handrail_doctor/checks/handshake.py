"""Checks of what P and D must have alike, setting by setting.

What vLLM's NIXL connector compares, and since when, is in ``nixl_handshake``. A difference that it refuses fails; one that
nothing compares is told with what comes of it. Other connectors compare other things, which are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from handrail_doctor.checks.result import CheckResult, CheckStatus, failed, passed, skipped, warned
from handrail_doctor.connectors import NIXL
from handrail_doctor.facts import SIDES, Facts, PairSide, SourcedValue
from handrail_doctor.kv_size.shape import LayerKind, plain_dtype
from handrail_doctor.nixl_handshake import (
    HIDDEN_STATE_METHODS,
    MEMORY_TYPES,
    METHODS_WITHOUT_KV,
    NEWEST,
    SPLIT_BLOCKS_WITH_HYBRID,
    Release,
    factor,
    release_of,
)

DEFAULT: Final = "the default"
MORE: Final = "--config with the file that starts the engines; or VLLM_SERVER_DEV_MODE=1 on a test system, for /server_info"
_AUTO: Final = "auto"
_IN_THE_MODEL: Final = ("mtp", "dspark")  # methods whose draft the model's own checkpoint holds
_DTYPES: Final = {"half": "float16", "float": "float32"}
_LAYOUTS: Final = {"HND": "LBHNC", "NHD": "LBNHC"}
"""Names of one layout before and since vLLM 0.30."""
_OTHER_KV: Final = "KV of another shape or format is read as if it were D's own: wrong answers, or a crash"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A setting that cannot be told. ``reason``: '' where no source has it."""

    reason: str = ""


Resolved = SourcedValue | Unknown


@dataclass(frozen=True, slots=True)
class Equal:
    """One setting that must be equal on P and D.

    ``unheld``: what comes of a difference that nothing compares, and ``verdict``: how bad that is.
    """

    name: str
    title: str
    do: str
    unheld: str
    verdict: CheckStatus = CheckStatus.FAIL


EQUAL: Final = (
    Equal(
        "version",
        "engine version",
        "use the same image on both sides",
        "releases change what is handed over, and how",
        CheckStatus.WARN,
    ),
    Equal(
        "model",
        "model",
        "use the same path or name in both command lines (NIXL compares it as given: /models/a and /mnt/a differ)",
        _OTHER_KV,
    ),
    Equal(
        "revision",
        "model revision",
        "set --revision to the same commit on both sides",
        "KV of other weights is read without an error, and the answers are wrong",
    ),
    Equal("dtype", "dtype", "set the same --dtype on both sides", _OTHER_KV),
    Equal("kv_cache_dtype", "KV dtype", "set the same --kv-cache-dtype on both sides", _OTHER_KV),
    Equal("hf_overrides", "--hf-overrides", "set the same --hf-overrides on both sides", _OTHER_KV, CheckStatus.WARN),
    Equal(
        "attention_backend",
        "attention backend",
        "set the same --attention-backend on both sides",
        "backends lay their blocks out differently",
        CheckStatus.WARN,
    ),
    Equal(
        "hybrid",
        "hybrid KV cache manager",
        "set --disable-hybrid-kv-cache-manager on both sides",
        "the groups of layers differ between P and D",
        CheckStatus.WARN,
    ),
    Equal(
        "speculation",
        "speculative config",
        "set the same --speculative-config on both sides",
        "a draft model keeps KV of its own, so the groups of layers differ: short prompts may work, and long ones may end in an "
        "illegal memory access on D",
    ),
    Equal(
        "cross_layers",
        "cross-layer blocks",
        "set the same enable_cross_layers_blocks for the NIXL connector of both sides",
        "blocks hold other layers on P than on D",
        CheckStatus.WARN,
    ),
)


def check_equal(facts: Facts, equal: Equal) -> CheckResult | None:
    """Check one row of ``EQUAL``."""
    if not both_known(facts) or (equal.name == "cross_layers" and factor(equal.name, release(facts)) is None):
        return None
    check, title = f"pair.{equal.name}", f"{equal.title} on P and D"
    prefill, decode = (resolved(facts, side, equal.name) for side in SIDES)
    if isinstance(prefill, Unknown) or isinstance(decode, Unknown):
        return _unresolved(check, title, prefill, decode)
    seen = _both(prefill, decode)
    if prefill.value == decode.value:
        return _alike(facts, equal.name, check, title, prefill)
    reason = _incomparable(equal.name, prefill, decode)
    if reason:
        return skipped(check, title, f"{seen}: {reason}", MORE)
    return _different(facts, equal, check, title, seen, _draft_of_unknown_kind(equal.name, prefill, decode))


def check_kv_layout(facts: Facts) -> CheckResult | None:
    """Check the layout of the blocks, which NIXL's handshake compares but where the model has MLA."""
    if not both_known(facts):
        return None
    check, title = "pair.kv_layout", "KV layout on P and D"
    prefill, decode = (resolved(facts, side, "kv_layout") for side in SIDES)
    if isinstance(prefill, Unknown) or isinstance(decode, Unknown):
        return _unresolved(check, title, prefill, decode)
    names = [_LAYOUTS.get(str(each.value), str(each.value)) for each in (prefill, decode)]
    if names[0] == names[1]:
        return passed(check, title, shown(prefill.value))
    seen = _both(prefill, decode)
    if is_mla(facts):
        return passed(check, title, f"P {shown(prefill.value)}, D {shown(decode.value)}: MLA has only one layout")
    nixl = facts.engine(PairSide.DECODE).connector
    if nixl is not None and nixl.nixl is not None and nixl.nixl.settings.get("enable_permute_local_kv") is True:
        return passed(check, title, f"{seen}; enable_permute_local_kv turns it on D (experimental)")
    why = "the handshake refuses a hand-off between layouts (MLA has only one)"
    do = "set the same VLLM_KV_CACHE_LAYOUT and attention backend on both sides"
    if facts.sizes is None or DEFAULT in (prefill.value, decode.value):
        return warned(check, title, seen, why=f"{why}; what this model and its backends use is not known here", do=do)
    return failed(check, title, seen, why=why, do=do) if nixl_pair(facts) else _elsewhere(facts, check, title, seen, do)


def check_block_size(facts: Facts) -> CheckResult | None:
    """Check the block sizes: the flags with each other, and the running engines' smallest groups with each other.

    The two are not the same: an engine shows the smallest block of the model's groups of layers (case P09), and a model with
    states gets larger blocks than it is told.
    """
    if not both_known(facts):
        return None
    check, title = "pair.block_size", "block size on P and D"
    flags = [facts.engine(side).setting("block_size") for side in SIDES]
    groups = [facts.engine(side).setting("group_block_size") for side in SIDES]
    differ = [f"P {p.value} ({p.by}), D {d.value} ({d.by})" for p, d in (flags, groups) if p and d and p.value != d.value]
    if differ:
        return _block_sizes_differ(facts, check, title, "; ".join(differ), [each.value for each in flags if each])
    if all(flags) or all(groups):
        pair = flags if all(flags) else groups
        return passed(check, title, ", ".join(dict.fromkeys(str(each.value) for each in pair if each)))
    known = [(side, each) for side, pair in zip(SIDES, zip(flags, groups, strict=True), strict=True) for each in pair if each]
    if known:
        said = ", ".join(f"{side.value} says {each.value} ({each.by})" for side, each in known)
        return skipped(check, title, f"{said}, the other does not say; the default is its attention backend's", MORE)
    if all(facts.engine(side).whole for side in SIDES):
        return passed(check, title, DEFAULT)
    return skipped(check, title, "neither says", MORE)


def check_buffer_device(facts: Facts) -> CheckResult | None:
    """Check that both hold the blocks that NIXL reads in the same kind of memory, which older releases need."""
    if release(facts) >= MEMORY_TYPES or not nixl_pair(facts):
        return None
    found = [_buffer(facts, side) for side in SIDES]
    if None in found:
        return None
    check, title = "pair.buffer_device", "KV buffer on P and D"
    if found[0] == found[1]:
        return passed(check, title, str(found[0]))
    return failed(
        check,
        title,
        f"P {found[0]}, D {found[1]}",
        why=f"vLLM before {_written(MEMORY_TYPES)} takes P's memory for D's own kind, and no block of it is found",
        do="set the same kv_buffer_device on both sides",
    )


# --- settings as they work --------------------------------------------------------------------------------------------------


def resolved(facts: Facts, side: PairSide, name: str) -> Resolved:
    """Return the effective value of a setting on one side.

    What a command line leaves out has its default. A version and a model have none.
    """
    special = _RESOLVE.get(name)
    if special is not None:
        return special(facts, side)
    engine = facts.engine(side)
    found = engine.setting(name)
    if found is None and engine.whole and name not in ("version", "model"):
        return SourcedValue(DEFAULT, _command_line(facts, side))
    return found if found is not None else Unknown()


def _dtype(facts: Facts, side: PairSide) -> Resolved:
    found = facts.engine(side).setting("dtype")
    if found is None:
        return Unknown()
    name = plain_dtype(str(found.value))
    if name == _AUTO and facts.sizes is not None:
        name = facts.sizes.shape.dtype
    return SourcedValue(_DTYPES.get(name, name), found.by)


def _kv_dtype(facts: Facts, side: PairSide) -> Resolved:
    """Return the KV's format as the engine resolves it: that of a checkpoint whose KV is quantised, for ``auto``."""
    found = facts.engine(side).setting("kv_cache_dtype")
    if found is None:
        return SourcedValue(DEFAULT, _command_line(facts, side)) if facts.engine(side).whole else Unknown()
    own = facts.sizes.shape.kv_dtype if facts.sizes is not None else None
    return SourcedValue(own, found.by) if found.value == _AUTO and own else found


def _layout(facts: Facts, side: PairSide) -> Resolved:
    """Return the layout; with NIXL the engine's default is HND, but where the model has MLA."""
    engine = facts.engine(side)
    found = engine.setting("kv_layout")
    if found is not None:
        return found
    if engine.set_elsewhere("VLLM_KV_CACHE_LAYOUT"):
        return Unknown("VLLM_KV_CACHE_LAYOUT may be set where it runs")
    if not engine.whole:
        return Unknown()
    if engine.connector is not None and engine.connector.nixl is not None and facts.sizes is not None and not is_mla(facts):
        return SourcedValue("HND", "NIXL's default")
    return SourcedValue(DEFAULT, _command_line(facts, side))


def _attention(facts: Facts, side: PairSide) -> Resolved:
    engine = facts.engine(side)
    found = engine.setting("attention_backend")
    if found is not None:
        return found
    return SourcedValue(_AUTO, "chosen by the engine for its GPU and model") if engine.whole else Unknown()


def _hybrid(facts: Facts, side: PairSide) -> Resolved:
    """Return whether the manager is on: as the command line says, else as the connector allows (case P04)."""
    engine = facts.engine(side)
    found = engine.setting("hybrid")
    if found is not None:
        return found
    if not engine.whole:
        return Unknown()
    if engine.connector is None:
        return SourcedValue(True, "vLLM's default")
    on, reason = engine.connector.hybrid(release_on(facts, side))
    return Unknown(reason) if on is None else SourcedValue(on, reason)


def _speculation(facts: Facts, side: PairSide) -> Resolved:
    """Return what of the speculative configuration P and D must share, as one line."""
    engine = facts.engine(side)
    found = engine.setting("speculation")
    if found is None:
        return SourcedValue("none", _command_line(facts, side)) if engine.whole else Unknown()
    config: Mapping[str, Any] = found.value
    method = _method(config) if config else "none"
    if method in METHODS_WITHOUT_KV:
        return SourcedValue("none", f"{method} keeps no KV, {found.by}")
    kv_dtype, own = config.get("kv_cache_dtype"), engine.value("kv_cache_dtype")
    parts = {
        "model": config.get("model") or (engine.value("model") if method in _IN_THE_MODEL else None),
        "revision": config.get("revision"),
        "code_revision": config.get("code_revision"),
        "parallel_drafting": config.get("parallel_drafting") or None,
        "kv_cache_dtype": None if kv_dtype == own else kv_dtype,
    }
    given = [f"{key} {value}" for key, value in parts.items() if value not in (None, "")]
    return SourcedValue(" ".join([method, *given]), found.by)


def _method(config: Mapping[str, Any]) -> str:
    """Return the method as vLLM names it.

    Where none is given, the draft model's own configuration decides, which its name mostly tells.
    """
    given = str(config.get("method") or "")
    if given.endswith("mtp"):  # deepseek_mtp and others are old names
        return "mtp"
    if given:
        return given
    name = str(config.get("model") or "").lower()
    if name.strip("[]") == "ngram":
        return "ngram"
    return next((method for method in ("eagle3", "eagle", "dflash", "dspark", "mtp") if method in name), "draft_model")


def _overrides(facts: Facts, side: PairSide) -> Resolved:
    found = facts.engine(side).setting("hf_overrides")
    if found is not None:
        return SourcedValue(found.value or "none", found.by)
    return SourcedValue("none", _command_line(facts, side)) if facts.engine(side).whole else Unknown()


def _cross_layers(facts: Facts, side: PairSide) -> Resolved:
    connector = facts.engine(side).connector
    if connector is None or connector.nixl is None:
        return Unknown()
    return SourcedValue(
        str(connector.nixl.extra.get("enable_cross_layers_blocks", False)).lower() == "true", f"{connector.nixl.name}'s settings"
    )


_RESOLVE: Final[Mapping[str, Callable[[Facts, PairSide], Resolved]]] = {
    "dtype": _dtype,
    "kv_cache_dtype": _kv_dtype,
    "kv_layout": _layout,
    "attention_backend": _attention,
    "hybrid": _hybrid,
    "speculation": _speculation,
    "hf_overrides": _overrides,
    "cross_layers": _cross_layers,
}


# --- what a difference means ------------------------------------------------------------------------------------------------


def _unresolved(check: str, title: str, prefill: Resolved, decode: Resolved) -> CheckResult:
    """Report that one side or both do not say."""
    if isinstance(prefill, Unknown) and isinstance(decode, Unknown):
        return skipped(
            check, title, "; ".join(dict.fromkeys(filter(None, (prefill.reason, decode.reason)))) or "neither says", MORE
        )
    pairs = zip(SIDES, (prefill, decode), strict=True)
    side, known = next((side, each) for side, each in pairs if isinstance(each, SourcedValue))
    reason = next(each.reason for each in (prefill, decode) if isinstance(each, Unknown))
    return skipped(check, title, f"{side.value} says {shown(known.value)}, {reason or 'the other does not say'}", MORE)


def _alike(facts: Facts, name: str, check: str, title: str, found: SourcedValue) -> CheckResult:
    text = shown(found.value)
    if name == "dtype" and found.value == _AUTO:
        models = [facts.engine(side).value("model") for side in SIDES]
        if models[0] != models[1] or models[0] is None:
            return skipped(check, title, "auto on both, and whether the models are the same is not known", MORE)
        return passed(check, title, "auto on both: the model's own")
    if name == "attention_backend" and found.value == _AUTO:
        return passed(check, title, "neither names one: each chooses for its GPU, so alike GPUs have the same")
    return passed(check, title, text)


def _incomparable(name: str, prefill: SourcedValue, decode: SourcedValue) -> str:
    """Return why two values that differ may still be the same; '' where they may not."""
    values, sources = {prefill.value, decode.value}, [prefill.by, decode.by]
    if name == "attention_backend" and _AUTO in values:
        return "the engine that names none may choose the same"
    if name == "dtype" and _AUTO in values:
        return "auto is the model's own, which --model tells"
    if name == "kv_cache_dtype" and values & {_AUTO, DEFAULT, "fp8"} and sum("/metrics" in by for by in sources) == 1:
        return "one is what the running engine made of it, the other what a command line says"
    return ""


def _draft_of_unknown_kind(name: str, prefill: SourcedValue, decode: SourcedValue) -> bool:
    """Test whether the difference is a draft that NIXL's hash does not hold, such as a draft model of its own."""
    methods = {str(each.value).split(" ")[0] for each in (prefill, decode)}
    return name == "speculation" and not methods & set(HIDDEN_STATE_METHODS)


def _different(facts: Facts, equal: Equal, check: str, title: str, seen: str, outside: bool) -> CheckResult:
    if not nixl_pair(facts):
        if equal.name == "revision":
            return failed(check, title, seen, why=f"nothing compares it: {equal.unheld}", do=equal.do)
        return _elsewhere(facts, check, title, seen, equal.do)
    used = release(facts)
    held = None if outside else factor(equal.name, used)
    if held is None:
        older = "" if equal.name == "revision" or outside else f" in vLLM {_written(used)}"
        make = warned if outside or equal.verdict is CheckStatus.WARN else failed
        return make(check, title, seen, why=f"NIXL's handshake does not compare it{older}: {equal.unheld}", do=equal.do)
    since = f"since vLLM {_written(held.since)}, {held.source}"
    if not _enforced(facts):
        return warned(
            check,
            title,
            seen,
            why=f"enforce_handshake_compat is false, so NIXL's handshake does not refuse it: {equal.unheld}",
            do=equal.do,
        )
    if equal.name == "version" and _same_release(facts):
        return warned(
            check,
            title,
            seen,
            why=f"NIXL's handshake compares the whole version ({since}): builds of one release are refused where theirs differ",
            do=f"vllm --version on both; {equal.do}",
        )
    if equal.name == "hf_overrides":
        return warned(
            check,
            title,
            seen,
            why=f"NIXL's handshake compares KV heads, head size and layers ({since}): an override that changes them is refused",
            do=equal.do,
        )
    return failed(
        check,
        title,
        seen,
        why=f"NIXL's handshake compares it ({since}) and refuses the peer, so every hand-off fails",
        do=equal.do,
    )


def _elsewhere(facts: Facts, check: str, title: str, seen: str, do: str) -> CheckResult:
    """Judge a difference of a pair that does not hand over with NIXL."""
    connectors = [facts.engine(side).connector for side in SIDES]
    names = " and ".join(dict.fromkeys(each.described for each in connectors if each is not None))
    return warned(
        check,
        title,
        seen,
        why=f"what {names} compares is not known here; NIXL would refuse such a difference or misread it",
        do=do,
    )


def _block_sizes_differ(facts: Facts, check: str, title: str, seen: str, flags: list[int]) -> CheckResult:
    do = "set the same --block-size on both sides"
    used, tp = release(facts), [facts.engine(side).value("tp") for side in SIDES]
    several = facts.sizes is not None and len({layer.kind for layer, _ in facts.sizes.shape.layers if layer.by_token}) > 1
    hybrid = [resolved(facts, side, "hybrid") for side in SIDES]
    managed = all(isinstance(each, SourcedValue) and each.value is True for each in hybrid)
    refused = ""
    if _buffer(facts, PairSide.DECODE) == "cpu":
        refused = "vLLM refuses blocks of another size through a host buffer (kv_buffer_device cpu)"
    elif used < SPLIT_BLOCKS_WITH_HYBRID and several and managed:
        refused = f"vLLM before {_written(SPLIT_BLOCKS_WITH_HYBRID)} refuses it for models with several kinds of layers"
    elif None not in tp and tp[0] > tp[1]:
        refused = "vLLM refuses it where P has more tensor-parallel ranks than D"
    if refused and nixl_pair(facts):
        return failed(check, title, seen, why=refused, do=do)
    odd = len(flags) == len(SIDES) and flags[1] % flags[0] != 0
    why = "D reads blocks of another size in pieces" + (
        ", and refuses P where D's block is no multiple of P's, unless the attention backend cuts both into smaller ones"
        if odd
        else ""
    )
    return warned(check, title, seen, why=why, do=do)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def both_known(facts: Facts) -> bool:
    """Test whether something is known of both engines."""
    return all(facts.engine(side).setups for side in SIDES)


def nixl_pair(facts: Facts) -> bool:
    """Test whether NIXL hands over, or may: a connector that no source names is taken for it."""
    connectors = [facts.engine(side).connector for side in SIDES]
    return all(each is None or bool(each.kinds & NIXL) or bool(each.unknown()) for each in connectors)


def is_mla(facts: Facts) -> bool:
    return facts.sizes is not None and any(layer.kind is LayerKind.MLA for layer, _ in facts.sizes.shape.layers)


def release(facts: Facts) -> Release:
    """Return the release whose rules count: D's, since D asks and compares; else P's; else the newest that is known."""
    known = [release_of(facts.engine(side).value("version")) for side in (PairSide.DECODE, PairSide.PREFILL)]
    return next((each for each in known if each is not None), NEWEST)


def release_on(facts: Facts, side: PairSide) -> Release:
    return release_of(facts.engine(side).value("version")) or release(facts)


def shown(value: Any) -> str:
    """Format a value of a setup for a person."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _both(prefill: SourcedValue, decode: SourcedValue) -> str:
    return f"P {shown(prefill.value)} ({prefill.by}), D {shown(decode.value)} ({decode.by})"


def _command_line(facts: Facts, side: PairSide) -> str:
    return next(each.by for each in facts.engine(side).setups if each.whole)


def _written(number: Release) -> str:
    return f"{number[0]}.{number[1]}"


def _enforced(facts: Facts) -> bool:
    """Test whether the engine that asks refuses another hash: D, and for a push P as well."""
    found = [facts.engine(side).connector for side in SIDES]
    nixl = [each.nixl if each is not None else None for each in found]
    open_ = [each is not None and each.extra.get("enforce_handshake_compat") is False for each in nixl]
    pushes = any(each is not None and "Push" in each.name for each in nixl)
    return not (all(open_) if pushes else open_[1])


def _same_release(facts: Facts) -> bool:
    """Test whether both versions are builds of one release, as 0.32.0 and 0.32.0+cu129 are."""
    texts = [str(facts.engine(side).value("version")).removeprefix("v") for side in SIDES]
    return len({text.partition("+")[0].partition("-")[0] for text in texts}) == 1


def _buffer(facts: Facts, side: PairSide) -> str | None:
    """Return the memory of the blocks that NIXL reads; None where it is not known."""
    connector = facts.engine(side).connector
    if connector is None or connector.nixl is None:
        return None
    return str(connector.nixl.settings.get("kv_buffer_device") or "cuda")
