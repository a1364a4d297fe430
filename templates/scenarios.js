"use strict";
(() => {
  const source = document.getElementById("paro-scenarios");
  const tools = document.getElementById("scenario-tools"), told = document.getElementById("scenario-told");
  if (!source || !tools || !told) return;
  const all = JSON.parse(source.textContent);
  const make = (tag, values, text) => { const made = document.createElement(tag); Object.assign(made, values); if (text !== undefined) made.textContent = text; return made; };
  const time = (us) => { const [value, unit] = us >= 1e6 ? [us / 1e6, "s"] : us >= 1e3 ? [us / 1e3, "ms"] : [us, "us"]; return `${Number(value.toPrecision(3))} ${unit}`; };
  const line = (name, step) => step ? `${name}: ${time(step[1])} (${time(step[0])} to ${time(step[2])})` : `${name}: its groups do not fit these nodes`;
  const show = () => {
    const place = inputs.reduce((at, input, which) => at * all.sliders[which].values.length + Number(input.value), 0);
    const steps = [all.baseline[place], all.chosen[place]], most = Math.max(1e-9, ...steps.filter(Boolean).map((step) => step[2])), names = [`as it runs, ${all.names[0]}`, `under the plan, ${all.names[1]}`];
    told.replaceChildren(...steps.flatMap((step, which) => {
      const bar = make("div", { className: `bar bar-${which}` });
      bar.style.width = step ? `${Math.max(0.5, 100 * step[1] / most)}%` : "0";
      return [make("p", {}, line(names[which], step)), bar];
    }));
    if (steps[0] && steps[1]) told.append(make("p", { className: "gain" }, `speed-up ${(steps[0][1] / steps[1][1]).toFixed(2)}x`));
  };
  const inputs = all.sliders.map((slider) => {
    const label = make("label", {}, `${slider.name} `), input = make("input", { type: "range", min: 0, max: slider.values.length - 1, step: 1 }), value = make("span", {});
    input.value = slider.at;
    const say = () => { value.textContent = ` ${slider.values[input.value]}${Number(input.value) === slider.at ? " (now)" : ""}`; input.setAttribute("aria-valuetext", slider.values[input.value]); };
    input.addEventListener("input", () => { say(); show(); });
    say();
    label.append(input, value);
    if (slider.values.length > 1) tools.append(label);
    return input;
  });
  told.setAttribute("aria-live", "polite");
  show();
  document.querySelectorAll("details.js-closed").forEach((box) => { box.open = false; });
})();
