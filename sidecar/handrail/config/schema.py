"""Fill one configuration dataclass from a YAML file and flags, and check it.

A configuration class is a frozen dataclass whose fields are made by ``setting(...)`` (a value) or ``section(...)`` (a nested
class). A ``setting`` of type ``tuple[C, ...]``, where ``C`` is such a class, is a list of sections; only a file can hold it.
One declaration there drives the file's keys, the flags, the check and the reference page. It may have two methods:
``cross_check()`` yields the problems that no single field shows, ``resolved()`` returns the configuration with those defaults
filled in that follow from other values; both run only when every field is valid by itself.

Reading never stops at the first mistake: ``load`` raises one ``ConfigError`` with every problem, each naming the path, the value,
the rule, an example and the nearest known key. A scalar keeps its text from the file, so ``on`` or ``12:30``
never turn into something else.

Standard library only; PyYAML is imported when there is a file to read.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from handrail.config.masking import MASK, may_be_secret, shown_fault, shown_key
from handrail.config.types import KINDS, InvalidValueError, Setting, ValueType, enum_kind, nearest
from handrail.printable import printable_lines

_METADATA: Final = "handrail"
_OFF: Final = frozenset({"", "~", "null", "none", "off"})


# --- problems -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: its place, its value, the rule that it breaks, and an example."""

    path: str
    rule: str
    value: str | None = None  # as written; None where there is no value; already masked when secret
    where: str = ""  # "edge.yaml:7" or "--listen"
    example: str = ""
    nearest: str | None = None

    def __post_init__(self) -> None:
        if self.value is not None and may_be_secret(self.value):
            object.__setattr__(self, "value", MASK)
        if self.nearest is not None and may_be_secret(self.nearest):
            object.__setattr__(self, "nearest", None)

    def __str__(self) -> str:
        text = "" if self.value is None else f" = {self.value}"
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        where = f" ({self.where})" if self.where else ""
        example = f"\n    valid: {self.example}" if self.example else ""
        return printable_lines(f"{self.path}{text}: {self.rule}{hint}{where}{example}")


class ConfigError(Exception):
    """All mistakes in a configuration."""

    def __init__(self, problems: Sequence[Problem], name: str = "configuration") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{name}: {count} problem{'s' if count != 1 else ''}\n{lines}")


# --- declaration ----------------------------------------------------------------------------------------------------------


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    example: str,
    default_factory: Any = dataclasses.MISSING,
    flag: str | None = None,
    secret: bool = False,
    unset: str = "",
    at_least: int | float | None = None,
    at_most: int | float | None = None,
    choices: tuple[str, ...] = (),
    schemes: tuple[str, ...] = ("http", "https"),
    path: bool = True,
) -> Any:
    """Declare a field of a configuration class.

    A field without a default is required. ``choices`` narrows an enum; ``schemes`` and ``path`` (may the URL have one) a ``Url``.
    """
    declared = Setting(
        help=help,
        example=example,
        flag=flag,
        secret=secret,
        unset=unset,
        at_least=at_least,
        at_most=at_most,
        choices=choices,
        schemes=schemes,
        path=path,
    )
    return dataclasses.field(default=default, default_factory=default_factory, metadata={_METADATA: declared})


def section(kind: Callable[[], Any]) -> Any:
    """Declare a field that is a nested configuration class."""
    return dataclasses.field(default_factory=kind)


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a configuration class."""

    path: str  # "collector.endpoint"
    setting: Setting
    kind: ValueType
    optional: bool
    many: str  # "" | "list" | "mapping"
    default: Any  # dataclasses.MISSING where it must be given
    section: type | None = None  # of a list of sections: the class of each

    @property
    def flag(self) -> str | None:
        """Command-line flag; None for a key that only the file may set."""
        if self.section is not None:
            return None
        if self.setting.flag is None:
            return "--" + self.path.replace(".", "-").replace("_", "-")
        return self.setting.flag or None

    def shown(self, value: Any, *, masked: bool = True) -> Any:
        """Value as plain data (texts, lists, mappings), as in the file; None for no value."""
        if value is None:
            return None
        if self.section is not None:
            return [plain(each, masked=masked) for each in value]
        if self.setting.secret and masked and value:
            return dict.fromkeys(value, MASK) if self.many == "mapping" else [MASK] * len(value) if self.many == "list" else MASK
        if self.many == "mapping":
            return {name: self.kind.show(each) for name, each in value.items()}
        return [self.kind.show(each) for each in value] if self.many == "list" else self.kind.show(value)


def _no_section(_text: str, _declared: Setting) -> Any:
    raise InvalidValueError("must be a mapping of keys to values")


_SECTION: Final = ValueType("section", "", _no_section, str)


def _kind_of(annotation: Any) -> tuple[ValueType, bool, str]:
    """Value type of an annotation, whether it may be None, and its container.

    The container is "list" for ``tuple[X, ...]``, "mapping" for ``Mapping[str, X]``, else "".
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        kind, _, many = _kind_of(inner[0])
        return kind, True, many
    if origin is tuple:
        return (_SECTION if dataclasses.is_dataclass(arguments[0]) else _kind_of(arguments[0])[0]), False, "list"
    if origin is not None:
        return _kind_of(arguments[1])[0], False, "mapping"
    return (enum_kind(annotation) if issubclass(annotation, Enum) else KINDS[annotation]), False, ""


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """All leaves of a configuration class, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    for each in dataclasses.fields(cls):
        path = f"{prefix}{each.name}"
        if dataclasses.is_dataclass(hints[each.name]) and _METADATA not in each.metadata:
            yield from keys(hints[each.name], f"{path}.")
            continue
        kind, optional, many = _kind_of(hints[each.name])
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        item = typing.get_args(hints[each.name])[0] if kind is _SECTION else None
        yield Key(path, each.metadata[_METADATA], kind, optional, many, default, item)


# --- reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Given:
    """Text that a user wrote for one key, and its place."""

    value: str | Sequence[str] | Sequence[ListedSection] | Mapping[str, str]
    where: str


@dataclass(frozen=True, slots=True)
class ListedSection:
    """One section of a list in a file.

    ``values``: by path below the section; None where the file has no mapping there.
    """

    values: Mapping[str, Given] | None
    where: str


_Config = TypeVar("_Config")


def load(cls: type[_Config], file: Path | None = None, overrides: Mapping[str, Given] | None = None) -> _Config:
    """Load the configuration from a YAML file and ``overrides`` (by path).

    An override wins over the file; without a file only defaults and overrides count.
    Raises ``ConfigError`` with every problem; a file that cannot be read is one of them.
    """
    if file is None:
        return parse(cls, None, "configuration", overrides)
    return parse(cls, read_text(file), str(file), overrides)


def read_text(file: Path) -> str:
    """Read the text of a YAML file, unparsed. Raises ``ConfigError``."""
    try:
        return file.read_text(encoding="utf-8")
    except IsADirectoryError:
        rule = "is a folder: give a YAML file"
    except UnicodeDecodeError:
        rule = "cannot be read: YAML must be UTF-8 text"
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
    raise ConfigError([Problem(path=str(file), rule=rule)], str(file))


def parse(cls: type[_Config], text: str | None, name: str, overrides: Mapping[str, Given] | None = None) -> _Config:
    """Load as ``load`` does, from the text of a file called ``name``."""
    problems: list[Problem] = []
    given = dict(_read_yaml(text, name, cls, problems)) if text is not None else {}
    given.update(overrides or {})
    config = _assemble(cls, given, problems)
    if problems:
        raise ConfigError(problems, name)
    return typing.cast(_Config, config)


def _assemble(cls: type, given: Mapping[str, Given], problems: list[Problem], outer: str = "", where: str = "") -> Any:
    """Check the values of one class and build it; MISSING after adding a problem.

    ``outer`` and ``where``: path and place of a section in a list, such as ``objectives[0].``.
    """
    found: list[Problem] = []
    values: dict[str, Any] = {}
    for key in keys(cls):
        if key.path not in given:
            if key.default is dataclasses.MISSING:
                flag = f", in the file or as {key.flag}" if key.flag and not outer else ""
                found.append(Problem(path=key.path, rule=f"must be given{flag}", example=example_line(key)))
            continue
        value = _read(key, given[key.path], found)
        if value is not dataclasses.MISSING:
            values[key.path] = value
    if not found and (outer or not problems):
        config = _build(cls, values)
        crossed = config.cross_check() if hasattr(config, "cross_check") else ()
        places = dict(_places(given))
        found = [_placed(problem, places) for problem in crossed]
        if not found:
            return config.resolved() if hasattr(config, "resolved") else config
    problems += [dataclasses.replace(each, path=f"{outer}{each.path}", where=each.where or where) for each in found]
    return dataclasses.MISSING


def _places(given: Mapping[str, Given]) -> Iterator[tuple[str, str]]:
    """Yield the place of every value and of every section in a list, by path."""
    for path, each in given.items():
        yield path, each.where
        for index, item in enumerate(each.value):
            if isinstance(item, ListedSection):
                yield f"{path}[{index}]", item.where


def _placed(problem: Problem, places: Mapping[str, str]) -> Problem:
    """Problem with the place of its value, else of its section, if a user wrote one."""
    where = problem.where or places.get(problem.path) or places.get(problem.path.rpartition(".")[0], "")
    return dataclasses.replace(problem, where=where)


def example_line(key: Key) -> str:
    """Key with its example as one line of YAML.

    Example: ``collector: {endpoint: http://127.0.0.1:4318}``.
    """
    *outer, last = key.path.split(".")
    line = f"{last}: {key.setting.example}"
    for each in reversed(outer):
        line = f"{each}: {{{line}}}"
    return line


def _read(key: Key, given: Given, problems: list[Problem]) -> Any:
    """Value of one key, or MISSING after adding a problem."""
    declared = key.setting
    if key.optional and isinstance(given.value, str) and given.value.lower() in _OFF:
        return None

    def complain(path: str, text: str, rule: str, near: str | None) -> None:
        # A URL with a password in it is refused, so it must not be repeated either.
        shown = MASK if declared.secret or (key.kind.metavar == "URL" and "@" in text) else text
        near = None if declared.secret else near
        problems.append(Problem(path=path, value=shown, rule=rule, where=given.where, example=example_line(key), nearest=near))

    def one(path: str, text: str) -> Any:
        try:
            if not text and key.default != "":
                raise InvalidValueError("is empty")
            return key.kind.parse(text, declared)
        except InvalidValueError as error:
            rule = error.rule if not declared.secret and not may_be_secret(text) else shown_fault(error.rule)
            complain(path, repr(text), rule, error.nearest)
            return dataclasses.MISSING

    def item(path: str, each: str | ListedSection) -> Any:
        if isinstance(each, str):
            return one(path, each)
        if each.values is None:
            problems.append(Problem(path=path, rule="must be a mapping", where=each.where, example=example_line(key)))
            return dataclasses.MISSING
        return _assemble(typing.cast(type, key.section), each.values, problems, f"{path}.", each.where)

    if key.many == "mapping":
        if not isinstance(given.value, Mapping):
            if given.value == "":
                return {}
            complain(key.path, _outline(given.value), "must be a mapping of names to values", None)
            return dataclasses.MISSING
        read = {name: one(f"{key.path}.{shown_key(name)}", text) for name, text in given.value.items()}
        return dataclasses.MISSING if dataclasses.MISSING in read.values() else read
    if isinstance(given.value, Mapping) or (not isinstance(given.value, str) and key.many != "list"):
        rule = "must be a list" if key.section is not None else f"must be one value ({key.kind.name})"
        complain(key.path, _outline(given.value), rule, None)
        return dataclasses.MISSING
    if key.many == "list":
        written = [given.value] if isinstance(given.value, str) and given.value else given.value
        listed: list[str | ListedSection] = list(written)
        if key.section is not None and len(listed) < (declared.at_least or 0):
            complain(key.path, _outline(given.value), f"must be a list of at least {declared.at_least}", None)
            return dataclasses.MISSING
        items = [item(f"{key.path}[{index}]", each) for index, each in enumerate(listed)]
        return dataclasses.MISSING if dataclasses.MISSING in items else tuple(items)
    return one(key.path, typing.cast(str, given.value))


def _outline(value: object) -> str:
    """Shape of a value that has the wrong type.

    It shows no content: a section at the wrong depth may hold secrets.
    """
    if isinstance(value, str):
        return repr(value)
    return "a mapping" if isinstance(value, Mapping) else "a list"


def _build(cls: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for each in dataclasses.fields(cls):
        path = f"{prefix}{each.name}"
        if dataclasses.is_dataclass(hints[each.name]) and _METADATA not in each.metadata:
            arguments[each.name] = _build(typing.cast(type, hints[each.name]), values, f"{path}.")
        elif path in values:
            arguments[each.name] = values[path]
    return cls(**arguments)


def _read_yaml(text: str, name: str, cls: type, problems: list[Problem]) -> Iterator[tuple[str, Given]]:
    """Yield (path, text) of every key of ``cls`` in the file.

    Unknown and repeated keys become problems.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        problems.append(not_yaml(error, name))
        return
    except RecursionError:
        problems.append(Problem(path=name, rule="is not valid YAML: nested too deep"))
        return
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return
    if not isinstance(root, yaml.MappingNode):
        problems.append(Problem(path=name, rule="must be a mapping of keys to values", example=example_line(next(keys(cls)))))
        return

    def walk(node: Any, known: Sequence[Key], outer: str = "", prefix: str = "") -> Iterator[tuple[str, Given]]:
        by_path = {key.path: key for key in known}
        sections = {path.rpartition(".")[0] for path in by_path} - {""}
        seen: set[str] = set()
        for key_node, value_node in node.value:
            where = f"{name}:{key_node.start_mark.line + 1}"
            path = f"{prefix}{key_node.value}" if isinstance(key_node, yaml.ScalarNode) else f"{prefix}?"
            if path in seen:
                problems.append(Problem(path=f"{outer}{shown_key(path)}", rule="is given twice", where=where))
            elif path in by_path:
                item = by_path[path].section
                yield path, Given(plain(value_node) if item is None else listed(value_node, item, f"{outer}{path}"), where)
            elif path in sections and isinstance(value_node, yaml.MappingNode):
                yield from walk(value_node, known, outer, f"{path}.")
            elif path in sections:
                if getattr(value_node, "value", None) not in _OFF:
                    inside = next(key for key in known if key.path.startswith(f"{path}."))
                    rule = "is a section: write its keys below it"
                    problems.append(Problem(path=f"{outer}{path}", rule=rule, where=where, example=example_line(inside)))
            else:
                problem = unknown_key(path, known, where)
                problems.append(dataclasses.replace(problem, path=f"{outer}{problem.path}"))
            seen.add(path)

    def listed(node: Any, item: type, path: str) -> list[ListedSection] | str | list[str] | dict[str, str]:
        if not isinstance(node, yaml.SequenceNode):
            return plain(node)
        known = list(keys(item))
        return [
            ListedSection(
                dict(walk(each, known, f"{path}[{index}].")) if isinstance(each, yaml.MappingNode) else None,
                f"{name}:{each.start_mark.line + 1}",
            )
            for index, each in enumerate(node.value)
        ]

    def plain(node: Any) -> str | list[str] | dict[str, str]:
        if isinstance(node, yaml.ScalarNode):
            return str(node.value)
        if isinstance(node, yaml.SequenceNode):
            return [text_of(each) for each in node.value]
        return {text_of(key): text_of(value) for key, value in node.value}

    def text_of(node: Any) -> str:
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    yield from walk(root, list(keys(cls)))


def not_yaml(error: Exception, name: str) -> Problem:
    """Problem for a file ``name`` on which PyYAML raised ``error`` (a ``YAMLError``)."""
    mark = getattr(error, "problem_mark", None)
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else ""
    fault = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).partition("\n")[0]
    return Problem(path=name, rule=f"is not valid YAML: {shown_fault(str(fault))}", where=where)


def unknown_key(path: str, known: Sequence[Key], where: str) -> Problem:
    """Problem for an unknown key.

    It suggests the nearest key in the same section, else the nearest anywhere.
    """
    prefix, _, last = path.rpartition(".")
    start = f"{prefix}." if prefix else ""
    beside = list(dict.fromkeys(key.path[len(start) :].split(".")[0] for key in known if key.path.startswith(start)))
    paths = [key.path for key in known]
    found = nearest(path, paths, cutoff=0.99) or nearest(last, beside)
    if found is None:
        elsewhere = {each.rpartition(".")[2]: each for each in reversed(paths)}  # the first one declared
        close = nearest(last, elsewhere)
        found = elsewhere[close] if close else nearest(path, paths)
    example = next((example_line(key) for key in known if found in (key.path, key.path[len(start) :])), "")
    example = example or f"known here: {', '.join(beside)}"
    return Problem(path=shown_key(path), rule="unknown", where=where, nearest=found, example=example)


# --- showing --------------------------------------------------------------------------------------------------------------


def plain(config: Any, *, masked: bool = True) -> dict[str, Any]:
    """Complete configuration as nested plain data, in order of declaration.

    Secrets are ``****`` unless ``masked`` is false.
    """
    tree: dict[str, Any] = {}
    for key in keys(type(config)):
        *outer, last = key.path.split(".")
        node, value = tree, config
        for each in outer:
            node, value = node.setdefault(each, {}), getattr(value, each)
        node[last] = key.shown(getattr(value, last), masked=masked)
    return tree


def to_yaml(config: Any, *, masked: bool = True) -> str:
    """Configuration as YAML that ``parse`` reads back (masked secrets apart)."""
    import yaml

    return str(yaml.safe_dump(plain(config, masked=masked), sort_keys=False, allow_unicode=True, default_flow_style=False))


# --- flags ----------------------------------------------------------------------------------------------------------------


class Flags(Protocol):
    """Part of ``argparse.ArgumentParser`` that we use, so that a group fits too."""

    def add_argument(self, *names: str, **options: Any) -> Any: ...


def add_flags(parser: Flags, cls: type) -> None:
    """Add one flag for every key that has one.

    ``given_flags`` reads the flags back; ``load`` checks the values, not argparse.
    """
    for key in keys(cls):
        if key.flag is None:
            continue
        default = default_text(key)
        note = f" (default: {default})" if default else ""
        parser.add_argument(
            key.flag,
            dest=f"config.{key.path}",
            metavar=metavar(key),
            default=None,
            action="append" if key.many else "store",
            help=f"{key.setting.help}{note}".replace("%", "%%"),
        )


def given_flags(arguments: Mapping[str, Any], cls: type) -> dict[str, Given]:
    """Overrides from parsed arguments (``vars(namespace)``).

    Raises ``ConfigError`` for a NAME=VALUE flag without ``=``.
    """
    found: dict[str, Given] = {}
    problems: list[Problem] = []
    for key in keys(cls):
        value = arguments.get(f"config.{key.path}")
        if value is None or key.flag is None:
            continue
        if key.many == "mapping":
            pairs = [text.partition("=") for text in value]
            if any(not name or not equals for name, equals, _ in pairs):
                problems.append(
                    Problem(
                        path=key.path,
                        rule="must be NAME=VALUE",
                        where=key.flag,
                        value=MASK if key.setting.secret else repr(value),
                    )
                )
                continue
            value = {name: text for name, _, text in pairs}
        found[key.path] = Given(value, key.flag)
    if problems:
        raise ConfigError(problems, "command line")
    return found


def metavar(key: Key) -> str:
    """Placeholder after the flag in the help."""
    one = "|".join(key.setting.choices) if key.setting.choices else key.kind.metavar
    return f"NAME={one}" if key.many == "mapping" else one


def default_text(key: Key) -> str:
    """Default as the reference shows it; "" for a required key."""
    if key.default is dataclasses.MISSING:
        return ""
    shown = key.shown(key.default)
    if shown is None or shown == "" or shown == [] or shown == {}:
        return key.setting.unset
    return str(shown)


def reference(cls: type) -> str:
    """Markdown table of a configuration class's keys, for docs/configuration.md."""
    lines = ["| key | flag | type | default | meaning | example |", "|---|---|---|---|---|---|"]
    for key in keys(cls):
        many = {"": "", "list": "list of ", "mapping": "names and "}[key.many]
        kind = metavar(key).replace("|", ", ") if key.kind.name == "one of" else f"{many}{key.kind.name}"
        cells = (
            f"`{key.path}`",
            f"`{key.flag}`" if key.flag else "–",
            kind + (", secret" if key.setting.secret else ""),
            default_text(key) or "must be given",
            key.setting.help,
            f"`{key.setting.example}`",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
