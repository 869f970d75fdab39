"use strict";
// Everything is readable without this script. It adds values under the pointer and sorting.

const shown = {
  share: (value) => (100 * value).toFixed(1) + "\u00a0%",
  score: (value) => value.toFixed(3),
  count: (value) => Math.round(value).toLocaleString("en"),
};

for (const chart of document.querySelectorAll(".chart")) {
  const svg = chart.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const lines = [...svg.querySelectorAll("polyline:not(.muted)")].reverse();
  const values = [...chart.querySelectorAll(".legend b")], at = chart.querySelector(".at");
  const [first, last, left, right] = svg.dataset.epochs.split(" ").map(Number);
  const [low, high, bottom, top] = svg.dataset.values.split(" ").map(Number);
  if (lines.length !== values.length) continue; // a single epoch has no lines

  svg.addEventListener("pointermove", (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const epoch = Math.round(first + (Math.min(Math.max(x, left), right) - left) / (right - left) * (last - first));
    const place = left + (epoch - first) / (last - first) * (right - left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    at.textContent = "epoch " + epoch;
    lines.forEach((line, number) => {
      const point = [...line.points].find((point) => Math.abs(point.x - place) < 1); // long lines are thinned
      const value = point && low + (bottom - point.y) / (bottom - top) * (high - low);
      values[number].textContent = point ? shown[svg.dataset.unit](value) : "–";
    });
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    at.textContent = "";
    for (const value of values) value.textContent = value.dataset.last;
  });
}

for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      // Descending, ascending, and back to the order of the classes.
      const order = { descending: "ascending", ascending: "" }[head.getAttribute("aria-sort")] ?? "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      const rows = [...original];
      if (order) {
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const value = (row) => Number(row.cells[column].dataset.value);
        const name = (row) => row.cells[0].textContent;
        const compare = column ? (a, b) => value(a) - value(b) : (a, b) => name(a).localeCompare(name(b));
        rows.sort((a, b) => sign * compare(a, b));
      }
      body.append(...rows);
    });
  });
}
