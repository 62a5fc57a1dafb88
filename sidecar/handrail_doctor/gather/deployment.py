"""Read how engines are started, from Kubernetes manifests and Compose files.

All kinds of objects count: every mapping with a command or arguments that contain ``vllm serve`` (or the module that it runs) is
an engine, and its environment is beside it.
The engine's name decides its side, else ``kv_role`` does. A value that another tool fills in later (``$VAR``, ``{{ }}``) is not
known.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from handrail_doctor.connectors import connector_of
from handrail_doctor.facts import ALL_PLUGINS, ANY, PairSide, Setup

_SERVES: Final = re.compile(r"\bvllm\s+serve\b|vllm\.entrypoints\.(?:openai\.api_server|cli)")
_LATER: Final = re.compile(r"\$\{?\(?\w|\{\{")
_TAG: Final = re.compile(r":v?(\d+\.\d+\S*)$")
_OBJECT: Final = re.compile(r'\s*\{\s*"')  # JSON is kept although a part of it is filled in later
_LONGEST: Final = 500  # characters of a name: a node that contains itself ends there
_ROLES: Final = {"kv_producer": PairSide.PREFILL, "kv_consumer": PairSide.DECODE}
_SHORT: Final = {
    "-ac": "attention-config",
    "-dcp": "decode-context-parallel-size",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
"""vLLM's short names of the flags that are read here."""
_SWITCHES: Final = ("disable-hybrid-kv-cache-manager", "no-disable-hybrid-kv-cache-manager", "disable-log-stats")


@dataclass(frozen=True, slots=True)
class Started:
    """One engine of a deployment.

    ``side``: None where neither role nor name decides it. ``port``: of its HTTP API.
    """

    name: str
    side: PairSide | None
    setup: Setup
    port: int | None


def engines_in(documents: Sequence[Any], file: str) -> list[Started]:
    """Find every engine in the documents of one YAML file called ``file``, in order."""
    seen: set[tuple[int, str]] = set()
    return [engine for document in documents for engine in _walk(document, "", file, seen)]


def arguments_setup(
    words: Sequence[str], env: Mapping[str, str], elsewhere: frozenset[str], *, by: str, version: str | None = None
) -> Setup:
    """Build the setup of a command line and its environment.

    ``words``: those after ``vllm serve``, or all of the module's.
    """
    flags, plain = _flags(words)
    transfer, attention = _object(flags, "kv-transfer-config"), _object(flags, "attention-config")
    hybrid = None
    if "disable-hybrid-kv-cache-manager" in flags:
        hybrid = False
    elif "no-disable-hybrid-kv-cache-manager" in flags:
        hybrid = True
    return Setup(
        by=by,
        whole="config" not in flags and not _filled_in_later(words),
        version=version,
        model=flags.get("model") or (plain[0] if plain else None),
        revision=flags.get("revision"),
        dtype=flags.get("dtype", "auto"),
        kv_cache_dtype=flags.get("kv-cache-dtype", "auto"),
        block_size=whole(flags.get("block-size")),
        kv_layout=env.get("VLLM_KV_CACHE_LAYOUT"),
        tp=_ranks(flags, "tensor-parallel-size"),
        dcp=_ranks(flags, "decode-context-parallel-size"),
        attention_backend=backend_of(
            flags.get("attention-backend") or attention.get("backend") or env.get("VLLM_ATTENTION_BACKEND")
        ),
        speculation=_speculation(flags),
        hf_overrides=canonical(_object(flags, "hf-overrides")),
        max_model_len=whole(flags.get("max-model-len")),
        hybrid=hybrid,
        **transfer_fields(transfer),
        side_host=env.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
        side_port=whole(env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")),
        otlp_endpoint=flags.get("otlp-traces-endpoint"),
        middleware=tuple(value for name, value in _pairs(words) if name == "middleware" and value),
        log_stats=False if "disable-log-stats" in flags else None,
        plugins=None if {"VLLM_PLUGINS", ANY} & elsewhere and "VLLM_PLUGINS" not in env else names_of_plugins(env),
        env=env,
        elsewhere=elsewhere,
    )


def _ranks(flags: Mapping[str, str], name: str) -> int | None:
    """Return the ranks of one kind; 1 where the command line does not set them."""
    given = flags.get(name)
    return whole(given) if given else 1


def _speculation(flags: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Return the speculative configuration, from its JSON or its own flags."""
    parts = {key: flags[f"spec-{key}"] for key in ("method", "model") if flags.get(f"spec-{key}")}
    return {**_object(flags, "speculative-config"), **parts} or None


def backend_of(name: Any) -> str | None:
    """Return an attention backend's name as vLLM writes it; None where the engine chooses."""
    text = name.strip().upper() if isinstance(name, str) else ""
    return text if text not in ("", "AUTO", "NONE") else None


def canonical(values: Mapping[str, Any]) -> str | None:
    """Return JSON that is equal for equal values; None for none."""
    return json.dumps(values, sort_keys=True) if values else None


def transfer_fields(transfer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``Setup`` that a KVTransferConfig, as JSON, has.

    Those of NIXL come from the NIXL connector, which another may wrap.
    """
    found: dict[str, Any] = {
        field: transfer[key]
        for field, key in (("kv_role", "kv_role"), ("failure_policy", "kv_load_failure_policy"))
        if isinstance(transfer.get(key), str) and transfer[key]
    }
    connector = connector_of(transfer)
    if connector is None:
        return found
    extra = (connector.nixl or connector).extra
    lease = extra.get("kv_lease_duration")
    if isinstance(lease, int | float) and not isinstance(lease, bool) and lease > 0:
        found["lease_s"] = float(lease)
    return {**found, "connector": connector, "backends": names_of(extra.get("backends"))}


def names_of(value: Any) -> tuple[str, ...] | None:
    """Return a list of words; None where the value is not one."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value):
        return tuple(value)
    return None


def names_of_plugins(env: Mapping[str, str]) -> tuple[str, ...]:
    """Read VLLM_PLUGINS as vLLM does: an empty value allows no plugin."""
    return tuple(env["VLLM_PLUGINS"].split(",")) if "VLLM_PLUGINS" in env else ALL_PLUGINS


def whole(text: Any) -> int | None:
    """Parse a whole number; None where the text is not one."""
    try:
        return int(text)
    except (TypeError, ValueError):
        return None


# --- finding ---------------------------------------------------------------------------------------------------------------


def _walk(node: Any, name: str, file: str, seen: set[tuple[int, str]]) -> Iterator[Started]:
    """Find the engines below a node.

    ``name``: that of the parents, such as ``vllm-decode/server``.
    ``seen``: nodes already visited, since YAML's aliases may nest a node a billion times.
    """
    if not isinstance(node, list | Mapping) or (id(node), name) in seen or len(name) > _LONGEST:
        return
    seen.add((id(node), name))
    if isinstance(node, list):
        for each in node:
            yield from _walk(each, name, file, seen)
        return
    metadata = node.get("metadata")
    own = node.get("name") or (metadata.get("name") if isinstance(metadata, Mapping) else None)
    if isinstance(own, str):
        name = f"{name}/{own}" if name else own
    words = _command(node)
    if words is not None:
        yield _started(node, words, name, file)
    for key, value in node.items():
        if key == "services" and isinstance(value, Mapping):  # Compose: the keys are the names of the services
            for service, each in value.items():
                yield from _walk(each, str(service), file, seen)
        elif not str(key).startswith("x-"):  # Compose: templates of services, which start nothing by themselves
            yield from _walk(value, name, file, seen)


def _command(node: Mapping[Any, Any]) -> list[str] | None:
    """Return the words after ``vllm serve``; None where the mapping starts no engine."""
    words: list[str] = []
    for key in ("entrypoint", "command", "args"):
        part = node.get(key)
        if isinstance(part, str):
            words += _split(part)
        elif isinstance(part, list):
            for each in part:  # a shell script is one word
                if not isinstance(each, str | int | float):
                    continue
                text = str(each)
                words += _split(text) if _SERVES.search(text) or "\n" in text else [text]
    if not _SERVES.search(" ".join(words)):
        return None
    for at, word in enumerate(words):
        if word == "serve" and at and words[at - 1].rpartition("/")[2] == "vllm":
            return words[at + 1 :]
        if word.startswith("vllm.entrypoints"):
            return words[at + 1 :]
    return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # an unbalanced quote of a shell that is not ours
        return text.split()


def _started(node: Mapping[Any, Any], words: list[str], name: str, file: str) -> Started:
    env, elsewhere = _environment(node.get("env", node.get("environment")))
    if node.get("envFrom") or node.get("env_file"):
        elsewhere |= {ANY}
    image = node.get("image")
    tag = _TAG.search(image) if isinstance(image, str) else None
    by = f"{file}: {name}" if name else file
    setup = arguments_setup(words, env, elsewhere, by=by, version=tag[1] if tag else None)
    flags, _ = _flags(words)
    named = [each for each in PairSide if each.value in name.lower()]  # the name comes before the role, which may be the mistake
    side = named[0] if len(named) == 1 else _ROLES.get(setup.kv_role or "")
    return Started(name, side, setup, whole(flags.get("port")))


def _environment(given: Any) -> tuple[dict[str, str], frozenset[str]]:
    """Return (values by name, names that get their value from elsewhere).

    Kubernetes lists name and value; Compose has a mapping or NAME=VALUE.
    """
    pairs: list[tuple[str, Any]] = []
    if isinstance(given, Mapping):
        pairs = [(str(name), value) for name, value in given.items()]
    for each in given if isinstance(given, list) else ():
        if isinstance(each, Mapping) and isinstance(each.get("name"), str):
            pairs.append((each["name"], each.get("value")))
        elif isinstance(each, str):
            name, equals, text = each.partition("=")
            pairs.append((name, text if equals else None))  # Compose: a name alone has its value from the shell that runs it
    known = {
        name: str(value)
        for name, value in pairs
        if value is not None and not isinstance(value, Mapping | list) and not _LATER.search(str(value))
    }
    return known, frozenset(name for name, _ in pairs if name not in known)


# --- reading ---------------------------------------------------------------------------------------------------------------


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (flag without dashes, its value or None).

    A word that begins no flag and follows none is ('', word).
    """
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in (";", "&&", "||", "|", "&"):
            return
        word = f"--{_SHORT[word]}" if word in _SHORT else word
        if not word.startswith("--"):
            if not word.startswith("-"):
                yield "", word
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if equals:
            yield name, value
        elif name not in _SWITCHES and at < len(words) and not (words[at].startswith("--") or words[at] in _SHORT):
            yield name, words[at]
            at += 1
        else:
            yield name, None


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return values by flag ('' for a switch), and the plain words.

    The last value of a flag wins. A value that is filled in later is left out.
    """
    flags: dict[str, str] = {}
    plain: list[str] = []
    for name, value in _pairs(words):
        if value is not None and _LATER.search(value) and not _OBJECT.match(value):
            continue
        if name:
            flags[name] = value or ""
        elif value:
            plain.append(value)
    return flags, plain


def _object(flags: Mapping[str, str], name: str) -> Mapping[str, Any]:
    """Return the JSON object of a flag, with its parts that have flags of their own (``--name.key value``)."""
    try:
        found = json.loads(flags.get(name) or "{}")
    except ValueError:
        found = {}
    parts = {flag[len(name) + 1 :].replace("-", "_"): value for flag, value in flags.items() if flag.startswith(f"{name}.")}
    plain = {key: _json_value(value) for key, value in parts.items() if "." not in key}
    return {**(found if isinstance(found, Mapping) else {}), **plain}


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _filled_in_later(words: Sequence[str]) -> bool:
    """Test whether whole flags may be filled in later, as by ``$EXTRA_ARGS``.

    The first word without a flag is the model's name.
    """
    plain = [value for name, value in _pairs(words) if not name and value]
    named = any(name == "model" for name, _ in _pairs(words))
    return any(_LATER.search(value) for value in (plain if named else plain[1:]))
