"""Names for methods, networks, data sets and generators, open to other people's code.

A registry is looked up late: a user's entry needs no change inside the package. It is registered by importing its
module first (`--plugin my_module`), or named directly as `my_module:attribute`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries of one kind by name, in the order of their registration. Built-in names are kept elsewhere."""

    def __init__(self, kind: str, built_in: tuple[str, ...] = ()) -> None:
        self.kind, self.built_in = kind, built_in
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that enters a class or function under this name."""

        def enter(entry: Any) -> Any:
            if name in self.built_in or self._entries.get(name, entry) is not entry:
                raise ValueError(f"a {self.kind} named {name!r} already exists: choose another name")
            if ":" in name:
                raise ValueError(f"the name of a {self.kind} must not contain a colon, got {name!r}")
            self._entries[name] = entry
            return entry

        return enter

    def __getitem__(self, name: str) -> T:
        """Look up a registered name or import `module:attribute`. Unknown names raise ValueError, not KeyError."""
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return import_attribute(name, self.kind)
        known = ", ".join([*self.built_in, *self._entries])
        raise ValueError(f"unknown {self.kind} {name!r}: choose one of {known}, or name your own as module:attribute")

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def import_attribute(name: str, kind: str) -> Any:
    """Import `module:attribute`."""
    module_name, _, attribute = name.partition(":")
    module = import_plugin(module_name, f"{kind} {name!r}")
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{kind} {name!r}: module {module_name} has no attribute {attribute!r}") from None


def import_plugin(module: str, what: str = "") -> Any:
    """Import a module of the user's. Errors inside the module itself keep their traceback."""
    label = what or f"plugin {module!r}"
    if not module or module.startswith("."):
        raise ValueError(f"{label}: give the full name of a module, such as package.module")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(f"{label}: there is no module {error.name!r} on Python's path") from None
        raise
