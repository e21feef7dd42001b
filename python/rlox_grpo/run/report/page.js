"use strict";
// Draws each .plot with uPlot. Names of curves come from the run: they are in the page as text, and never enter here.
const FONT = "12px system-ui, sans-serif";
const theme = getComputedStyle(document.documentElement);
const color = (name) => () => theme.getPropertyValue(name).trim();
const plots = new Map();

const short = (value, unit) => {
  if (value === null || value === undefined) return "—";
  if (unit === "%") return `${(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  const text = size >= 1e7 || (size > 0 && size < 1e-3)
    ? Number(value.toPrecision(3)).toExponential().replace("e+", "e")
    : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  return unit ? `${text} ${unit}` : text;
};

const stacked = (series) => {
  const totals = [];
  for (const { values } of series) {
    const below = totals.at(-1);
    totals.push(values.map((value, k) => (value ?? 0) + (below ? below[k] : 0)));
  }
  return totals;
};

// The curves of a chart, first to last as they are drawn: [values, uPlot's options, number in the legend].
const curvesOf = ({ kind, series, steps, spansGaps }) => {
  const line = (k, values, options) => [values, { stroke: color(`--s${k % 8}`), width: 2, spanGaps: spansGaps, ...options }, k];
  const dots = (k) => ({ show: kind === "dots" || steps.length <= 10, size: 6, fill: color(`--s${k % 8}`) });
  if (kind === "stack") {
    // The whole first, so that each part covers what is above it.
    return stacked(series).map((total, k) => line(k, total, { fill: color(`--s${k % 8}`), points: { show: false } })).reverse();
  }
  const raw = series.map(({ values, means }, k) => line(k, values, means ? { alpha: 0.35, width: 1, points: { show: false } } : { points: dots(k) }));
  const means = series.flatMap(({ means }, k) => (means ? [line(k, means, { points: { show: false } })] : []));
  // The limits of intervals are two lines without a stroke, one after the other, between which uPlot fills a band.
  const hidden = { stroke: "transparent", width: 0, points: { show: false } };
  const limits = series.flatMap(({ low, high }, k) => (low ? [line(k, high, hidden), line(k, low, hidden)] : []));
  return [...limits, ...raw, ...means];
};

const bandsOf = ({ series }) => series.flatMap(({ low }, k) => (low ? [k] : []))
  .map((k, band) => ({ series: [2 * band + 1, 2 * band + 2], fill: () => `${color(`--s${k % 8}`)()}26` }));

const draw = (plot) => {
  const chart = JSON.parse(plot.dataset.chart);
  const { first, last, unit, steps, series, fromZero } = chart;
  const curves = curvesOf(chart);
  const figure = plot.closest("figure");
  const buttons = [...figure.querySelectorAll(".legend button")];
  const numbers = buttons.map((button) => button.querySelector("b"));
  const lasts = numbers.map((number) => number.textContent);
  const at = figure.querySelector(".at");
  const show = ({ cursor: { idx } }) => {
    const away = idx === null || idx === undefined;
    at.textContent = away ? "" : `step ${steps[idx].toLocaleString("en")}`;
    numbers.forEach((number, k) => { number.textContent = away ? lasts[k] : short(series[k].values[idx], unit); });
  };
  const whole = first < last ? [first, last] : [first - 1, last + 1];
  const range = { min: { pad: 0.08, soft: 0, mode: fromZero ? 1 : 3 }, max: { pad: 0.08, soft: 0, mode: 3 } };
  const axis = { stroke: color("--quiet"), font: FONT, ticks: { show: false }, grid: { stroke: color("--grid"), width: 1 } };
  const width = plot.clientWidth;
  const drawn = new uPlot({
    width, height: 210, legend: { show: false },
    // One pointer and one zoom for all charts. Drag to zoom in on steps; double click to zoom out.
    cursor: { sync: { key: "steps", scales: ["x", null], setSeries: false }, y: false, points: { size: 7 } },
    scales: {
      x: { time: false, range: (_, low, high) => (low === steps[0] && high === steps.at(-1) ? whole : [low, high]) },
      // Of values that are all 0, uPlot would make an axis up to 100, which is 10,000%.
      y: { range: (_, low, high) =>
        low === null ? [null, null] : low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, range) },
    },
    axes: [
      { ...axis, size: 28, incrs: [1, 2, 5].flatMap((k) => [...Array(13).keys()].map((power) => k * 10 ** power)).sort((a, b) => a - b),
        values: (_, ticks) => ticks.map((tick) => tick.toLocaleString("en")) },
      { ...axis, size: 62, space: 36, values: (_, ticks) => ticks.map((tick) => short(tick, unit).replace(".0%", "%")) },
    ],
    series: [{}, ...curves.map(([, options]) => options)],
    bands: bandsOf(chart),
    hooks: { setCursor: [show] },
  }, [steps, ...curves.map(([values]) => values)], plot);
  buttons.forEach((button, k) => button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    curves.forEach(([, , own], place) => { if (own === k) drawn.setSeries(place + 1, { show: shown }); });
  }));
  return drawn;
};

// A chart is drawn once it has a width, which it has not while its section is closed.
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect: { width } } of entries) {
    if (width === 0) continue;
    if (plots.has(target)) plots.get(target).setSize({ width, height: 210 });
    else plots.set(target, draw(target));
  }
});
document.querySelectorAll(".plot").forEach((plot) => resized.observe(plot));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((drawn) => drawn.redraw()));
