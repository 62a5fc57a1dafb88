"""Read the keys of a config.json: alternative names, types and bounds.

An error says which key is wrong and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = 10**9  # no dimension of a model is larger; a larger one would only make the sum meaningless


class ModelConfigError(Exception):
    """A model's config cannot be read.

    ``where``: the file and key. ``valid``: what would be valid.
    """

    def __init__(self, what: str, *, where: str = "", valid: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.valid = valid


class UnknownModelError(ModelConfigError):
    """A config can be read, but what its layers keep is not known here."""


class Keys:
    """One mapping of a config.

    ``name``: its place, for messages. ``assumed``: notes on what was filled in.
    """

    def __init__(self, values: Mapping[str, Any], name: str, assumed: list[str] | None = None) -> None:
        self.values = values
        self.name = name
        self.assumed = [] if assumed is None else assumed

    def has(self, *names: str) -> bool:
        """Test whether one of the names is there and not null."""
        return any(self.values.get(name) is not None for name in names)

    def optional(self, *names: str, least: int = 1) -> int | None:
        """Return the whole number under the first of ``names`` that is there.

        None where none is. Raises ``ModelConfigError``.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
                raise self.wrong(name, f"must be a whole number from {least} to {_MOST}")
            return value
        return None

    def number(self, *names: str, default: int | None = None, why: str = "") -> int:
        """Return the whole number under the first of ``names``, else the default.

        A default that is used is noted with ``why``. Raises ``ModelConfigError`` where there is neither.
        """
        found = self.optional(*names)
        if found is not None:
            return found
        if default is None:
            others = f" (also known as {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ModelConfigError(
                f"{names[0]} is missing{others}", where=self.name, valid="a config.json as the model was published with"
            )
        self.assumed.append(f"{names[0]} = {default}: {why}" if why else f"{names[0]} = {default}")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a flag.

        Raises ``ModelConfigError`` for anything but true, false, null or a missing key.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def text(self, *names: str) -> str:
        """Return the text under the first of ``names``; '' where none is there."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, str) and value:
                return value
        return ""

    def section(self, name: str) -> Keys | None:
        """Return a mapping inside this one; None where there is none."""
        value = self.values.get(name)
        return Keys(value, f"{self.name} {name}", self.assumed) if isinstance(value, Mapping) else None

    def words(self, name: str, length: int) -> list[str] | None:
        """Return one word a layer; None where there is no such key.

        Raises ``ModelConfigError`` for another length or an item that is not a word.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, "must be a list of words, one a layer")
        if len(value) != length:
            raise ModelConfigError(f"{name} names {len(value)} layers of {length}", where=self.name, valid="one word a layer")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers; None where there is none.

        Raises ``ModelConfigError``.
        """
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            raise self.wrong(name, "must be a list of whole numbers")
        return value

    def wrong(self, name: str, rule: str) -> ModelConfigError:
        value = repr(self.values.get(name))
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        return ModelConfigError(f"{name} is {shown}: {rule}", where=self.name, valid=f"{name} as the model was published with")
