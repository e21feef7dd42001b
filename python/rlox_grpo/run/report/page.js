"use strict";
// Values under the pointer. Names come from the run, so they enter the page as text and never as HTML.
const short = (value, unit) =>
  value === null ? "—" : unit === "%" ? `${(100 * value).toFixed(1)}%` : `${Number(value.toPrecision(4))} ${unit}`;

const element = (tag, className, text = "") =>
  Object.assign(document.createElement(tag), { className, textContent: text });

for (const plot of document.querySelectorAll(".plot")) {
  const { first, last, unit, steps, series } = JSON.parse(plot.dataset.chart);
  const cursor = plot.appendChild(element("div", "cursor"));
  const tip = plot.appendChild(element("div", "tip"));
  const hide = () => { cursor.hidden = tip.hidden = true; };
  hide();
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const wanted = first + ((event.clientX - box.left) / box.width) * (last - first);
    let place = 0;
    steps.forEach((step, k) => { if (Math.abs(step - wanted) < Math.abs(steps[place] - wanted)) place = k; });
    const left = (100 * (steps[place] - first)) / Math.max(1, last - first);
    tip.replaceChildren(element("div", "quiet", `step ${steps[place].toLocaleString("en")}`));
    series.forEach(({ name, values }, k) => {
      const row = tip.appendChild(element("div", ""));
      row.append(element("i", `swatch s${k % 8}`), element("bdi", "", name), " ", element("b", "", short(values[place], unit)));
    });
    cursor.style.left = `${left}%`;
    tip.style.left = left < 50 ? `calc(${left}% + 10px)` : "auto";
    tip.style.right = left < 50 ? "auto" : `calc(${100 - left}% + 10px)`;
    cursor.hidden = tip.hidden = false;
  });
}
