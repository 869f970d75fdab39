"""PTX text as a list of instructions with typed operands."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias


class PtxError(RuntimeError):
    """The program cannot be executed, or did what no correct program does."""


@dataclass(frozen=True)
class Register:
    name: str
    """Unique in the program: registers of an inner scope carry its number."""
    type: str
    """As declared: pred, b16, b32, b64, …"""


@dataclass(frozen=True)
class Negated:
    """`!%p`."""

    register: Register


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    bits: int
    """The value of an integer; the encoding of a floating-point number."""
    width: int | None = None
    """Bits of the encoding of a floating-point number, None for an integer."""


@dataclass(frozen=True)
class Symbol:
    """A label or a parameter."""

    name: str


@dataclass(frozen=True)
class Address:
    base: "Register | Symbol | None"
    offset: int


@dataclass(frozen=True)
class Vector:
    """`{a, b}`, or `a|b` as the two results of one instruction."""

    elements: tuple["Operand", ...]


@dataclass(frozen=True)
class Discard:
    """`_`: a result that nobody wants."""


Operand: TypeAlias = Register | Negated | Special | Immediate | Symbol | Address | Vector | Discard


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | Negated | None
    text: str
    place: str
    """Line of the PTX, and of the Triton source where it is known."""

    def __str__(self) -> str:
        return f"`{self.text}` ({self.place})"


@dataclass
class Program:
    """One kernel."""

    name: str
    parameters: list[tuple[str, str]]
    """Name and type of each."""
    static_shared: int
    """Bytes of shared memory that the text declares; launches add theirs."""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def registers(self) -> set[Register]:
        """All registers that occur."""

        def inside(operand: Operand | None) -> Iterator[Register]:
            if isinstance(operand, Register):
                yield operand
            elif isinstance(operand, Negated):
                yield operand.register
            elif isinstance(operand, Address):
                yield from inside(operand.base)
            elif isinstance(operand, Vector):
                for element in operand.elements:
                    yield from inside(element)

        return {
            register
            for instruction in self.instructions
            for operand in (*instruction.operands, instruction.guard)
            for register in inside(operand)
        }


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', re.MULTILINE)
_ITEM = re.compile(
    r"\s*(?:(?P<close>\})|(?P<open>\{)|(?P<label>[\w$]+):|\.loc\s+(?P<file>\d+)\s+(?P<row>\d+)[^\n]*"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_GUARDED = re.compile(r"(?:@(!?)([\w%$]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([\w%$]*)\s*(?:\+?\s*(-?(?:0x)?[0-9a-fA-F]+))?\s*\]")
_RANGE = re.compile(r"([\w%$]+)<(\d+)>")


def parse(text: str) -> Program:
    """Parse a module with one kernel."""
    files = dict(_FILE.findall(text))
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("the PTX has no .entry")
    return _Parser(text, entry, files).program


class _Parser:
    def __init__(self, text: str, entry: re.Match[str], files: dict[str, str]) -> None:
        self.files = files
        self.shared: dict[str, int] = {}
        self.scopes: list[dict[str, Register]] = [{}]
        self.num_scopes = 1
        self.program = Program(entry[1], [_parameter(text) for text in entry[2].split(",") if text.strip()], 0)
        for align, name, size in _SHARED.findall(text):
            self._declare_shared(int(align), name, size)
        self._body(text, entry.end())

    def _declare_shared(self, align: int, name: str, size: str) -> None:
        """Arrays follow one another; the one without a size is the launch's and starts where they end."""
        start = -(-self.program.static_shared // align) * align
        self.shared[name] = start
        self.program.static_shared = start + int(size or 0)

    def _body(self, text: str, position: int) -> None:
        line, location = text.count("\n", 0, position) + 1, ""
        while self.scopes:
            item = _ITEM.match(text, position)
            if item is None:
                raise PtxError(f"line {line} of the PTX cannot be parsed: {text[position : position + 80]!r}")
            start = item.end() - len(item[0].lstrip())
            line += text.count("\n", position, start)
            if item["close"]:
                self.scopes.pop()
            elif item["open"]:
                self.scopes.append({})
                self.num_scopes += 1
            elif item["label"]:
                self.program.labels[item["label"]] = len(self.program.instructions)
            elif item["file"]:
                location = f", {self.files.get(item['file'], 'file ' + item['file'])}:{item['row']}"
            else:
                self._statement(" ".join(item["statement"].split()), f"line {line}{location}")
            line += text.count("\n", start, item.end())
            position = item.end()

    def _statement(self, text: str, place: str) -> None:
        if text.startswith(".reg"):
            self._declare_registers(text)
            return
        if not text or text.startswith("."):  # .pragma and the like change no result
            return
        guarded = _GUARDED.fullmatch(text)
        if guarded is None:
            raise PtxError(f"{place} of the PTX is no instruction: {text!r}")
        negated, guard, opcode, operands = guarded.groups()
        condition: Register | Negated | None = None
        if guard:
            register = self._register(guard)
            if register is None:
                raise PtxError(f"{place} of the PTX has the undeclared guard {guard}")
            condition = Negated(register) if negated else register
        parsed = tuple(self._operand(part, place) for part in _split(operands))
        self.program.instructions.append(Instruction(opcode, parsed, condition, text, place))

    def _declare_registers(self, text: str) -> None:
        _, type_, names = text.split(maxsplit=2)
        suffix = "" if len(self.scopes) == 1 else f"@{self.num_scopes}"
        for name in names.split(","):
            spread = _RANGE.fullmatch(name.strip())
            each = [f"{spread[1]}{number}" for number in range(int(spread[2]))] if spread else [name.strip()]
            self.scopes[-1].update({one: Register(one + suffix, type_.lstrip(".")) for one in each})

    def _register(self, name: str) -> Register | None:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)

    def _operand(self, text: str, place: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self._operand(part, place) for part in _split(text[1:-1])))
        if text.startswith("["):
            return self._address(text, place)
        if "|" in text:
            return Vector(tuple(self._operand(part.strip(), place) for part in text.split("|")))
        if text == "_":
            return Discard()
        register = self._register(text.removeprefix("!"))
        if register is not None:
            return Negated(register) if text.startswith("!") else register
        if text in self.shared:
            return Immediate(self.shared[text])
        if text.startswith("%"):
            return Special(text)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), 4 * len(text[2:]))
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"[\w$]+", text):
            return Symbol(text)
        raise PtxError(f"{place} of the PTX has an operand of an unknown kind: {text!r}")

    def _address(self, text: str, place: str) -> Address:
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise PtxError(f"{place} of the PTX has an address of an unknown kind: {text!r}")
        name, offset = found[1], int(found[2] or "0", 0)
        register = self._register(name)
        if register is not None:
            return Address(register, offset)
        if name in self.shared:
            return Address(None, self.shared[name] + offset)
        return Address(None, int(name, 0) + offset) if name.isdigit() else Address(Symbol(name), offset)


def _parameter(text: str) -> tuple[str, str]:
    words = text.split()
    if "[" in text:
        raise PtxError(f"parameters that are arrays are not supported: {text.strip()!r}")
    return words[-1], words[1].lstrip(".")


def _split(text: str) -> list[str]:
    """Parts between the commas outside brackets."""
    parts = re.findall(r"(?:[^,{}\[\]]|\{[^{}]*\}|\[[^\[\]]*\])+", text)
    return [part.strip() for part in parts if part.strip()]
