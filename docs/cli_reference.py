"""Writes docs/api/commands.md, the command-line reference, from the argument parsers of plsp_train.

python docs/cli_reference.py            # write it
python docs/cli_reference.py --check    # exit 1 if it is not what the parsers say
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "api" / "commands.md"
INTRODUCTION = """\
# Command-line reference

<!-- Written by docs/cli_reference.py from the argument parsers: change their help texts, not this page. -->

Every command prints errors as one line and exits with code 2 on invalid input. Settings can also come from a file
(`--config`, `.toml` or `.json`); the command line takes precedence over the file, and the file over the preset.
"""


def parsers() -> list[argparse.ArgumentParser]:
    """The parser of every command: whatever module of plsp_train has a build_parser()."""
    import plsp_train

    found: dict[str, argparse.ArgumentParser] = {}
    for module in pkgutil.walk_packages(plsp_train.__path__, "plsp_train."):
        if module.name.rsplit(".", 1)[-1] == "__main__":
            continue
        build = getattr(importlib.import_module(module.name), "build_parser", None)
        if build is not None:
            parser = build()
            found[parser.prog] = parser
    return [found[prog] for prog in sorted(found)]


def render() -> str:
    return INTRODUCTION + "".join(f"\n{_command(parser)}" for parser in parsers())


def _command(parser: argparse.ArgumentParser) -> str:
    parts = [f"## {parser.prog}", parser.description or ""]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            title = {"options": "options", "optional arguments": "options"}.get(group.title or "", group.title)
            parts.append(f"### {parser.prog.split('.')[-1].split()[-1]}: {title}")
            if group.description and "\n" in group.description:  # laid out by hand
                parts.append(f"```text\n{group.description.strip()}\n```")
            elif group.description:
                parts.append(group.description[0].upper() + group.description[1:].rstrip(".") + ".")
            rows = [f"| {_cell(_flag(action))} | {_cell(_help(action))} |" for action in actions]
            parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _flag(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    name = action.option_strings[0]
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"`{name}`, `{action.option_strings[-1]}`"
    if action.nargs == 0:
        return f"`{name}`"
    value = action.metavar
    if value is None:
        value = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    return f"`{name} {value}{' ...' if action.nargs == '+' else ''}`"


def _help(action: argparse.Action) -> str:
    # Python 3.12 and older append the default of a --x/--no-x pair to the help by themselves; SUPPRESS keeps it out.
    return (action.help or "") % {"default": action.default, "prog": ""}


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
