"use strict";
(() => {
  const source = document.getElementById("paro-timeline");
  const tools = document.getElementById("timeline-tools");
  const frame = document.querySelector("[aria-labelledby=chart-timeline-t]");
  if (!source || !tools || !frame) return;
  const all = JSON.parse(source.textContent), svg = frame.querySelector("svg");
  const [LEFT, WIDTH, ROW] = [118, 832, 30];
  const make = (tag, values, text) => { const made = document.createElement(tag); Object.assign(made, values); if (text !== undefined) made.textContent = text; return made; };
  const draw = (tag, values, text) => { const made = document.createElementNS(svg.namespaceURI, tag); for (const [name, value] of Object.entries(values)) made.setAttribute(name, value); if (text !== undefined) made.textContent = text; return made; };
  const time = (units) => { const us = units * all.unit_us[step.value], sign = us < 0 ? "-" : "", size = Math.abs(us); const [value, unit] = size >= 1e6 ? [size / 1e6, "s"] : size >= 1e3 ? [size / 1e3, "ms"] : [size, "us"]; return `${sign}${Number(value.toPrecision(3))} ${unit}`; };
  const select = (name, options, chosen) => {
    const label = make("label", {}, `${name} `), box = make("select", {});
    options.forEach(([value, text]) => box.append(make("option", { value, selected: String(value) === String(chosen) }, text)));
    box.addEventListener("change", () => { chosenBox = null; if (box === step) move(0, end()); else show(); });
    label.append(box); tools.append(label);
    return box;
  };
  const ranks = all.ranks.map((rank) => [rank, String(rank)]);
  const step = select("step", all.steps.map((name, place) => [place, name]), all.step);
  const rank = select("rank", ranks, all.first);
  const beside = select("beside it", [["", "no other"], ...ranks], all.beside ?? "");
  const hidden = new Set();
  all.lanes.forEach((lane) => {
    const label = make("label", {}), box = make("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => { if (box.checked) hidden.delete(lane); else hidden.add(lane); show(); });
    label.append(box, ` ${lane}`); tools.append(label);
  });
  let low = 0, high = 0, chosenBox = null, rows = [];
  const end = () => Math.max(...all.shown.filter((item) => item.step === Number(step.value)).map((item) => item.shift + item.wall));
  const move = (from, to) => { const whole = end(), span = Math.min(whole, Math.max(to - from, whole / 2000)); low = Math.max(0, Math.min(from, whole - span)); high = low + span; show(); };
  const zoom = (factor, at = (low + high) / 2) => move(at - (at - low) * factor, at + (high - at) * factor);
  const button = (text, name, act) => { const made = make("button", { type: "button", className: "tool" }, text); made.setAttribute("aria-label", name); made.addEventListener("click", act); tools.append(made); };
  button("+", "zoom in", () => zoom(0.5));
  button("−", "zoom out", () => zoom(2));
  button("◀", "earlier", () => move(low - (high - low) / 4, high - (high - low) / 4));
  button("▶", "later", () => move(low + (high - low) / 4, high + (high - low) / 4));
  button("whole step", "whole step", () => move(0, end()));
  const told = make("output", { className: "how" }, "Point at a box, or focus the picture: + and - zoom, arrows move, . and , go from box to box.");
  told.setAttribute("aria-live", "polite");
  frame.after(told);
  const tell = (box) => { told.textContent = `rank ${box.rank}, ${box.lane}: ${box.label}, ${time(box.length)} from ${time(box.start)} on`; };
  const show = () => {
    const lanes = all.lanes.filter((lane) => !hidden.has(lane));
    const shown = [...new Set([rank.value, beside.value])].filter((value) => value !== "").map((value) => all.shown.find((item) => item.rank === Number(value) && item.step === Number(step.value))).filter(Boolean);
    const scale = WIDTH / (high - low), parts = [];
    let y = 8; rows = [];
    for (const item of shown) {
      if (shown.length > 1) { parts.push(draw("text", { class: "rank", x: 0, y: y + 20 }, `rank ${item.rank}`)); y += ROW; }
      lanes.forEach((lane, place) => parts.push(draw("text", { class: "label", x: LEFT - 6, y: y + place * ROW + 19, "text-anchor": "end" }, lane)));
      const reached = {};
      for (let i = 0; i < item.boxes.length; i += 4) {
        const lane = all.lanes[item.boxes[i]], place = lanes.indexOf(lane), start = item.boxes[i + 1] + item.shift, length = item.boxes[i + 2];
        if (place < 0 || start > high || start + length < low) continue;
        const from = LEFT + Math.max(0, (start - low) * scale), to = LEFT + Math.min(WIDTH, (start + length - low) * scale), box = { rank: item.rank, lane, label: all.labels[item.boxes[i + 3]], start, length };
        rows.push(box);
        if (to <= (reached[lane] ?? -1) + 0.5 && to - from < 1) continue;
        reached[lane] = to;
        const drawn = draw("rect", { class: `s-${lane}${chosenBox && chosenBox.start === start && chosenBox.lane === lane && chosenBox.rank === item.rank ? " chosen-box" : ""}`, x: from.toFixed(1), y: y + place * ROW + 3, width: Math.max(0.6, to - from).toFixed(1), height: ROW - 6 });
        drawn.addEventListener("pointerenter", () => tell(box));
        parts.push(drawn);
      }
      y += ROW * lanes.length;
    }
    for (let tick = 0; tick <= 4; tick += 1) {
      const x = LEFT + WIDTH * tick / 4;
      parts.unshift(draw("line", { class: "grid", x1: x, x2: x, y1: 6, y2: y }));
      parts.push(draw("text", { class: "tick", x, y: y + 14, "text-anchor": tick === 4 ? "end" : "middle" }, time(low + (high - low) * tick / 4)));
    }
    svg.setAttribute("viewBox", `0 0 960 ${y + 24}`);
    svg.replaceChildren(...svg.querySelectorAll(":scope > title, :scope > desc"), ...parts);
  };
  const go = (by) => {
    rows.sort((a, b) => a.start - b.start || a.rank - b.rank);
    const at = chosenBox ? rows.findIndex((box) => box.start === chosenBox.start && box.lane === chosenBox.lane && box.rank === chosenBox.rank) : by > 0 ? -1 : rows.length;
    const next = rows[at + by];
    if (next) { chosenBox = next; tell(next); show(); }
  };
  const width = () => high - low;
  const keys = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(low - width() / 8, high - width() / 8), ArrowRight: () => move(low + width() / 8, high + width() / 8), ".": () => go(1), ",": () => go(-1), "0": () => move(0, end()) };
  frame.addEventListener("keydown", (event) => { const act = keys[event.key]; if (act && !event.ctrlKey && !event.metaKey) { event.preventDefault(); act(); } });
  const at = (event) => { const box = svg.getBoundingClientRect(); return low + Math.min(1, Math.max(0, ((event.clientX - box.left) / box.width * 960 - LEFT) / WIDTH)) * width(); };
  svg.addEventListener("wheel", (event) => { if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event)); } }, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", (event) => { held = { x: event.clientX, low, high }; });
  addEventListener("pointermove", (event) => { if (held) { const by = (held.x - event.clientX) / svg.getBoundingClientRect().width * 960 / WIDTH * (held.high - held.low); move(held.low + by, held.high + by); } });
  ["pointerup", "pointercancel"].forEach((name) => addEventListener(name, () => { held = null; }));
  high = end();
  show();
})();
