// Sorts tables by a click on a header, copies commands, and opens everything for the printer.
"use strict";
(() => {
  function sortBy(table, column, button) {
    const head = button.parentElement;
    const body = table.tBodies[0], rows = [...body.rows];
    const values = new Map(rows.map((row) => [row, row.cells[column].dataset.value]));
    const known = rows.filter((row) => values.get(row) !== "");
    const numeric = known.every((row) => !Number.isNaN(Number(values.get(row))));
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric; // numbers start with the largest
    const compare = (a, b) => (numeric ? a - b : a.localeCompare(b)) * (down ? -1 : 1);
    known.sort((a, b) => compare(values.get(a), values.get(b)));
    body.append(...known, ...rows.filter((row) => values.get(row) === "")); // the unknown come last
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  function makeSortable(table) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const look = { type: "button", title: "Sort by this column" };
      const button = Object.assign(document.createElement("button"), look);
      button.append(...head.childNodes);
      button.addEventListener("click", () => sortBy(table, column, button));
      head.append(button);
    });
  }

  async function copy(button) {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // no clipboard for this page: select the text, which the old way copies
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  document.querySelectorAll("table.sortable").forEach(makeSortable);
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => copy(button));
  }
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((part) => { part.open = true; });
  });
})();
