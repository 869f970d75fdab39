"""Markdown, CSV and LaTeX."""

import csv
import io

from plsp_train.table.tables import GAIN, LOSS, Cell, Table

_LATEX = {
    **{character: "\\" + character for character in "&%$#_{}"},
    "±": r"$\pm$",
    "×": r"$\times$",
    GAIN: r"$^{\ddagger}$",
    LOSS: r"$^{\circ}$",
}


def markdown(table: Table) -> str:
    def text(cell: Cell) -> str:
        value = _value(cell, table.digits)
        return (f"**{value}**" if cell.best else value) + cell.mark

    lines = [["", *table.columns], ["---"] * (1 + len(table.columns))]
    lines += [[label, *map(text, cells)] for label, cells in table.rows]
    return f"{table.caption}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(table: Table) -> str:
    """Uses the booktabs package."""

    def text(cell: Cell) -> str:
        value = _escape(_value(cell, table.digits))
        return (rf"\textbf{{{value}}}" if cell.best else value) + _escape(cell.mark)

    def line(parts: list[str]) -> str:
        return "  " + " & ".join(parts) + r" \\" + "\n"

    return (
        "\\begin{table}[t]\n  \\centering\n"
        f"  \\caption{{{_escape(table.caption)}}}\n  \\label{{{table.name}}}\n"
        f"  \\begin{{tabular}}{{l{'c' * len(table.columns)}}}\n  \\toprule\n"
        + line(["Method", *map(_escape, table.columns)])
        + "  \\midrule\n"
        + "".join(line([_escape(label), *map(text, cells)]) for label, cells in table.rows)
        + "  \\bottomrule\n  \\end{tabular}\n\\end{table}\n"
    )


def comma_separated(table: Table) -> str:
    """Unrounded; each column is followed by its standard deviations and marks."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", *(f"{column}{part}" for column in table.columns for part in ("", " std", " mark"))])
    for label, cells in table.rows:
        writer.writerow([label, *(value for cell in cells for value in (cell.mean, cell.std, cell.mark))])
    return file.getvalue()


RENDERERS = {"md": markdown, "csv": comma_separated, "tex": latex}


def _value(cell: Cell, digits: int) -> str:
    if cell.mean is None:
        return ""
    return f"{cell.mean:.{digits}f} ± {'-' if cell.std is None else f'{cell.std:.{digits}f}'}"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
