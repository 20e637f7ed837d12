// Draws each element with `data-chart`: a line by version, with its 95 % interval, in the colors of the page.
(() => {
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const format = { share: (value) => `${Math.round(100 * value)} %`, number: (value) => Number(value.toPrecision(3)).toLocaleString("en") };

  function options(chart, element) {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const line = { label: chart.label, stroke: color("--accent"), width: 2, points: { size: 6, fill: color("--accent") }, spanGaps: true };
    const bound = { stroke: "transparent", points: { show: false }, spanGaps: true };
    const [low, high] = chart.limits;
    return {
      width: Math.max(element.clientWidth, 200),
      height: 200,
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: (u, min, max) => [min - 0.5, max + 0.5] }, y: { range: (u, min, max) => [low ?? min, high ?? (max > 0 ? max * 1.1 : 1)] } },
      axes: [
        { ...axis, size: 30, grid: { show: false }, splits: (u, i, min, max) => steps(min, max), values: (u, values) => values.map((value) => `v${value}`) },
        { ...axis, size: 52, values: (u, values) => values.map(format[chart.unit]) },
      ],
      series: [{}, line, ...(chart.low ? [bound, bound] : [])],
      bands: chart.low ? [{ series: [3, 2], fill: color("--accent-soft") }] : [],
    };
  }

  function steps(min, max) {
    const first = Math.ceil(min), last = Math.floor(max), step = Math.max(1, Math.ceil((last - first) / 12));
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, index) => first + index * step);
  }

  function draw(element) {
    const chart = JSON.parse(element.dataset.chart);
    element.replaceChildren();
    if (chart.x.length === 0) return;
    const data = [chart.x, chart.values, ...(chart.low ? [chart.low, chart.high] : [])];
    element.plot = new uPlot(options(chart, element), data, element);
  }

  const drawAll = (root) => root.querySelectorAll("[data-chart]").forEach(draw);
  document.addEventListener("DOMContentLoaded", () => drawAll(document));
  document.addEventListener("htmx:after:swap", () => document.querySelectorAll("[data-chart]:not(:has(canvas))").forEach(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(document));
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => drawAll(document), 120);
  });
})();
