// The heat map of a model's experts: a row per layer, a column per expert.
//
// A byte per expert: bits 0 and 1 its tier (0 disk, 1 RAM, 2 GPU), bit 2 being read, bit 3 used since
// the frame before, bits 4 to 7 its heat. The colour is the tier, the brightness the heat.

import { calm, colour, el, percent, rgb, sharp, table } from "./parts.js";

const TIERS = ["on disk", "in RAM", "on the GPU"];
const COLOURS = ["--panes-disk", "--panes-ram", "--panes-gpu"];
const [LEAST_CELL, MOST_WIDTH, MOST_HEIGHT] = [4, 28, 20]; // CSS pixels
const FADE = 0.45; // of the flash of a used expert, from frame to frame
const FLASH = 0.5; // of a cell; the rest stays the colour of its tier
const NAME_MS = 5000; // between two changes of the map's description, which screen readers may speak
const ROWS_MS = 1000; // between two changes of the table

export function heatMap(announce) {
  const canvas = el("canvas", {
    class: "panes-map", tabindex: "0", role: "application",
    "aria-roledescription": "heat map", "aria-label": "Experts",
  });
  const scroll = el("div", { class: "panes-mapbox" }, canvas), place = el("div", {}, scroll);
  const told = el("p", { class: "panes-told", text: "Point at an expert, or use the arrow keys." });
  const details = el("details", {}, el("summary", { text: "The same as a table" }));
  const legend = el("ul", { class: "panes-legend" },
    ...TIERS.map((text, tier) => el("li", {}, el("span", { class: `panes-key panes-key${tier}` }), text)),
    el("li", {}, el("span", { class: "panes-key panes-key-used" }), "used now"),
    el("li", {}, el("span", { class: "panes-key panes-key-read" }), "being read"),
    el("li", { text: "stronger: used more" }));
  const small = document.createElement("canvas"); // a pixel per expert
  let frame = null, map = new Uint8Array(), glow = new Float32Array();
  let cell = null, spoken = 0, palette = null, named = -Infinity, listed = -Infinity;

  function show(next) {
    const raw = atob(next.map);
    if (!frame || raw.length !== map.length || next.experts !== frame.experts) {
      map = new Uint8Array(raw.length);
      glow = new Float32Array(raw.length);
      cell = null;
      named = listed = -Infinity;
    }
    for (let at = 0; at < raw.length; at += 1) {
      map[at] = raw.charCodeAt(at);
      glow[at] = map[at] & 8 ? 1 : glow[at] < 0.05 ? 0 : glow[at] * FADE;
    }
    frame = next;
    draw();
    describe();
  }

  function tiers(from = 0, until = map.length) {
    const counts = [0, 0, 0];
    for (let at = from; at < until; at += 1) counts[Math.min(2, map[at] & 3)] += 1;
    return counts;
  }

  function describe() {
    const [disk, ram, gpu] = tiers();
    const words = `${frame.layers} layers of ${frame.experts} experts: ${ram} in RAM, `
      + `${frame.tiers.gpu ? `${gpu} on the GPU, ` : ""}${disk} on disk`;
    const now = performance.now();
    if (now - named > NAME_MS && canvas.getAttribute("aria-label") !== words) {
      named = now;
      canvas.setAttribute("aria-label", words);
    }
    if (cell) told.textContent = words_of(cell);
    if (details.open && now - listed > ROWS_MS) tell_rows();
  }

  function words_of([row, column]) {
    const byte = map[row * frame.experts + column];
    const layer = frame.layer_numbers ? frame.layer_numbers[row] : row;
    const now = byte & 4 ? ", being read" : byte & 8 ? ", used now" : "";
    return `Layer ${layer}, expert ${column}: ${TIERS[Math.min(2, byte & 3)]}, `
      + `heat ${byte >> 4} of 15${now}`;
  }

  // Fill the table. Its cells stay, and with them the place to which the user has scrolled.
  function tell_rows() {
    const rows = [];
    listed = performance.now();
    for (let row = 0; row < frame.layers; row += 1) {
      const start = row * frame.experts, end = start + frame.experts;
      const [disk, ram, gpu] = tiers(start, end);
      let hot = start, used = 0;
      for (let at = start; at < end; at += 1) {
        if (map[at] >> 4 > map[hot] >> 4) hot = at;
        if (map[at] & 8) used += 1;
      }
      const share = percent((ram + gpu) / frame.experts);
      rows.push([`${frame.layer_numbers ? frame.layer_numbers[row] : row}`, `${gpu}`, `${ram}`,
        `${disk}`, share, `${used}`, `${hot - start} (${map[hot] >> 4})`]);
    }
    const cells = [...details.querySelectorAll("tbody :is(th, td)")], texts = rows.flat();
    if (cells.length === texts.length) {
      cells.forEach((one, at) => { if (one.textContent !== texts[at]) one.textContent = texts[at]; });
      return;
    }
    const columns = ["Layer", "GPU", "RAM", "Disk", "In memory", "Used now", "Hottest (heat)"];
    details.lastChild.replaceWith(table("Experts by layer", columns, rows));
  }

  function size() {
    const room = (place.clientWidth || 320) - 2; // without the border
    const width = Math.max(LEAST_CELL, Math.min(MOST_WIDTH, Math.floor(room / frame.experts)));
    return [width, Math.min(MOST_HEIGHT, width)];
  }

  function draw() {
    if (!frame) return;
    palette ??= {
      tiers: COLOURS.map((name) => rgb(colour(canvas, name))),
      ground: rgb(colour(canvas, "--panes-ground")),
      flash: rgb(colour(canvas, "--panes-flash")),
      read: rgb(colour(canvas, "--panes-read")),
      line: colour(canvas, "--panes-ground"),
      mark: colour(canvas, "--panes-mark"),
    };
    const { layers, experts } = frame, [width, height] = size();
    if (small.width !== experts || small.height !== layers) {
      small.width = experts;
      small.height = layers;
    }
    const image = new ImageData(experts, layers);
    for (let at = 0; at < map.length; at += 1) {
      const byte = map[at], tier = Math.min(2, byte & 3);
      const strength = 0.3 + 0.7 * (byte >> 4) / 15, shine = calm.matches ? 0 : FLASH * glow[at];
      for (let part = 0; part < 3; part += 1) {
        let value = palette.ground[part] + (palette.tiers[tier][part] - palette.ground[part]) * strength;
        if (byte & 4) value = palette.read[part];
        image.data[4 * at + part] = value + (palette.flash[part] - value) * shine;
      }
      image.data[4 * at + 3] = 255;
    }
    small.getContext("2d").putImageData(image, 0, 0);
    const context = sharp(canvas, width * experts, height * layers);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, width * experts, height * layers);
    if (width >= 6) {
      context.fillStyle = palette.line;
      for (let x = 1; x <= experts; x += 1) context.fillRect(x * width - 1, 0, 1, height * layers);
      for (let y = 1; y <= layers; y += 1) context.fillRect(0, y * height - 1, width * experts, 1);
    }
    if (cell) {
      context.strokeStyle = palette.mark;
      context.lineWidth = 2;
      context.strokeRect(cell[1] * width, cell[0] * height, width, height);
    }
  }

  function choose(row, column) {
    cell = [Math.max(0, Math.min(frame.layers - 1, row)), Math.max(0, Math.min(frame.experts - 1, column))];
    told.textContent = words_of(cell);
    draw();
  }

  function point(event) {
    if (!frame) return;
    const box = canvas.getBoundingClientRect(), [width, height] = size();
    choose(Math.floor((event.clientY - box.top) / height), Math.floor((event.clientX - box.left) / width));
  }

  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    if (!frame) return;
    const [row, column] = cell || [0, 0], move = moves[event.key];
    if (move) choose(...(cell ? [row + move[0], column + move[1]] : [0, 0]));
    else if (event.key === "Home") choose(row, 0);
    else if (event.key === "End") choose(row, frame.experts - 1);
    else return;
    event.preventDefault();
    const [width, height] = size();
    if (scroll.scrollLeft > cell[1] * width) scroll.scrollLeft = cell[1] * width;
    const right = (cell[1] + 1) * width - scroll.clientWidth;
    if (scroll.scrollLeft < right) scroll.scrollLeft = right;
    if (scroll.scrollTop > cell[0] * height) scroll.scrollTop = cell[0] * height;
    const low = (cell[0] + 1) * height - scroll.clientHeight;
    if (scroll.scrollTop < low) scroll.scrollTop = low;
    clearTimeout(spoken);
    spoken = setTimeout(() => announce(told.textContent), 250);
  });
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  details.append(el("p"));
  details.addEventListener("toggle", () => details.open && frame && tell_rows());
  new ResizeObserver(draw).observe(place);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette = null;
    draw();
  });

  return { nodes: [place, told, legend, details], show };
}
