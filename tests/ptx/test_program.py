"""Parsing, and what is said of programs that cannot be executed."""

import pytest

from emulator.program import Address, Immediate, Negated, PtxError, Register, Special, Vector, parse
from emulator.schedule import Code
from snippets import module


def parse_body(body: str):
    instructions = parse(module(body, [])).instructions
    return instructions[1:-1]  # without the snippet's own


def test_operands_of_every_kind_are_recognised() -> None:
    (instruction,) = parse_body("@!%p1 ld.shared.v2.b32 {%r1, _}, [%r2 + -8]; // comment")
    assert instruction.opcode == "ld.shared.v2.b32"
    assert instruction.guard == Negated(Register("%p1", "pred"))
    destination, source = instruction.operands
    assert isinstance(destination, Vector)
    assert destination.elements[0] == Register("%r1", "b32")
    assert source == Address(Register("%r2", "b32"), -8)
    moves = parse_body("mov.u32 %r1, %ctaid.y; mov.b32 %r1, 0f3F800000; mov.b64 %d1, 0xFFU; mov.b32 %r1, -3;")
    values = [move.operands[1] for move in moves]
    assert values == [Special("%ctaid.y"), Immediate(0x3F800000, 32), Immediate(0xFF), Immediate(-3)]


def test_registers_of_an_inner_scope_are_its_own() -> None:
    body = "mov.b32 %r1, 1; { .reg .b32 %r1, other; mov.b32 %r1, 2; mov.b32 other, 3; } mov.b32 %r1, 4;"
    outer, inner, other, after = (instruction.operands[0] for instruction in parse_body(body))
    assert outer == after == Register("%r1", "b32")
    assert inner != outer
    assert other.type == "b32"


def test_shared_arrays_follow_one_another() -> None:
    text = ".shared .align 4 .b8 first[6];\n.shared .align 16 .b8 second[8];\n.extern .shared .align 16 .b8 rest[];\n"
    text += ".visible .entry kernel() { .reg .b32 %r<2>; mov.u32 %r0, second; mov.u32 %r1, rest; ret; }"
    program = parse(text)
    assert [move.operands[1] for move in program.instructions[:2]] == [Immediate(16), Immediate(32)]
    assert program.static_shared == 32


def test_labels_and_source_lines_are_kept() -> None:
    text = """
        .visible .entry kernel() {
            .reg .b32 %r<2>;
            .loc 1 42 7
        $L__start:
            mov.b32 %r0, 1;
            bra $L__start;
        }
        .file 1 "/somewhere/kernel.py"
    """
    program = parse(text)
    assert program.labels == {"$L__start": 0}
    assert program.instructions[0].place == "line 6, kernel.py:42"


def test_unknown_instructions_are_all_named() -> None:
    body = "frobnicate.b32 %r1, %r2; add.s32 %r1, %r1, 1; add.sat.s32 %r1, %r1, 1;"
    with pytest.raises(PtxError, match="does not know") as error:
        Code(parse(module(body, [])))
    message = str(error.value)
    assert "`frobnicate.b32 %r1, %r2` (line " in message
    assert "`add.sat.s32 %r1, %r1, 1`" in message  # an unknown modifier is not ignored
    assert "`add.s32" not in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s64 %d1, %r1, 1;", "%r1 holds 4 bytes and is read as .s64"),
        ("add.s32 %h1, %r1, 1;", "a result of type .s32 goes to %h1 of 2 bytes"),
        ("add.f32 %r1, %r1, 0d3FF0000000000000;", "a constant of 64 bits where 32 are expected"),
        ("bra nowhere;", "leads nowhere"),
        ("bar.sync 1;", "does not know"),
    ],
)
def test_programs_that_cannot_be_executed_say_why(body: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        Code(parse(module(body, [])))


def test_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(PtxError, match=r"no \.entry"):
        parse(".version 8.7")
