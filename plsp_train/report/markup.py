"""HTML by construction: plain strings are escaped, and only what was built here is not."""

import html
from typing import Union


class Html(str):
    """Text that is HTML already."""


# What an element may contain: nothing, text, HTML, or several of them.
Content = Union[None, str, "list[Html]", "list[str]"]


def element(tag: str, *content: Content, **attributes: object) -> Html:
    """An element. `class_` stands for class, `_` in names for `-`; attributes of None or False are left out."""
    start = "".join([tag, *(_attribute(name, value) for name, value in attributes.items())])
    return Html(f"<{start}>{fragment(*content)}</{tag}>")


def void(tag: str, **attributes: object) -> Html:
    """An element that has no content and no end tag."""
    return Html("<" + "".join([tag, *(_attribute(name, value) for name, value in attributes.items())]) + ">")


def fragment(*content: Content) -> Html:
    return Html("".join(_escape(part) for part in content))


def _escape(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(map(_escape, content))
    return content if isinstance(content, Html) else html.escape(content)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
