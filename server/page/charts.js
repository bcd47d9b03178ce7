// Lines on canvases: figures of the last minutes, and the hit rate over memory.

import { bytes, colour, el, percent, sharp, table } from "./parts.js";

const MINUTES = 3;
const SPANS = [[20, "last 20 s"], [60, "last minute"], [60 * MINUTES, `last ${MINUTES} minutes`]]; // seconds
const GAP_S = 2; // without a value, from which a line is broken
const [SPARK_WIDTH, SPARK_HEIGHT] = [220, 44]; // CSS pixels
const CURVE_HEIGHT = 220;
const DASHES = [[], [6, 4], [2, 3]]; // lines differ without their colours, too
const SPOKEN_MS = 5000; // between two changes of a chart's description

// A line of the last minutes. most: the top of the scale, or null for the largest value.
export function spark(name, words, most = null) {
  const canvas = el("canvas", { class: "panes-spark", role: "img", "aria-label": name });
  const now = el("output", { class: "panes-now", text: "–" });
  const scale = el("span", { class: "panes-span" });
  const node = el("figure", { class: "panes-figure" },
    el("figcaption", {}, `${name} `, now, " ", scale), canvas);
  let points = [], told = 0;

  function add(time, value) {
    points.push([time, value]);
    while (points.length && points[0][0] < time - 60 * MINUTES) points.shift();
    now.textContent = words(value);
    draw(time);
  }

  function draw(time) {
    const width = Math.min(SPARK_WIDTH, node.clientWidth || SPARK_WIDTH);
    const context = sharp(canvas, width, SPARK_HEIGHT);
    context.clearRect(0, 0, width, SPARK_HEIGHT);
    const known = points.filter(([, value]) => value != null);
    const values = known.map(([, value]) => value);
    const top = most ?? Math.max(1, ...values);
    const [seconds, span] = SPANS.find(([all]) => time - points[0][0] <= all) ?? SPANS.at(-1);
    if (scale.textContent !== span) scale.textContent = span;
    const place = ([at, value]) => [width * (1 - (time - at) / seconds),
      SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * Math.min(1, value / top)];
    context.strokeStyle = context.fillStyle = colour(canvas, "--panes-line");
    context.lineWidth = 1.5;
    for (const run of runs(known)) {
      const line = run.map(place), [first, last] = [line[0][0], line.at(-1)[0]];
      context.beginPath();
      context.moveTo(first - 1.5, line[0][1]); // one value alone is seen, too
      for (const [x, y] of line) context.lineTo(x, y);
      context.stroke();
      context.lineTo(last, SPARK_HEIGHT);
      context.lineTo(first - 1.5, SPARK_HEIGHT);
      context.globalAlpha = 0.15;
      context.fill();
      context.globalAlpha = 1;
    }
    if (values.length && performance.now() - told > SPOKEN_MS) {
      told = performance.now();
      canvas.setAttribute("aria-label", `${name} in the last ${MINUTES} minutes: now `
        + `${words(values.at(-1))}, from ${words(Math.min(...values))} to ${words(Math.max(...values))}`);
    }
  }

  return { node, add, clear: () => { points = []; now.textContent = "–"; } };
}

// Return the parts of a line that no gap breaks.
function runs(points) {
  const found = [];
  for (const one of points) {
    const run = found.at(-1);
    if (run && one[0] - run.at(-1)[0] < GAP_S) run.push(one); else found.push([one]);
  }
  return found;
}

// The hit rate of each policy over the memory for experts, from /api/simulate.
export function curve() {
  const canvas = el("canvas", { class: "panes-curve", role: "img", "aria-label": "Hit rate over memory" });
  const node = el("div", {}, canvas);
  let found = null, lines = [], here = null;

  function show(document) {
    found = document;
    lines = [];
    for (const { policy, capacity, hit_rate } of found.trace.results) {
      let line = lines.find((one) => one.policy === policy);
      if (!line) lines.push(line = { policy, points: [] });
      line.points.push([capacity, hit_rate]);
    }
    node.replaceChildren(canvas, keys(), rows());
    draw();
  }

  function keys() {
    const names = { [found.policy]: `${found.policy}, used here`, belady: "belady, the best possible" };
    return el("ul", { class: "panes-legend" }, ...lines.map(({ policy }, number) =>
      el("li", {}, el("span", { class: `panes-dash panes-dash${number}` }), names[policy] || policy)));
  }

  function rows() {
    const shares = lines[0].points.map(([share]) => share);
    const columns = ["Experts in RAM", "Memory", ...lines.map(({ policy }) => policy)];
    const body = shares.map((share, number) => [percent(share), bytes(share * found.experts_bytes),
      ...lines.map(({ points }) => percent(points[number][1], 1))]);
    return el("details", {}, el("summary", { text: "The same as a table" }),
      table("Hit rate over memory", columns, body));
  }

  // Return the hit rate that replays give for a share of the experts, between measured shares.
  function promise(share) {
    const line = lines.find(({ policy }) => found && policy === found.policy);
    if (!line) return null;
    const all = [[0, 0], ...line.points, [1, line.points.at(-1)[1]]];
    const right = Math.max(1, all.findIndex(([at]) => at >= share));
    const [[x0, y0], [x1, y1]] = [all[right - 1], all[right]];
    return share >= 1 ? all.at(-1)[1] : y0 + (y1 - y0) * (share - x0) / (x1 - x0);
  }

  function draw() {
    if (!found) return;
    const width = Math.max(240, Math.min(640, node.clientWidth || 320)), height = CURVE_HEIGHT;
    const [left, low] = [44, height - 36], context = sharp(canvas, width, height);
    const x = (share) => left + (width - left - 12) * share, y = (rate) => low - (low - 10) * rate;
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colour(canvas, "--panes-text");
    context.strokeStyle = colour(canvas, "--panes-grid");
    context.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(percent(share), left - 6, y(share));
      context.textAlign = share === 1 ? "right" : share ? "center" : "left";
      context.textBaseline = "top";
      context.fillText(share ? bytes(share * found.experts_bytes) : "0", x(share), low + 6);
      context.beginPath();
      context.moveTo(left, y(share));
      context.lineTo(width - 12, y(share));
      context.stroke();
    }
    lines.forEach(({ points }, number) => {
      context.strokeStyle = colour(canvas, `--panes-line${number}`);
      context.lineWidth = 2;
      context.setLineDash(DASHES[number % DASHES.length]);
      context.beginPath();
      points.forEach(([share, rate], at) => at
        ? context.lineTo(x(share), y(rate)) : context.moveTo(x(share), y(rate)));
      context.stroke();
    });
    context.setLineDash([]);
    if (here) {
      context.fillStyle = colour(canvas, "--panes-mark");
      context.beginPath();
      context.arc(x(here.share), y(here.rate), 4, 0, 2 * Math.PI);
      context.fill();
    }
    const best = lines.map(({ policy, points }) =>
      `${policy} from ${percent(points[0][1])} to ${percent(points.at(-1)[1])}`);
    canvas.setAttribute("aria-label", `Hit rate over memory, with ${percent(lines[0].points[0][0])} to `
      + `${percent(lines[0].points.at(-1)[0])} of the experts in RAM: ${best.join(", ")}`);
  }

  new ResizeObserver(draw).observe(node);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return {
    node, show, promise,
    mark: (share, rate) => { here = rate == null ? null : { share, rate }; draw(); },
    clear: () => { found = here = null; lines = []; node.replaceChildren(); },
  };
}
