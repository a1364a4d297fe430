"use strict";
(() => {
  const root = document.documentElement;
  const remember = (value) => { try { localStorage.setItem("paro-theme", value); } catch (error) { root.dataset.unsaved = "1"; } };
  document.querySelectorAll("[data-theme-toggle]").forEach((button) => button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    remember(root.dataset.theme);
  }));
  document.querySelectorAll("table[data-sortable] th").forEach((head) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.textContent = "";
    head.append(button);
    button.addEventListener("click", () => {
      const table = head.closest("table");
      const column = [...head.parentNode.children].indexOf(head);
      const down = head.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => { const cell = row.children[column]; const raw = cell.dataset.sort ?? cell.textContent; const number = Number(raw); return raw !== "" && !Number.isNaN(number) ? number : raw; };
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => { const x = key(a), y = key(b); const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)); return down ? -order : order; });
      table.tBodies[0].append(...rows);
    });
  });
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", () => {
    const table = document.getElementById(button.dataset.copy);
    const quote = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    const text = [...table.rows].map((row) => [...row.cells].map((cell) => quote(cell.dataset.sort ?? cell.textContent.trim())).join(",")).join("\n");
    navigator.clipboard.writeText(text).then(() => { button.textContent = "copied"; }, () => { button.textContent = "copy failed"; });
  }));
  document.querySelectorAll("[data-more]").forEach((button) => button.addEventListener("click", () => {
    const whole = document.getElementById(button.dataset.more).classList.toggle("whole");
    button.setAttribute("aria-expanded", String(whole));
    button.textContent = whole ? "show fewer" : "show all";
  }));
  const open = () => { const target = location.hash && document.getElementById(location.hash.slice(1)); if (target) { const box = target.closest("details"); if (box) box.open = true; target.scrollIntoView(); } };
  addEventListener("hashchange", open);
  open();
})();
